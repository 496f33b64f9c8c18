"""Faults on purpose: exactly those that were asked for."""

import pytest

from anabranch.runtime.config import FaultConfig
from anabranch.runtime.errors import ConfigError
from anabranch.runtime.faults import FaultyWorker, InjectedFault, MessageFaults
from anabranch.runtime.messages import Flush, Shutdown, StepPlan
from anabranch.runtime.testing import FakeWorker


def test_so_many_messages_of_a_kind_are_lost_and_then_no_more() -> None:
    faults = MessageFaults(FaultConfig(drop=("Flush",), drop_count=2))
    assert faults.pass_on([Flush(1), Shutdown(), Flush(1), Flush(1)], 0.0) == [Shutdown(), Flush(1)]


def test_messages_held_back_arrive_later_in_their_order_and_before_what_is_new() -> None:
    faults = MessageFaults(FaultConfig(delay=("Flush",), delay_s=2.0))
    assert faults.pass_on([Flush(1), Shutdown()], 1.0) == [Shutdown()] and faults.next_at == 3.0
    assert faults.pass_on([], 2.9) == []
    assert faults.pass_on([Shutdown()], 3.0) == [Flush(1), Shutdown()] and faults.next_at is None


def test_a_step_raises_when_it_was_told_to_and_only_then() -> None:
    worker = FaultyWorker(FakeWorker(), FaultConfig(raise_at_step=2))
    worker.execute(StepPlan(step_id=1))
    with pytest.raises(InjectedFault, match="step 2 raises"):
        worker.execute(StepPlan(step_id=2))
    assert worker.execute(StepPlan(step_id=3)).step_id == 3


@pytest.mark.parametrize("field", ["delay_s", "slow_step_s"])
def test_times_that_are_none_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be a number in 0..3600"):
        FaultConfig(**{field: -1.0})
