import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.radix.manager import KVManager
from anabranch.runtime.messages import SamplingParams
from anabranch.runtime.scheduler.branches import BranchRecord
from anabranch.runtime.scheduler.policy import Program
from anabranch.runtime.scheduler.prefixes import Frontier, common_prefix_len
from anabranch.runtime.scheduler.requests import Request

MANAGER = KVManager(8, 4)


def make_request(number: int, tokens: list[int], namespace: bytes = b"n") -> Request:
    kv = MANAGER.open(namespace)
    MANAGER.append(kv, tokens)
    record = BranchRecord(number, Program(0), namespace, 0, 0, number, kv)
    request = Request(
        request_id=number, branch=record, seq=number, arrival=0.0, params=SamplingParams(), start_len=0,
        prompt_len=len(tokens), limit=len(tokens) + 4,
    )  # fmt: skip
    request.fill_len = len(tokens)
    return request


@given(st.lists(st.integers(0, 1), max_size=8), st.lists(st.integers(0, 1), max_size=8))
def test_the_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix_len(np.array(a, np.int32), np.array(b, np.int32)) == expected


def test_whoever_shares_what_comes_next_is_told_how_much() -> None:
    frontier, running = Frontier(), make_request(1, [1, 2, 3, 4, 5, 6])
    frontier.move(running, 2)
    assert frontier.blocker(make_request(2, [1, 2, 3, 4, 9, 9]), 2) == (running, 4)


def test_a_request_that_parts_where_the_other_has_come_to_does_not_wait() -> None:
    frontier, running = Frontier(), make_request(1, [1, 2, 3, 4])
    frontier.move(running, 2)
    assert frontier.blocker(make_request(2, [1, 2, 9, 9]), 2) is None
    assert frontier.blocker(make_request(3, [1, 2, 3, 4]), 1) is None, "what it has is not what is cached now"


def test_the_same_next_token_after_another_beginning_is_no_common_prefix() -> None:
    frontier, running = Frontier(), make_request(1, [1, 2, 3, 4])
    frontier.move(running, 2)
    assert frontier.blocker(make_request(2, [7, 7, 3, 4]), 2) is None


def test_other_namespaces_never_meet() -> None:
    frontier, running = Frontier(), make_request(1, [1, 2, 3, 4])
    frontier.move(running, 1)
    assert frontier.blocker(make_request(2, [1, 2, 3, 4], b"other"), 1) is None


def test_a_request_leaves_the_index_when_it_has_published_everything() -> None:
    frontier, running = Frontier(), make_request(1, [1, 2, 3, 4])
    frontier.move(running, 0)
    assert len(frontier) == 1
    frontier.move(running, 4)
    assert len(frontier) == 0 and running.frontier is None
    frontier.remove(running)
    assert len(frontier) == 0
