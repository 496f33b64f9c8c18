"""Messages from the tokenizer process: operations on branches, requests, and questions.

What names something unknown is dropped and counted: it is late, or meant for somebody who is gone. A request always gets
its one terminal event, also when its branch does not exist.
"""

from __future__ import annotations

import logging
from typing import assert_never

from anabranch.radix.errors import RadixError
from anabranch.runtime.errors import internal
from anabranch.runtime.messages import (
    AbortRequests,
    BranchExplained,
    CloseBranches,
    Error,
    ExplainBranch,
    Flush,
    ForkBranch,
    JoinBranch,
    LeaseBranch,
    OpenBranch,
    QueryStats,
    RollbackBranch,
    Shutdown,
    StatsReply,
    StopAt,
    Submit,
    SubmitScore,
    ToScheduler,
    as_ints,
)
from anabranch.runtime.scheduler.branches import BranchRecord, CloseBranch, Pending
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.paths import child_path, retry_path
from anabranch.runtime.scheduler.state import SchedulerState
from anabranch.runtime.scheduler.stats import collect

log = logging.getLogger(__name__)

CANCELLED = Error("cancelled", "the request was cancelled before it ran")
BRANCH_CLOSED = Error("cancelled", "the branch was closed before the request ran")
STOPPING = Error("cancelled", "the engine is shutting down")


