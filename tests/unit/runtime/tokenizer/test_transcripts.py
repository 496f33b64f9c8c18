"""Remembered transcripts against an oracle that keeps the texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.runtime.tokenizer.transcripts import Transcripts

SPACE = b"tenant"
small = st.text("abé", max_size=8)


@given(known=st.dictionaries(small, st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=8), text=small)
@settings(max_examples=300)
def test_the_longest_known_transcript_that_begins_a_text_is_reused(known: dict[str, list[int]], text: str) -> None:
    transcripts = Transcripts()
    for prefix, ids in known.items():
        transcripts.remember(SPACE, prefix, ids)
    best = max((prefix for prefix in known if prefix and text.startswith(prefix)), key=len, default=None)
    ids, rest = transcripts.reuse(SPACE, text)
    if best is None:
        assert (ids.tolist(), rest) == ([], text)
    else:
        assert (ids.tolist(), rest) == (known[best], text[len(best) :])


def test_each_turn_of_a_chat_reuses_all_that_the_turn_before_computed() -> None:
    transcripts = Transcripts()
    text, ids = "", []
    for turn in range(20):
        text += f"<user>question {turn}<assistant>"
        known, rest = transcripts.reuse(SPACE, text)
        assert rest == (f"<user>question {turn}<assistant>")
        assert known.tolist() == ids
        ids = [*ids, turn]  # stands for the ids of the rest and of the answer
        text += f"answer {turn}"
        transcripts.remember(SPACE, text, ids)


def test_namespaces_do_not_see_each_other() -> None:
    transcripts = Transcripts()
    transcripts.remember(b"a", "secret", [1])
    assert transcripts.reuse(b"b", "secret")[1] == "secret"
    transcripts.forget(b"a")
    assert transcripts.reuse(b"a", "secret")[1] == "secret"
    assert len(transcripts) == 0 and transcripts.num_bytes == 0


def test_the_newest_ids_of_a_text_win() -> None:
    transcripts = Transcripts()
    transcripts.remember(SPACE, "text", [1, 2])
    transcripts.remember(SPACE, "text", [3])
    assert transcripts.reuse(SPACE, "text more")[0].tolist() == [3]
    assert len(transcripts) == 1


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    transcripts = Transcripts(max_bytes=10_000)
    for i in range(100):
        transcripts.remember(SPACE, f"conversation {i}.", np.arange(100))
        transcripts.reuse(SPACE, "conversation 0.")
        assert transcripts.num_bytes <= 10_000
    assert len(transcripts.reuse(SPACE, "conversation 0.")[0]) == 100
    assert len(transcripts.reuse(SPACE, "conversation 1.")[0]) == 0
    assert len(transcripts.reuse(SPACE, "conversation 99.")[0]) == 100


def test_what_is_larger_than_the_bound_is_not_remembered() -> None:
    transcripts = Transcripts(max_bytes=1000)
    transcripts.remember(SPACE, "a", range(10_000))
    transcripts.remember(SPACE, "", [1])
    assert len(transcripts) == 0


def test_the_ids_are_a_copy_of_what_was_given() -> None:
    transcripts = Transcripts()
    ids = np.array([1, 2, 3])
    transcripts.remember(SPACE, "abc", ids)
    ids[0] = 99
    assert transcripts.reuse(SPACE, "abc")[0].tolist() == [1, 2, 3]


def test_text_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    transcripts = Transcripts()
    transcripts.remember(SPACE, "my secret marker", [1])
    assert "secret" not in repr(vars(transcripts))


@given(st.lists(st.tuples(st.booleans(), small, st.sampled_from([b"x", b"y"])), max_size=40))
@settings(max_examples=100)
def test_the_books_balance_after_any_history(steps: list[tuple[bool, str, bytes]]) -> None:
    transcripts = Transcripts(max_bytes=2000)
    for remember, text, space in steps:
        if remember:
            transcripts.remember(space, text, [1] * len(text))
        else:
            transcripts.reuse(space, text)
        entries = transcripts._entries
        assert transcripts.num_bytes == sum(ids.nbytes + 400 for _, ids in entries.values()) <= 2000
        for name in (b"x", b"y"):
            lengths = sorted(length for (owner, _), (length, _) in entries.items() if owner == name)
            assert transcripts._lengths.get(name, []) == lengths
