from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.radix.errors import TokenError
from anabranch.radix.tokens import MAX_DEPTH, TokenLog

actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=40)),
        st.tuples(st.just("fork"), st.integers(0, 9), st.none()),
        st.tuples(st.just("truncate"), st.integers(0, 9), st.integers(0, 100)),
        st.tuples(st.just("close"), st.integers(0, 9), st.none()),
    ),
    max_size=60,
)


@given(actions)
def test_logs_that_share_segments_read_like_separate_lists(script: list) -> None:
    pairs: list[tuple[TokenLog, list[int]]] = [(TokenLog(), [])]
    for action, which, argument in script:
        log, tokens = pairs[which % len(pairs)]
        if action == "append":
            log.append(argument)
            tokens.extend(argument)
        elif action == "fork":
            pairs.append((log.fork(), list(tokens)))
        elif action == "truncate":
            length = argument % (len(tokens) + 1)
            log.truncate(length)
            del tokens[length:]
        elif len(pairs) > 1:
            log.close()
            pairs.remove((log, tokens))
        for log, tokens in pairs:
            assert log.length == len(tokens)
            assert log.read(0, log.length).tolist() == tokens
            for position in range(0, log.length, 7):
                assert log.at(position) == tokens[position]
            middle = len(tokens) // 2
            assert log.read(middle, log.length).tolist() == tokens[middle:]


def test_a_fork_shares_its_tokens_and_the_first_to_go_on_writes_in_place() -> None:
    log = TokenLog()
    log.append(list(range(100)))
    first, second = log.fork(), log.fork()
    first.append([1])
    second.append([2])
    assert first._segment is log._segment and second._segment is not log._segment
    assert len(second._segment.buffer) < 100, "a fork must not copy what it shares"


def test_rolling_back_again_and_again_leaves_no_chain() -> None:
    log = TokenLog()
    log.append(list(range(50)))
    for _ in range(1000):
        log.append([1, 2, 3])
        log.truncate(50)
    assert log._segment.depth == 0


def test_a_long_line_of_forks_stays_cheap_to_read() -> None:
    log = TokenLog()
    for i in range(500):
        log.append([i])
        sibling = log.fork()
        sibling.append([0])  # takes the segment, so that the other must open its own
        log.append([i])
    assert log._segment.depth <= MAX_DEPTH
    assert log.read(0, log.length).tolist() == [i for i in range(500) for _ in range(2)]


@pytest.mark.parametrize(
    "bad", [[-1], [2**31], [1, -1], [1, 2**31], [1.5], [1.5, 2.0], ["7"], ["7", "8"], [None], [[1, 2]]]
)
def test_what_is_no_token_id_is_refused_and_changes_nothing(bad: list) -> None:
    log = TokenLog()
    log.append([1])
    with pytest.raises(TokenError, match=r"token ids must be"):
        log.append(bad)
    assert log.read(0, log.length).tolist() == [1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_arrays_of_any_integer_type_are_checked_and_not_wrapped(dtype: type) -> None:
    log = TokenLog()
    log.append(np.array([3, 4], dtype))
    assert log.read(0, 2).tolist() == [3, 4]
    if dtype is not np.int32:
        with pytest.raises(TokenError):
            log.append(np.array([0, 2**31], dtype))
