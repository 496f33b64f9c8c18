"""Stop strings and patterns over text in pieces, against oracles that look at the whole text."""

import re
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.stop_regex import MAX_PATTERN_CHARS, MAX_STATES, StopRegex
from anabranch.runtime.tokenizer.stops import StopMatch, StopMatcher, StopStrings

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def matcher(stops: list[str] = [], patterns: list[str] = [], *, keep_stop: bool = False) -> StopMatcher:  # noqa: B006
    return StopMatcher(StopStrings(stops), [StopRegex(p) for p in patterns], keep_stop=keep_stop)


def first_string(text: str, stops: list[str]) -> StopMatch | None:
    """The first stop to be complete; the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def held_by_strings(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that a stop begins with."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 12), max_size=5))
@settings(max_examples=500)
def test_stop_strings_are_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    expected = first_string(text, stops)
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    m, emitted, match = matcher(stops), "", None
    for a, b in pairwise(bounds):
        out, match = m.push(text[a:b])
        emitted += out
        if match is not None:
            break
        assert emitted == text[: b - held_by_strings(text[:b], stops)], "exactly what may become a stop is held"
    if match is None:
        out, match = m.finish()
        emitted += out
    assert match == expected
    assert emitted == (text if expected is None else text[: expected.begin])


@given(text=letters, stops=stop_lists)
@settings(max_examples=200)
def test_the_stop_itself_can_be_kept(text: str, stops: list[str]) -> None:
    m = matcher(stops, keep_stop=True)
    emitted = m.push(text)[0] + m.finish()[0]
    expected = first_string(text, stops)
    assert emitted == (text if expected is None else text[: expected.end])


def test_a_stop_string_over_several_pieces_is_never_sent() -> None:
    m = matcher(["DEFGHIJ"])
    assert [m.push(piece) for piece in ("ABC", "DEF", "G", "HI")] == [("ABC", None), ("", None), ("", None), ("", None)]
    assert m.push("J") == ("", StopMatch("DEFGHIJ", 3, 10))
    assert m.push("K") == ("", StopMatch("DEFGHIJ", 3, 10)), "nothing is read after the stop"
    assert m.finish()[0] == ""


def test_what_was_held_is_released_when_it_cannot_be_a_stop() -> None:
    m = matcher(["\n\nHuman:", "\nEND"])
    assert m.push("one\n") == ("one", None)
    assert m.push("two\n\nHu") == ("\ntwo", None)
    assert m.push("bert") == ("\n\nHubert", None)
    assert m.push("\n\nHuman") == ("", None)
    assert m.finish() == ("\n\nHuman", None)


def test_text_without_stops_passes_at_once() -> None:
    m = matcher()
    assert m.push("anything") == ("anything", None)
    assert m.finish() == ("", None)


def test_the_cost_of_stop_strings_is_linear() -> None:
    """Every stop shares a prefix with the text that a naive search would start over and over."""

    class Counting(StopStrings):
        steps = 0

        def step(self, state: int, character: str) -> int:
            Counting.steps += 1
            return super().step(state, character)

    m = StopMatcher(Counting(["a" * 200 + "b", "a" * 100 + "c"]))
    for _ in range(100):
        m.push("a" * 100)
    assert Counting.steps == 10_000


# ---------------------------------------------------------------- patterns

PATTERNS = [
    "ab", "a+b", "a*b", "(ab)+b", "a|bb", "a{2}", "a{2,3}b", "[^a]a", ".b.", "(a|ab)(b|ba)", "a.*b", "(?:aa|ab)*bb",
    "b+?a", "(?i)AB", "((a)(b))", "[ab]{3}", "a(b?)b", r"\w\w\w", "(a*)*b", "(a|a)*b",
]  # fmt: skip


def first_pattern(text: str, pattern: str) -> StopMatch | None:
    """The match that is complete first; of those, the one that begins first."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if compiled.fullmatch(text, begin, end):
                return StopMatch(pattern, begin, end)
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=letters, cut=st.integers(0, 12))
@settings(max_examples=100)
def test_patterns_are_found_wherever_the_text_is_cut(pattern: str, text: str, cut: int) -> None:
    expected = first_pattern(text, pattern)
    m = matcher(patterns=[pattern])
    emitted, match = "", None
    for piece in (text[:cut], text[cut:]):
        out, match = m.push(piece)
        emitted += out
    if match is None:
        out, match = m.finish()
        emitted += out
    assert match == expected
    assert emitted == (text if expected is None else text[: expected.begin])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_what_may_still_become_a_match_is_held(pattern: str) -> None:
    compiled = re.compile(pattern)
    extensions = ["".join(p) for n in range(1, 6) for p in product("ab", repeat=n)]
    for text in ("".join(p) for n in range(1, 6) for p in product("ab", repeat=n)):
        if first_pattern(text, pattern) is not None:
            continue
        begins = (b for b in range(len(text)) if any(compiled.fullmatch(text[b:] + more) for more in extensions))
        keep = len(text) - next(begins, len(text))
        assert matcher(patterns=[pattern]).push(text)[0] == text[: len(text) - keep], text


