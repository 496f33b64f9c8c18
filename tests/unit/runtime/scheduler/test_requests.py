import numpy as np
import pytest

from anabranch.runtime.messages import SamplingParams, TokenLogprobs
from anabranch.runtime.scheduler.branches import BranchRecord
from anabranch.runtime.scheduler.policy import Program
from anabranch.runtime.scheduler.requests import PromptLogprobs, Request


def make_request(prompt_len: int = 100, **fields: float) -> Request:
    record = BranchRecord(1, Program(1), b"n", 0, 0, 1)
    return Request(
        request_id=1, branch=record, seq=1, arrival=10.0, params=SamplingParams(), start_len=0,
        prompt_len=prompt_len, limit=prompt_len + 10, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def test_cached_and_computed_tokens_add_up_to_the_prompt() -> None:
    request = make_request(100)
    request.count_attached(30)
    request.count_computed(30, 64)
    request.count_computed(64, 100)
    assert (request.cached_tokens, request.computed_tokens, request.recomputed_tokens) == (30, 70, 0)


def test_what_was_computed_before_preemption_is_neither_cached_nor_computed_again() -> None:
    request = make_request(100)
    request.count_attached(30)
    request.count_computed(30, 64)
    request.count_attached(50)  # it comes back; 14 tokens were evicted meanwhile
    request.count_computed(50, 100)
    assert (request.cached_tokens, request.computed_tokens, request.recomputed_tokens) == (30, 70, 14)


def test_what_others_computed_meanwhile_is_cached() -> None:
    request = make_request(100)
    request.count_attached(0)
    request.count_computed(0, 40)
    request.count_attached(70)
    request.count_computed(70, 100)
    assert (request.cached_tokens, request.computed_tokens, request.recomputed_tokens) == (30, 70, 0)


def test_generated_tokens_computed_again_are_recomputed_only() -> None:
    request = make_request(10)
    request.count_attached(0)
    request.count_computed(0, 10)
    request.reached = 25
    request.count_attached(8)
    request.count_computed(8, 26)
    assert (request.cached_tokens, request.computed_tokens, request.recomputed_tokens) == (0, 10, 17)


def test_times_are_in_milliseconds_since_arrival() -> None:
    request = make_request()
    request.scheduled_at, request.first_token_at = 10.5, 11.0
    usage = request.usage(12.0, 3)
    assert (usage.queue_ms, usage.ttft_ms, usage.total_ms, usage.completion_tokens) == (500.0, 1000.0, 2000.0, 3)


def logprobs(*token_ids: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids, tuple(-float(t) for t in token_ids), tuple(((t,), (-0.5,)) for t in token_ids))


def test_prompt_logprobs_from_the_start_begin_with_none() -> None:
    found = PromptLogprobs(0, np.array([5, 6, 7], np.int32))
    found.add(1, logprobs(6, 7))
    assert found.result().token_ids == (5, 6, 7) and found.result().logprobs == (None, -6.0, -7.0)


def test_prompt_logprobs_known_already_are_left_out() -> None:
    found = PromptLogprobs(2, np.arange(9, dtype=np.int32))
    assert found.needs_kv_from == 1
    found.add(1, logprobs(1, 2, 3))
    found.add(2, logprobs(2, 3, 4))
    assert found.result().token_ids == (2, 3, 4) and found.next == 5


def test_a_gap_in_prompt_logprobs_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="missing"):
        PromptLogprobs(2, np.arange(9, dtype=np.int32)).add(4, logprobs(4))
