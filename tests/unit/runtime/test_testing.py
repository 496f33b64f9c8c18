"""The fake worker must fail loudly on each of the mistakes it is there to find."""

import numpy as np
import pytest

from anabranch.runtime.messages import SamplingParams, SharedPrefix, SlotStart, StepPlan, StepResult, as_ints, ints
from anabranch.runtime.testing import FakeWorker, VirtualClock, identity, mix, mix_all

GREEDY = SamplingParams(temperature=0.0)


def start(slot: int, prompt_len: int) -> SlotStart:
    return SlotStart(slot, GREEDY, 0, prompt_len)


def plan(step_id: int, slot: int, first: int, tokens: list[int], pages: list[int], *, keep: int = 0, **fields: object) -> StepPlan:
    values: dict[str, object] = {
        "slots": ints([slot]), "num_new": ints([len(tokens)]), "first_pos": ints([first]), "page_keep": ints([keep]),
        "page_counts": ints([len(pages)]), "page_ids": ints(pages), "token_ids": ints(tokens), "feedback": ints([0]),
        "sample": ints([1]),
    }  # fmt: skip
    return StepPlan(step_id, **(values | fields))  # type: ignore[arg-type]


def sampled(result: StepResult) -> list[int]:
    return as_ints(result.token_ids).tolist()


def test_its_tokens_are_those_of_its_model() -> None:
    worker = FakeWorker(page_size=4)
    result = worker.execute(plan(1, 0, 0, [1, 2, 3, 4, 5], [7, 3], starts=(start(0, 5),)))
    assert sampled(result) == worker.model.generate([1, 2, 3, 4, 5], GREEDY, 0, 1)[0]


def test_chunks_and_feedback_change_nothing() -> None:
    worker = FakeWorker(page_size=4)
    worker.execute(plan(1, 0, 0, [1, 2, 3], [7], starts=(start(0, 5),), sample=ints([0])))
    worker.execute(plan(2, 0, 3, [4, 5], [3], keep=1))
    result = worker.execute(plan(3, 0, 5, [], [], keep=2, token_ids=b"", num_new=ints([1]), feedback=ints([1])))
    assert sampled(result) == worker.model.generate([1, 2, 3, 4, 5], GREEDY, 0, 2)[0][1:]


def test_reading_what_nobody_wrote_fails() -> None:
    worker = FakeWorker(page_size=4)
    with pytest.raises(AssertionError, match="nobody wrote"):
        worker.execute(plan(1, 0, 3, [4], [7], starts=(start(0, 4),)))


def test_a_wrong_page_fails() -> None:
    worker = FakeWorker(page_size=2)
    worker.execute(plan(1, 0, 0, [1, 2, 3, 4], [0, 1], starts=(start(0, 4),)))
    worker.execute(plan(2, 1, 0, [5, 6, 7, 8], [2, 3], starts=(start(1, 4),)))
    with pytest.raises(AssertionError, match="foreign token at position 2"):
        worker.execute(plan(3, 0, 4, [9], [0, 3, 4]))


def test_a_stale_page_that_was_handed_out_anew_fails() -> None:
    worker = FakeWorker(page_size=2)
    worker.execute(plan(1, 0, 0, [1, 2], [0], starts=(start(0, 2),)))
    with pytest.raises(AssertionError, match="nobody wrote"):
        worker.execute(plan(2, 0, 2, [3], [1], keep=1, fresh_pages=ints([0, 1])))


def test_writing_what_another_row_reads_fails() -> None:
    worker = FakeWorker(page_size=4)
    worker.execute(plan(1, 0, 0, [1, 2, 3], [0], starts=(start(0, 3),)))
    both = StepPlan(
        2, starts=(start(1, 2),), slots=ints([0, 1]), num_new=ints([1, 1]), first_pos=ints([3, 2]), page_keep=ints([1, 0]),
        page_counts=ints([0, 1]), page_ids=ints([0]), token_ids=ints([4, 9]), feedback=ints([0, 0]), sample=ints([1, 1]),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="which slots"):
        worker.execute(both)


def test_a_copied_page_can_be_written_on() -> None:
    worker = FakeWorker(page_size=4)
    worker.execute(plan(1, 0, 0, [1, 2, 3], [0], starts=(start(0, 3),)))
    result = worker.execute(
        plan(2, 1, 2, [9], [5], starts=(start(1, 3),), copy_src=ints([0]), copy_dst=ints([5]), fresh_pages=ints([]))
    )
    assert sampled(result) == worker.model.generate([1, 2, 9], GREEDY, 0, 1)[0]


def test_a_group_whose_rows_hold_other_pages_fails() -> None:
    worker = FakeWorker(page_size=2)
    worker.execute(plan(1, 0, 0, [1, 2, 3], [0, 1], starts=(start(0, 3),)))
    worker.execute(plan(2, 1, 0, [1, 2, 3], [2, 3], starts=(start(1, 3),)))
    both = StepPlan(
        3, slots=ints([0, 1]), num_new=ints([1, 1]), first_pos=ints([3, 3]), page_keep=ints([2, 2]),
        page_counts=ints([0, 0]), token_ids=ints([4, 9]), feedback=ints([0, 0]), sample=ints([1, 1]),
        groups=(SharedPrefix(0, 2, 2),),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="same pages"):
        worker.execute(both)


def test_taking_a_slot_twice_and_going_back_in_steps_fail() -> None:
    worker = FakeWorker()
    worker.execute(plan(1, 0, 0, [1], [0], starts=(start(0, 1),)))
    with pytest.raises(AssertionError, match="taken twice"):
        worker.execute(plan(2, 0, 0, [1], [0], starts=(start(0, 1),)))
    with pytest.raises(AssertionError, match="comes after"):
        worker.execute(plan(2, 0, 1, [1], [], keep=1))


def test_hashing_in_columns_is_hashing_one_by_one() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**64, 200, np.uint64), rng.integers(0, 50_000, 200)
    assert mix_all(a, b).tolist() == [mix(int(x), int(y)) for x, y in zip(a, b)]
    assert identity([1, 2, 3]) == mix(identity([1, 2]), 3)


def test_time_passes_only_when_told_to_and_never_back() -> None:
    clock = VirtualClock(5.0)
    clock.advance(1.5)
    assert clock() == clock() == 6.5
    with pytest.raises(AssertionError, match="go back"):
        clock.advance(-1.0)
