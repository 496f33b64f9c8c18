"""Branches as the scheduler knows them, and the order of the operations on each.

An operation waits until every branch it touches is idle and it is the oldest that is left for each of them. Operations
enter all their queues at once, so the oldest of all can always run: nothing waits in a circle. Children of a fork exist
from its arrival, before it is carried out: what is sent to them queues behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.radix.branch import Branch
from anabranch.runtime.messages import ForkBranch, JoinBranch, LeaseBranch, RollbackBranch, Submit, SubmitScore
from anabranch.runtime.scheduler.policy import Program

if TYPE_CHECKING:
    from anabranch.runtime.scheduler.requests import Request


@dataclass(frozen=True, slots=True)
class CloseBranch:
    """One branch of a `CloseBranches` message."""

    branch_id: int
    superseded: bool


Operation = Submit | SubmitScore | ForkBranch | RollbackBranch | JoinBranch | LeaseBranch | CloseBranch


@dataclass(slots=True, eq=False)
class BranchRecord:
    """kv           tokens and cached prefix; None until the fork that makes the branch has been carried out
    num_forked    children so far: the running index of the next
    num_retries   rollbacks so far
    family        siblings of one fork have the same: they stand together in the waiting line
    last_request  (request_id, prompt_len) of the request that ended last, while nothing else has happened since
    """

    branch_id: int
    program: Program
    namespace: bytes
    path: int
    priority: int
    family: int
    kv: Branch | None = None
    num_forked: int = 0
    num_retries: int = 0
    request: Request | None = None  # until its pages and slot are given back, after its terminal event
    leased_until: float | None = None
    last_request: tuple[int, int] | None = None
    queue: deque[Pending] = field(default_factory=deque)

    def known(self) -> Branch:
        assert self.kv is not None, f"branch {self.branch_id} has not been forked yet"
        return self.kv


@dataclass(slots=True, eq=False)
class Pending:
    """An operation in the queues of the branches it touches. `is_void`: it was cancelled and does nothing when its turn comes."""

    operation: Operation
    records: tuple[BranchRecord, ...]
    is_void: bool = False

    def is_due(self) -> bool:
        return all(record.request is None and record.queue[0] is self for record in self.records)


class Branches:
    """Every open branch, and the queues of operations on them."""

    def __init__(self, carry_out: Callable[[Pending], None]) -> None:
        self._records: dict[int, BranchRecord] = {}
        self._carry_out = carry_out
        self._woken: deque[BranchRecord] = deque()
        self.num_queued = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[BranchRecord]:
        return iter(self._records.values())

    def find(self, branch_id: int) -> BranchRecord | None:
        return self._records.get(branch_id)

    def add(self, record: BranchRecord) -> None:
        assert record.branch_id not in self._records, f"branch {record.branch_id} exists"
        self._records[record.branch_id] = record

    def remove(self, record: BranchRecord) -> None:
        del self._records[record.branch_id]

    def submit(self, operation: Operation, *records: BranchRecord) -> Pending:
        """Carry out the operation now, or as soon as every branch it touches is idle and its turn has come."""
        pending = Pending(operation, records)
        for record in records:
            record.queue.append(pending)
        self.num_queued += 1
        self.wake(records[0])
        return pending

    def wake(self, record: BranchRecord) -> None:
        """The branch may be idle: carry out what waits for it, and what waits for that. Never nests."""
        self._woken.append(record)
        if len(self._woken) > 1:
            return  # somebody below on the stack goes on with it
        while self._woken:
            self._run(self._woken[0])
            self._woken.popleft()

    def _run(self, record: BranchRecord) -> None:
        while record.queue and record.queue[0].is_due():
            pending = record.queue[0]
            for touched in pending.records:
                touched.queue.popleft()
            self.num_queued -= 1
            self._carry_out(pending)
            self._woken.extend(other for other in pending.records if other is not record)
