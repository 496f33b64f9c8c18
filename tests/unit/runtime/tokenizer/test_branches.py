"""Token logs against a list of (id, origin, op); pieces against joint encoding."""

import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.service import vocabulary_of
from support.tokenizers import byte_bpe_tokenizer

from anabranch.runtime.messages import as_ints, ints
from anabranch.runtime.tokenizer.branches import TokenLog, encode_pieces
from anabranch.runtime.tokenizer.vocabulary import Part

origins = st.sampled_from(["cached", "computed", "generated"])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 9), max_size=5), origins, st.integers(0, 2)),
        st.tuples(st.just("cut"), st.integers(0, 20)),
        st.tuples(st.just("fork"), st.integers(0, 3)),
    ),
    max_size=25,
)


@given(actions)
@settings(max_examples=300, deadline=None)
def test_a_log_and_its_copies_are_lists_of_tokens(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    logs, lists = [TokenLog()], [[]]  # type: ignore[var-annotated]
    at = 0
    for step in steps:
        if step[0] == "append":
            logs[at].append(ints(step[1]), step[2], step[3])
            lists[at] = [*lists[at], *((i, step[2], step[3]) for i in step[1])]
        elif step[0] == "cut":
            length = min(step[1], len(lists[at]))
            logs[at].cut(length)
            lists[at] = lists[at][:length]
        else:
            logs.append(logs[at].copy())
            lists.append(lists[at])
            at = min(step[1], len(logs) - 1)
        for log, tokens in zip(logs, lists):
            assert len(log) == len(tokens)
            for start in range(len(tokens) + 1):
                assert as_ints(log.since(start)).tolist() == [t[0] for t in tokens[start:]]
            spans = log.spans()
            assert [(s.origin, s.op) for s in spans for _ in range(s.start, s.stop)] == [t[1:] for t in tokens]
            assert all((a.origin, a.op) != (b.origin, b.op) for a, b in pairwise(spans))


def test_a_fork_costs_the_same_at_any_length() -> None:
    def copies(length: int) -> float:
        log = TokenLog()
        log.append(ints(range(length)), "computed", None)
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(1000):
                log.copy()
            best = min(best, time.perf_counter() - began)
        return best

    assert copies(1_000_000) < 20 * copies(10)


def test_a_chain_of_many_runs_can_be_walked_and_dropped() -> None:
    log = TokenLog()
    for i in range(100_000):
        log.append(ints([i]), "generated", i)
    assert as_ints(log.since(99_990)).tolist() == list(range(99_990, 100_000)) and len(log.spans()) == 100_000
    log.cut(0)
    assert len(log) == 0


@given(st.lists(st.one_of(st.text(st.sampled_from("ab <|im_end|>é"), max_size=6), st.integers(0, 400)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_neighbouring_text_is_one_text_and_ids_stay_ids(given_pieces: list[str | int]) -> None:
    vocabulary = VOCABULARY
    pieces = [Part(p) if isinstance(p, str) else ints([p]) for p in given_pieces]
    expected: list[int] = []
    joined = ""
    for piece in [*given_pieces, 0]:
        if isinstance(piece, str):
            joined += piece
            continue
        expected += vocabulary.encode_plain(joined, at_start=not expected)
        expected.append(piece)
        joined = ""
    got = as_ints(encode_pieces(vocabulary, pieces, at_start=True, previous=None)).tolist()
    assert got == expected[:-1]


VOCABULARY = vocabulary_of(byte_bpe_tokenizer())