class Intake:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle

    def handle(self, message: ToScheduler) -> None:
        match message:
            case Submit() | SubmitScore():
                self._submit(message)
            case StopAt():
                self._stop_at(message)
            case OpenBranch():
                self._open(message)
            case ForkBranch():
                self._fork(message)
            case JoinBranch():
                self._join(message)
            case RollbackBranch() | LeaseBranch():
                record = self.s.branches.find(message.branch_id)
                if record is None:
                    self._drop("unknown_branch")
                else:
                    self.s.branches.submit(message, record)
            case CloseBranches():
                for branch_id in message.branch_ids:
                    self._close(branch_id, message.superseded)
            case AbortRequests():
                self._abort(message)
            case ExplainBranch():
                self._explain(message)
            case QueryStats():
                self.s.outbox.append(StatsReply(message.query_id, collect(self.s, check=message.check)))
            case Flush():
                self.s.outbox.append(StatsReply(message.query_id, {"flushed_pages": self.s.manager.flush()}))
            case Shutdown():
                self._shutdown()
            case _:
                assert_never(message)

    def _drop(self, why: str) -> None:
        self.s.counters["dropped_" + why] += 1

    # ------------------------------------------------------------ branches

    def _open(self, message: OpenBranch) -> None:
        if self.s.branches.find(message.branch_id) is not None:
            self._drop("duplicate_branch")
            return
        record = self._new_record(message.branch_id, message.program_id, message.namespace, message.path, message.priority)
        record.kv = self.s.manager.open(message.namespace)

    def _new_record(self, branch_id: int, program_id: int, namespace: bytes, path: int, priority: int) -> BranchRecord:
        program = self.s.program(program_id)
        program.num_branches += 1
        self.s.num_families += 1
        record = BranchRecord(branch_id, program, namespace, path, priority, self.s.num_families)
        self.s.branches.add(record)
        return record

    def _fork(self, message: ForkBranch) -> None:
        parent = self.s.branches.find(message.parent_id)
        if parent is None:
            self._drop("unknown_branch")
            return
        new = [child for child in dict.fromkeys(message.child_ids) if self.s.branches.find(child) is None]
        if len(new) < len(message.child_ids):
            self._drop("duplicate_branch")
            return
        children = [
            self._new_record(child, parent.program.program_id, parent.namespace, 0, parent.priority) for child in new
        ]
        for child in children:
            child.family = children[0].family
        self.s.branches.submit(message, parent, *children)

    def _join(self, message: JoinBranch) -> None:
        record, winner = self.s.branches.find(message.branch_id), self.s.branches.find(message.winner_id)
        if record is None or winner is None:
            self._drop("unknown_branch")
        elif record is winner or record.namespace != winner.namespace:
            self._drop("bad_join")
        else:
            self.s.branches.submit(message, record, winner)

    def _close(self, branch_id: int, superseded: bool) -> None:
        record = self.s.branches.find(branch_id)
        if record is None:
            self._drop("unknown_branch")
            return
        for pending in list(record.queue):
            if isinstance(pending.operation, Submit | SubmitScore) and not pending.is_void:
                self._cancel_queued(pending.operation.request_id, BRANCH_CLOSED)
        if record.request is not None and record.request.request_id in self.s.requests:
            self.lifecycle.abort(record.request, BRANCH_CLOSED)
        self.s.branches.submit(CloseBranch(branch_id, superseded), record)

    def carry_out(self, pending: Pending) -> None:
        """An operation's turn has come: its branches are idle. Never raises, so that the queues go on."""
        operation = pending.operation
        if isinstance(operation, Submit | SubmitScore):
            self.s.queued.pop(operation.request_id, None)
        if pending.is_void:
            return
        try:
            self._carry_out(pending)
        except Exception as fault:
            if self.s.policy.raise_errors:
                raise
            log.exception("an operation on branches %s failed", [r.branch_id for r in pending.records])
            self.s.counters["internal_errors"] += 1
            if isinstance(operation, Submit | SubmitScore) and operation.request_id not in self.s.requests:
                self.lifecycle.refuse_message(operation, internal(fault, "accepting the request"))

    def _carry_out(self, pending: Pending) -> None:
        operation, record = pending.operation, pending.records[0]
        if self._is_gone(pending):
            self._drop_operation(pending)
            return
        match operation:
            case Submit() | SubmitScore():
                self.lifecycle.begin(operation, record)
            case ForkBranch():
                self._carry_out_fork(record, pending.records[1:])
            case RollbackBranch():
                self._carry_out_rollback(record, operation.length)
            case JoinBranch():
                self._carry_out_join(record, pending.records[1])
            case LeaseBranch():
                self._carry_out_lease(record, operation.until)
            case CloseBranch():
                self._carry_out_close(record, operation.superseded)
            case _:
                assert_never(operation)

    def _drop_operation(self, pending: Pending) -> None:
        self._drop("unknown_branch")
        operation = pending.operation
        if isinstance(operation, Submit | SubmitScore):
            self.lifecycle.refuse_message(operation, _no_branch(operation.branch_id))
        elif isinstance(operation, ForkBranch):
            for child in pending.records[1:]:
                self._remove(child)

    def _is_gone(self, pending: Pending) -> bool:
        """Whether a branch that the operation needs was closed, or never came to be."""
        needed = pending.records[:1] if isinstance(pending.operation, ForkBranch) else pending.records
        return any(self.s.branches.find(record.branch_id) is not record or record.kv is None for record in needed)

    def _carry_out_fork(self, parent: BranchRecord, children: tuple[BranchRecord, ...]) -> None:
        self.lifecycle.forget_last(parent)
        for child, kv in zip(children, self.s.manager.fork(parent.known(), len(children))):
            child.kv = kv
            child.path = child_path(parent.path, parent.num_forked)
            parent.num_forked += 1

    def _carry_out_rollback(self, record: BranchRecord, length: int) -> None:
        kv = record.known()
        if not 0 <= length <= len(kv):
            self._drop("bad_rollback")
            return
        self.lifecycle.forget_last(record)
        if length < len(kv):
            self.s.manager.rollback(kv, length)
            record.path = retry_path(record.path, record.num_retries)
            record.num_retries += 1

    def _carry_out_join(self, record: BranchRecord, winner: BranchRecord) -> None:
        self.lifecycle.forget_last(record)
        self.lifecycle.forget_last(winner)
        manager, own, won = self.s.manager, record.known(), winner.known()
        if own.namespace == won.namespace:
            manager.adopt(own, won)
        else:  # the cache is switched off: every run has a namespace of its own, and there is nothing to take over
            manager.release(own)
            record.kv = won
        record.path, record.num_forked, record.num_retries = winner.path, winner.num_forked, winner.num_retries
        record.leased_until = winner.leased_until
        self._remove(winner)

    def _carry_out_lease(self, record: BranchRecord, until: float | None) -> None:
        record.leased_until = until
        if until is None:
            self.s.manager.leases.end(record.known())
        elif not self.s.lease(record, until):
            self.s.counters["leases_refused"] += 1

    def _carry_out_close(self, record: BranchRecord, superseded: bool) -> None:
        self.lifecycle.forget_last(record)
        self.s.manager.release(record.known(), superseded=superseded)
        self._remove(record)

    def _remove(self, record: BranchRecord) -> None:
        self.s.branches.remove(record)
        record.program.num_branches -= 1
        if not record.program.num_branches:
            self.s.programs.pop(record.program.program_id, None)

    # ------------------------------------------------------------ requests

    def _submit(self, message: Submit | SubmitScore) -> None:
        s = self.s
        if message.request_id in s.requests or message.request_id in s.queued:
            self._drop("duplicate_request")
            return
        record = s.branches.find(message.branch_id)
        if s.is_stopping:
            self.lifecycle.refuse_message(message, STOPPING)
        elif record is None:
            self._drop("unknown_branch")
            self.lifecycle.refuse_message(message, _no_branch(message.branch_id))
        else:
            is_deferred = record.request is not None or bool(record.queue)
            if not is_deferred:
                s.branches.submit(message, record)
                return
            pending = Pending(message, (record,))
            s.queued[message.request_id] = pending
            record.queue.append(pending)
            s.branches.num_queued += 1
            s.push_deadline(message.deadline, message.request_id)

    def _stop_at(self, message: StopAt) -> None:
        s = self.s
        request = s.requests.get(message.request_id)
        if request is not None:
            if request.score is None and message.num_tokens >= 0:
                self.lifecycle.finish(request, "stop", keep=message.num_tokens)
            return
        branch_id = s.ended.get(message.request_id)
        record = s.branches.find(branch_id) if branch_id is not None else None
        if record is None or record.last_request is None:
            self._drop("late_stop")
            return
        self._stop_ended(record, record.last_request[1] + max(0, message.num_tokens))

    def _stop_ended(self, record: BranchRecord, length: int) -> None:
        """The request ended by itself before its stop arrived: truncate all the same, so that timing decides nothing."""
        request = record.request
        if request is not None:  # its pages are still waiting for a step in flight
            if request.cut_len is not None and length < request.cut_len:
                request.cut_len, request.is_cut_superseded = length, True
        elif length < len(record.known()):
            self.s.manager.rollback(record.known(), length)

    def _abort(self, message: AbortRequests) -> None:
        s = self.s
        programs = set(message.program_ids)
        doomed = list(message.request_ids)
        if programs:
            doomed += [r.request_id for r in s.requests.values() if r.branch.program.program_id in programs]
            doomed += [
                request_id
                for request_id, pending in s.queued.items()
                if pending.records[0].program.program_id in programs
            ]
        for request_id in doomed:
            request = s.requests.get(request_id)
            if request is not None:
                self.lifecycle.abort(request, CANCELLED)
            elif request_id in s.queued:
                self._cancel_queued(request_id, CANCELLED)
            else:
                self._drop("late_abort")

    def _cancel_queued(self, request_id: int, error: Error) -> None:
        pending = self.s.queued.pop(request_id)
        pending.is_void = True
        assert isinstance(pending.operation, Submit | SubmitScore)
        self.lifecycle.refuse_message(pending.operation, error)

    def expire(self, request_id: int) -> None:
        """The request's deadline has passed."""
        s = self.s
        error = Error("timeout_error", "the deadline passed before the request was done: allow more time, or ask for less")
        request = s.requests.get(request_id)
        if request is not None:
            s.counters["deadlines_passed"] += 1
            self.lifecycle.refuse(request, error)
        elif request_id in s.queued:
            s.counters["deadlines_passed"] += 1
            self._cancel_queued(request_id, error)

    def _shutdown(self) -> None:
        self.s.is_stopping = True
        for request_id in list(self.s.queued):
            self._cancel_queued(request_id, STOPPING)
        for request in list(self.s.requests.values()):
            self.lifecycle.abort(request, STOPPING)

    # ------------------------------------------------------------ questions

    def _explain(self, message: ExplainBranch) -> None:
        s, record = self.s, self.s.branches.find(message.branch_id)
        if record is None or record.kv is None:
            self._drop("unknown_branch")
            s.outbox.append(BranchExplained(message.query_id, 0, 0, f"branch {message.branch_id} does not exist"))
            return
        if record.request is not None and record.request.slot >= 0:
            self.lifecycle.sync(record.request.slot)
        (asked,) = s.manager.fork(record.kv, 1)  # the branch as it would be with what waits to be sent
        try:
            s.manager.append(asked, as_ints(message.token_ids))
            miss = s.manager.explain(asked)
        except RadixError as fault:
            miss = str(fault)
        s.outbox.append(BranchExplained(message.query_id, len(asked), s.manager.lookup(asked), miss))
        s.manager.release(asked)


def _no_branch(branch_id: int) -> Error:
    return Error("not_found_error", f"branch {branch_id} does not exist, or was closed", "branch")
