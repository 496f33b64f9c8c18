import random

from anabranch.runtime.messages import ForkBranch, JoinBranch, RollbackBranch
from anabranch.runtime.scheduler.branches import Branches, BranchRecord, Pending
from anabranch.runtime.scheduler.policy import Program

BUSY = object()


class Journal:
    """Carries out operations by writing them down."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.branches = Branches(self.carry_out)
        self.records = [BranchRecord(i, Program(0), b"n", 0, 0, i) for i in range(4)]
        for record in self.records:
            self.branches.add(record)

    def carry_out(self, pending: Pending) -> None:
        if not pending.is_void:
            self.done.append(pending.operation)


def test_an_operation_on_an_idle_branch_is_carried_out_at_once() -> None:
    journal = Journal()
    journal.branches.submit(RollbackBranch(0, 0), journal.records[0])
    assert journal.done == [RollbackBranch(0, 0)] and not journal.branches.num_queued


def test_operations_on_a_busy_branch_wait_in_order() -> None:
    journal = Journal()
    record = journal.records[0]
    record.request = BUSY  # type: ignore[assignment]
    for length in range(3):
        journal.branches.submit(RollbackBranch(0, length), record)
    assert journal.done == [] and journal.branches.num_queued == 3
    record.request = None
    journal.branches.wake(record)
    assert journal.done == [RollbackBranch(0, length) for length in range(3)]


def test_an_operation_on_two_branches_waits_for_both_and_holds_up_both() -> None:
    journal = Journal()
    a, b = journal.records[:2]
    b.request = BUSY  # type: ignore[assignment]
    journal.branches.submit(JoinBranch(0, 1), a, b)
    journal.branches.submit(RollbackBranch(0, 7), a)
    assert journal.done == []
    b.request = None
    journal.branches.wake(b)
    assert journal.done == [JoinBranch(0, 1), RollbackBranch(0, 7)]


def test_a_cancelled_operation_does_nothing_and_holds_up_nobody() -> None:
    journal = Journal()
    record = journal.records[0]
    record.request = BUSY  # type: ignore[assignment]
    journal.branches.submit(RollbackBranch(0, 1), record).is_void = True
    journal.branches.submit(RollbackBranch(0, 2), record)
    record.request = None
    journal.branches.wake(record)
    assert journal.done == [RollbackBranch(0, 2)]


def test_each_branch_sees_its_operations_in_the_order_of_their_arrival() -> None:
    for seed in range(200):
        rng, journal = random.Random(seed), Journal()
        sent: list[ForkBranch] = []
        for number in range(30):
            touched = rng.sample(journal.records, rng.randint(1, 3))
            operation = ForkBranch(number, tuple(record.branch_id for record in touched))
            sent.append(operation)
            journal.branches.submit(operation, *touched)
            record = rng.choice(journal.records)
            record.request = None if record.request else BUSY  # type: ignore[assignment]
            if record.request is None:
                journal.branches.wake(record)
        for record in journal.records:
            record.request = None
            journal.branches.wake(record)
        assert len(journal.done) == 30, f"seed {seed}: stuck"
        for record in journal.records:
            mine = [op.parent_id for op in journal.done if record.branch_id in op.child_ids]  # type: ignore[attr-defined]
            assert mine == sorted(mine), f"seed {seed}"