@pytest.mark.parametrize(
    ("pattern", "text", "begin", "end"),
    [
        (r"\d+\.", "pi is 3.14", 6, 8),
        (r"\bend\b", "the bend, the end.", 14, 17),
        (r"\bend\b", "the end", 4, 7),
        (r"^x", "xx", 0, 1),
        (r"(?m)^#", "a\n#b", 2, 3),
        (r"end$", "end of the end", 11, 14),
        (r"(?m)end$", "the end\nmore", 4, 7),
        (r"\Aab", "ab", 0, 2),
        (r"[A-Z]{2,}\s", "aB ABC d", 3, 7),
        (r"(?s)a.b", "a\nb", 0, 3),
        (r"[^\W\d]\d", "1_ é5", 3, 5),
        (r"(?i)straße", "die STRAßE", 4, 10),
        (r"(?P<name>x)y", "xy", 0, 2),
        (r"(?:yes|no)\!", "no!", 0, 3),
        (r"\x41\u00e9", "Aé", 0, 2),
    ],
)
def test_the_syntax_is_that_of_python(pattern: str, text: str, begin: int, end: int) -> None:
    for size in (1, 3, len(text)):
        m = matcher(patterns=[pattern])
        match = None
        for at in range(0, len(text), size):
            match = m.push(text[at : at + size])[1]
            if match:
                break
        assert (match or m.finish()[1]) == StopMatch(pattern, begin, end)


def test_a_dot_does_not_match_a_line_break() -> None:
    m = matcher(patterns=["a.b"])
    assert m.push("a\nb") == ("a\nb", None)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", "groupref"),
        (r"(?=a)b", "assert"),
        (r"(?<!a)b", "assert not"),
        (r"(?>a+)b", "atomic group"),
        (r"a++b", "possessive repeat"),
        (r"(?(1)a|b)", "not a valid pattern"),
        ("(", "not a valid pattern"),
        ("[a-", "not a valid pattern"),
        ("*a", "not a valid pattern"),
        ("a*", "empty text"),
        ("", "empty text"),
        ("(a|)", "empty text"),
        ("a{5000}", str(MAX_STATES)),
        ("((a{100}){100}){100}", str(MAX_STATES)),
        ("a" * (MAX_PATTERN_CHARS + 1), str(MAX_PATTERN_CHARS)),
    ],
)
def test_patterns_that_no_automaton_can_match_are_refused_with_the_reason(pattern: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopRegex(pattern)
    assert words in str(caught.value)
    assert caught.value.param == "stop_regex"


def test_a_pattern_that_ruins_backtracking_stays_linear() -> None:
    regex = StopRegex("(a|aa|a?a)*b{3}")
    search = regex.search()
    sizes = []
    for _ in range(3000):
        assert search.step("a") is None
        sizes.append(len(search._live))
    assert max(sizes) <= len(regex.states)


@given(text=letters, stops=stop_lists, pattern=st.sampled_from(PATTERNS))
@settings(max_examples=200)
def test_strings_and_patterns_together_stop_at_whichever_comes_first(text: str, stops: list[str], pattern: str) -> None:
    m = matcher(stops, [pattern])
    emitted, match = m.push(text)
    found = [f for f in (first_string(text, stops), first_pattern(text, pattern)) if f is not None]
    if not found:
        assert match is None
        return
    assert match is not None and match.end == min(f.end for f in found)
    assert emitted == text[: match.begin]
