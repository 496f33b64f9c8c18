"""Which rows run in this step: decode first, then what fills KV, then newcomers."""

from __future__ import annotations

import numpy as np

from anabranch.runtime.messages import SlotStart, StepPlan, ints
from anabranch.runtime.scheduler.admission import Admission
from anabranch.runtime.scheduler.decisions import Denied
from anabranch.runtime.scheduler.filling import Filling
from anabranch.runtime.scheduler.following import Following
from anabranch.runtime.scheduler.groups import find_groups
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.plans import StepRows, build_plan
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.room import Room
from anabranch.runtime.scheduler.state import Flight, Note, SchedulerState


class Planner:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle
        self.room = Room(state, lifecycle)
        self.admission = Admission(state, lifecycle)
        self.following = Following(state, lifecycle)
        self.filling = Filling(state, lifecycle, self.room, self.following)
        self._grouped_at = -1  # `slots.changes` when groups were found
        self._used_at, self._used = -1, np.empty(0, np.int32)

    def plan(self) -> tuple[StepPlan | None, tuple[Denied, ...]]:
        """One step, if there is anything to do in it; and reasons that stand for many requests at once."""
        s = self.s
        self.following.part()
        rows = StepRows(decode=self._decode_rows())
        left = s.config.tokens_per_step - len(rows.decode)
        denied = self.admission.admit(left)
        chunks = self.filling.chunks(left)
        rows.decode = rows.decode[s.slots.live[rows.decode] & ~s.slots.leaving[rows.decode]]
        rows.others = self.following.rows(rows.decode) + self.filling.rows(chunks)
        if not len(rows) and (s.flights or not s.slots.ends):
            return None, denied
        return self._emit(rows), denied

    # ------------------------------------------------------------ decode

    def _decode_rows(self) -> np.ndarray:
        """Slots whose next row is one token, known or being sampled, with room to write it."""
        columns = self.s.slots
        used = self._used_slots()
        planned, known = columns.planned[used], columns.known[used]
        is_ready = columns.live[used] & ~columns.leaving[used] & ~columns.filling[used] & ~columns.follows[used]
        is_ready &= planned + 1 < columns.limit[used]
        is_ready &= (planned < known) | columns.can_feed[used]
        rows = used[is_ready]
        short = rows[columns.planned[rows] >= columns.capacity[rows]]
        if not len(short):
            return rows
        denied = set()
        for request in sorted((columns.used[slot] for slot in short.tolist()), key=Request.rank):
            if request.state is State.RUNNING and not self.room.make(request, int(columns.planned[request.slot]) + 1):
                denied.add(request.slot)
        gone = columns.leaving[rows] | ~columns.live[rows]
        return rows[~gone & ~np.isin(rows, list(denied))] if denied or gone.any() else rows

    # ------------------------------------------------------------ the message

    def _emit(self, rows: StepRows) -> StepPlan:
        s, columns = self.s, self.s.slots
        s.num_steps += 1
        if self._grouped_at != columns.changes:
            self._regroup()
            rows.decode = rows.decode[np.argsort(columns.rank[rows.decode], kind="stable")]
        starts = self._starts(rows)
        plan, notes = build_plan(s, rows, starts)
        self._take_off(rows, plan, notes)
        return plan

    def _starts(self, rows: StepRows) -> list[SlotStart]:
        """Slots that the worker does not know yet."""
        columns = self.s.slots
        new = rows.decode[~columns.started[rows.decode]].tolist()
        new += [row.slot for row in rows.others if not columns.started[row.slot]]
        if new:
            columns.started[new] = True
        return [self._start(columns.used[slot]) for slot in new]

    def _take_off(self, rows: StepRows, plan: StepPlan, notes: dict[int, Note]) -> None:
        """The columns move on to what will be true when the step returns."""
        s, columns = self.s, self.s.slots
        slots, upto = rows.decode, columns.planned[rows.decode] + 1
        samples = np.ones(len(rows), np.bool_)
        if rows.others:
            samples[len(slots) :] = [row.samples for row in rows.others]
            slots = np.concatenate([slots, [row.slot for row in rows.others]]).astype(np.int32)
            upto = np.concatenate([upto, [row.upto for row in rows.others]]).astype(np.int32)
        columns.planned[rows.decode] += 1
        for row in rows.others:
            columns.planned[row.slot] = columns.known[row.slot] if row.trie is not None else row.upto
        columns.in_flight[slots] += 1
        columns.num_steps[slots] += 1
        s.flights.append(Flight(plan.step_id, slots, upto, samples, notes, bool(plan.copy_src)))
        s.counters["computed_rows"] += len(slots)
        s.counters["planned_tokens"] += len(rows.decode) + sum(len(row.tokens) for row in rows.others)

    def _start(self, request: Request) -> SlotStart:
        params, kv = request.params, request.branch.known()
        has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.lifecycle.sync(request.slot)
        return SlotStart(
            slot=request.slot,
            params=params,
            path=request.branch.path,
            prompt_len=request.prompt_len,
            context=ints(kv.tokens(0, request.prompt_len)) if has_penalties else b"",
            generated=ints(kv.tokens(request.prompt_len)) if len(kv) > request.prompt_len else b"",
        )

    # ------------------------------------------------------------ order of rows

    def _used_slots(self) -> np.ndarray:
        """Slots in use, in the order in which their rows stand in a step; computed when they change."""
        columns = self.s.slots
        if self._used_at != columns.changes:
            used = np.fromiter(columns.used, np.int32, len(columns.used))
            self._used_at, self._used = columns.changes, used[np.argsort(columns.rank[used], kind="stable")]
        return self._used

    def _regroup(self) -> None:
        """Find shared-prefix groups among the slots that hold pages; the others' rows come last."""
        s, columns = self.s, self.s.slots
        self._grouped_at = columns.changes
        tables = {}
        for slot, request in columns.used.items():
            kv = request.branch.known()
            if kv.attached:
                tables[slot] = kv.page_table[: int(columns.planned[slot]) // s.page_size]
        order, groups = find_groups(tables, s.page_size, s.policy.min_shared_tokens)
        columns.group[:] = -1
        columns.rank[:] = 2**30
        columns.rank[order] = np.arange(len(order))
        self._used_at = -1
        s.group_tokens = [group.num_tokens for group in groups]
        for index, group in enumerate(groups):
            columns.group[list(group.members)] = index
