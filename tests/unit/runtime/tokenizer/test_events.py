"""The assembler against the plainest reading of the rules: decode everything, look for the first stop, cut there."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.service import vocabulary_of
from support.tokenizers import puppet_tokenizer

from anabranch.runtime.messages import GenerateParams, Produced, TokenLogprobs
from anabranch.runtime.tokenizer.events import Assembler, Piece, Whole
from anabranch.runtime.tokenizer.validation import Stops

PIECES: list[str | bytes] = ["a", "b", "ab", "ba", " c", "aab", b"\xf0\x9f", b"\x99", b"\x82", "é", b"\xff", "<|im_start|>"]
FILES, IDS = puppet_tokenizer(PIECES)
VOCABULARY = vocabulary_of(FILES)

tokens = st.lists(st.sampled_from(IDS), max_size=14)
stops = st.lists(st.sampled_from(["a", "ab", "ba", "bab", "b c", " ", "🙂", "é", "aa", "c\ufffd"]), max_size=3).map(tuple)


def assemble(
    ids: list[int], cuts: list[int], params: GenerateParams, *, forced: bool = False
) -> tuple[list[Piece], Whole, int]:
    """Pieces and the whole, the ids coming in chunks; and how many were taken before the stop showed."""
    assembler = Assembler(VOCABULARY, params, Stops(params.stop, (), {}), context=())
    pieces, at = [], 0
    for size in [*cuts, len(ids)]:
        chunk = ids[at : at + size]
        at += len(chunk)
        if not chunk or assembler.has_stopped:
            break
        lps = TokenLogprobs(tuple(chunk), tuple(-float(i) for i in chunk), tuple(((i,), (-1.0,)) for i in chunk))
        wants = params.num_top_logprobs is not None
        pieces.append(assembler.push(Produced(0, tuple(chunk), lps if wants else None, len(chunk) if forced else 0)))
    piece, whole = assembler.finish(at)
    return [*pieces, piece], whole, at


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, int] | None:
    """Begin and end of the stop that is complete first; of those complete at one place, the longest."""
    ends = [(text.find(s, max(0, end - len(s)), end), end) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    return min(ends, key=lambda found: (found[1], found[0])) if ends else None


@given(tokens, st.lists(st.integers(1, 4), max_size=6), stops, st.booleans(), st.booleans())
@settings(max_examples=600, deadline=None)
def test_text_and_tokens_are_cut_where_the_first_stop_is(
    ids: list[int], cuts: list[int], stop: tuple[str, ...], keep: bool, skip: bool
) -> None:
    params = GenerateParams(stop=stop, keep_stop_text=keep, skip_special_tokens=skip, num_top_logprobs=1)
    pieces, whole, _ = assemble(ids, cuts, params)
    full = VOCABULARY.decode(ids, skip_special_tokens=skip)
    found = first_stop(full, stop)
    expected = full if found is None else full[: found[1] if keep else found[0]]
    assert whole.text == expected
    assert (whole.matched is not None) == (found is not None)
    # The whole is the fold of the pieces.
    assert "".join(p.text for p in pieces) == whole.text
    assert tuple(i for p in pieces for i in p.token_ids) == whole.token_ids == tuple(ids[: whole.num_tokens])
    assert sum((p.logprobs.logprobs for p in pieces if p.logprobs), ()) == whole.logprobs.logprobs  # type: ignore[union-attr]
    # Kept tokens and the remainder are the text; no token reaches beyond the cut.
    if found is None:
        assert whole.num_tokens == len(ids) and whole.remainder == ""
    else:
        kept = VOCABULARY.decode(ids[: whole.num_tokens], skip_special_tokens=skip)
        assert kept + whole.remainder == whole.text
        for more in range(whole.num_tokens + 1, len(ids) + 1):
            longer = VOCABULARY.decode(ids[:more], skip_special_tokens=skip)
            assert not (expected.startswith(longer) and not longer.endswith("\ufffd")) or longer == kept


@given(tokens, st.lists(st.integers(1, 4), max_size=6), stops)
@settings(max_examples=200, deadline=None)
def test_no_part_of_a_stop_is_ever_given_out(ids: list[int], cuts: list[int], stop: tuple[str, ...]) -> None:
    pieces, whole, _ = assemble(ids, cuts, GenerateParams(stop=stop))
    given_out = ""
    for piece in pieces:
        given_out += piece.text
        assert whole.text.startswith(given_out)


@given(tokens, st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_stops_count_only_after_min_tokens(ids: list[int], least: int) -> None:
    params = GenerateParams(stop=("a", "b"), min_tokens=least)
    _, whole, _ = assemble(ids, [1] * len(ids), params)
    assert whole.text.startswith(VOCABULARY.decode(ids[: max(0, min(least - 1, whole.num_tokens))]).rstrip("\ufffd"))
    if whole.matched is not None:
        assert whole.num_tokens + 1 >= least or whole.remainder


def test_forced_tokens_are_told_from_sampled_ones() -> None:
    _, whole, _ = assemble(IDS[:3], [1, 2], GenerateParams(), forced=True)
    assert whole.forced == b"\1\1\1"
    _, whole, _ = assemble(IDS[:3], [1, 2], GenerateParams())
    assert whole.forced == b"\0\0\0"
