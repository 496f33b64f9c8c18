"""Which rows run in this step: decode first, then what fills KV, then newcomers."""

from __future__ import annotations

import logging

import numpy as np

from anabranch.runtime.errors import internal
from anabranch.runtime.messages import SlotStart, StepPlan, ints
from anabranch.runtime.scheduler.admission import Admission
from anabranch.runtime.scheduler.decisions import Denied, NeedsPages, TokenBudget
from anabranch.runtime.scheduler.groups import find_groups
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.plans import Row, StepRows, build_plan
from anabranch.runtime.scheduler.policy import choose_victim
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.state import Flight, SchedulerState

log = logging.getLogger(__name__)


class Planner:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle
        self.admission = Admission(state, lifecycle)
        self._grouped_at = -1  # `slots.changes` when groups were found

    def plan(self) -> tuple[StepPlan | None, tuple[Denied, ...]]:
        """One step, if there is anything to do in it; and reasons that stand for many requests at once."""
        s = self.s
        rows = StepRows(decode=self._decode_rows())
        left = s.config.tokens_per_step - len(rows.decode)
        denied = self.admission.admit(left)
        self._fill(rows, left)
        rows.decode = rows.decode[s.slots.live[rows.decode] & ~s.slots.leaving[rows.decode]]
        if not len(rows) and (s.flights or not s.slots.ends):
            return None, denied
        return self._emit(rows), denied

    # ------------------------------------------------------------ decode

    def _decode_rows(self) -> np.ndarray:
        """Slots whose next row is one token, known or being sampled, with room to write it."""
        columns = self.s.slots
        used = self._used_slots()
        planned, known = columns.planned[used], columns.known[used]
        is_ready = columns.live[used] & ~columns.leaving[used] & ~columns.filling[used]
        is_ready &= planned + 1 < columns.limit[used]
        is_ready &= (planned < known) | columns.can_feed[used]
        rows = used[is_ready]
        short = rows[columns.planned[rows] >= columns.capacity[rows]]
        if not len(short):
            return rows
        denied = set()
        for request in sorted((columns.used[slot] for slot in short.tolist()), key=Request.rank):
            if request.state is State.RUNNING and not self._make_room(request, int(columns.planned[request.slot]) + 1):
                denied.add(request.slot)
        gone = columns.leaving[rows] | ~columns.live[rows]
        return rows[~gone & ~np.isin(rows, list(denied))] if denied or gone.any() else rows

    def _make_room(self, request: Request, upto: int) -> bool:
        """Pages for the request's positions below `upto`, taken from younger ones if need be. False: not in this step."""
        s = self.s
        try:
            while not self.lifecycle.reserve(request, upto):
                if not self._take_from_others(request, upto):
                    return False
            return True
        except Exception as fault:
            if s.policy.raise_errors:
                raise
            log.exception("reserving pages for request %d failed", request.request_id)
            s.counters["internal_errors"] += 1
            self.lifecycle.fail(request, internal(fault, "reserving pages for the request"))
            return False

    def _take_from_others(self, request: Request, upto: int) -> bool:
        """Pages are short. True: some became free, try again. False: wait, or the request itself had to go."""
        s, slot = self.s, request.slot
        need = NeedsPages(max(1, s.manager.can_reserve(request.branch.known(), s.pages_for(upto) * s.page_size)), 0)
        if any(r.state is not State.RUNNING for r in s.slots.used.values()):
            s.deny(request, need)  # somebody is on the way out
            return False
        victim = choose_victim(s.slots.used.values(), request, s.policy.max_preemptions)
        if victim is None:
            if not s.slots.in_flight[slot]:
                self._go_on_alone(request, upto)
            return False
        self.lifecycle.preempt(victim, by=request)
        if victim is request:
            return False
        if victim.slot >= 0:  # it leaves when the step in flight has returned
            s.deny(request, need)
            return False
        return True

    def _go_on_alone(self, request: Request, upto: int) -> None:
        """Nobody else runs, nothing can be evicted, and still there is no page.

        Either the pool is full of the request, which ends it. Or its cached path takes more pages than it has tokens for, as
        each copied page on it counts twice: then it starts over in an empty pool, once.
        """
        s = self.s
        if s.pages_for(upto) > s.manager.pool.num_pages:
            s.counters["outgrew_pool"] += 1
            request.wait_reason = "NeedsPages"
            self.lifecycle.finish(request, "length")
        else:
            request.must_start_over = True
            self.lifecycle.preempt(request, by=request)

    # ------------------------------------------------------------ filling

    def _fill(self, rows: StepRows, left: int) -> None:
        """Share the step's tokens among those that fill KV: forced tokens first, then half to the oldest, then the shortest."""
        s, columns = self.s, self.s.slots
        filling = [r for slot, r in s.slots.used.items() if columns.filling[slot] and r.state is State.RUNNING]
        filling = [r for r in filling if self._missing(r) > 0]
        if not filling:
            return
        filling.sort(key=Request.rank)
        wanted = {r.request_id: self._missing(r) for r in filling}
        total = sum(wanted.values())
        eldest = filling[0]
        order = sorted(filling, key=lambda r: (not r.is_forced, wanted[r.request_id], r.rank()))
        kept_back = max(left - (total - wanted[eldest.request_id]), -(-left // 2))
        reserved_for_eldest = min(wanted[eldest.request_id], kept_back)
        left -= reserved_for_eldest
        shares: dict[int, int] = {}
        for request in order:
            if request is not eldest:
                shares[request.request_id] = min(wanted[request.request_id], left)
                left -= shares[request.request_id]
        shares[eldest.request_id] = min(wanted[eldest.request_id], reserved_for_eldest + left)
        for request in filling:
            self._add_fill_row(rows, request, shares[request.request_id], is_eldest=request is eldest)

    def _missing(self, request: Request) -> int:
        """Tokens that the request's rows still have to compute, those of its present score tree included."""
        columns, slot = self.s.slots, request.slot
        missing = int(columns.known[slot] - columns.planned[slot])
        return missing + request.score.trie.num_nodes if request.score is not None and missing > 0 else missing

    def _add_fill_row(self, rows: StepRows, request: Request, share: int, *, is_eldest: bool) -> None:
        try:
            if request.score is not None:
                row = self._score_row(request, share, is_eldest)
            else:
                row = self._fill_row(request, share)
            if row is None:
                return
            rows.others.append(row)
            request.count_computed(row.first, row.upto if row.trie is None else request.prompt_len)
            if row.upto == request.fill_len and row.trie is None:
                self._add_twins(rows, request, row)
        except Exception as fault:
            if self.s.policy.raise_errors:
                raise
            log.exception("planning a row of request %d failed", request.request_id)
            self.s.counters["internal_errors"] += 1
            self.lifecycle.fail(request, internal(fault, "planning the request"))

    def _fill_row(self, request: Request, share: int) -> Row | None:
        """The next chunk; it ends at a page's end unless it is the last."""
        s, columns, slot = self.s, self.s.slots, request.slot
        first, known = int(columns.planned[slot]), int(columns.known[slot])
        stop = min(first + share, known)
        if stop < known and stop // s.page_size * s.page_size > first:
            stop = stop // s.page_size * s.page_size
        if not self._can_run(request, first, stop):
            return None
        kv = request.branch.known()
        is_last = stop == known
        row = Row(slot, first, kv.tokens(first, stop), stop, samples=is_last and request.wants_tokens)
        wanted = request.prompt_logprobs
        if wanted is not None and first < request.prompt_len and stop >= wanted.next and wanted.next < request.prompt_len:
            row.logprobs_from = first + 1
            row.next_id = int(kv.tokens(stop, stop + 1)[0]) if stop < request.prompt_len else -1
        if is_last:
            columns.filling[slot] = not request.wants_tokens
            request.is_forced = False
        return row

    def _can_run(self, request: Request, first: int, stop: int) -> bool:
        """Whether the step has tokens for the row, and the pool has pages."""
        if stop <= first:
            self.s.deny(request, TokenBudget(self.s.config.tokens_per_step))
            return False
        return self._make_room(request, stop)

    def _score_row(self, request: Request, share: int, is_eldest: bool) -> Row | None:
        """What is left of the prompt and the present tree, in one row; or, if that is too much, more of the prompt."""
        assert request.score is not None
        columns, slot, trie = self.s.slots, request.slot, request.score.trie
        first, known = int(columns.planned[slot]), int(columns.known[slot])
        missing = known - first + trie.num_nodes
        if missing > share and not (is_eldest and first == known - 1):  # a tree is never cut: the eldest may exceed its share
            stop = min(first + share, known - 1)
            if not self._can_run(request, first, stop):
                return None
            return Row(slot, first, request.branch.known().tokens(first, stop), stop)
        if not self._make_room(request, known + trie.num_nodes):
            return None
        tokens = np.concatenate([request.branch.known().tokens(first), np.array(trie.token_ids, np.int32)])
        return Row(slot, first, tokens, known if request.score.is_last else known - 1, trie=trie)

    def _add_twins(self, rows: StepRows, host: Request, row: Row) -> None:
        """Requests with the very same prompt sample their first token from the same logits."""
        s = self.s
        for twin in host.twins:
            if twin.state is not State.WAITING or twin not in s.line or not s.slots.num_free:
                continue
            s.line.remove(twin)
            if twin.scheduled_at is None:
                twin.scheduled_at = s.now
            self.lifecycle.take_twin_slot(twin)
            s.counters["shared_logits"] += 1
            empty = np.empty(0, np.int32)
            rows.others.append(Row(twin.slot, row.upto, empty, row.upto, samples=True, host=host.slot))
        host.twins.clear()

    # ------------------------------------------------------------ the message

    def _emit(self, rows: StepRows) -> StepPlan:
        s, columns = self.s, self.s.slots
        s.num_steps += 1
        if self._grouped_at != columns.changes:
            self._regroup()
        rows.decode = rows.decode[np.argsort(columns.rank[rows.decode], kind="stable")]
        in_step = [*rows.decode.tolist(), *(row.slot for row in rows.others)]
        started = [slot for slot in in_step if not columns.started[slot]]
        starts = [self._start(columns.used[slot]) for slot in started]
        columns.started[started] = True
        plan, notes = build_plan(s, rows, starts)
        self._take_off(rows, plan, notes)
        return plan

    def _take_off(self, rows: StepRows, plan: StepPlan, notes: dict) -> None:
        """The columns move on to what will be true when the step returns."""
        s, columns = self.s, self.s.slots
        upto = np.concatenate([columns.planned[rows.decode] + 1, np.array([row.upto for row in rows.others], np.int32)])
        samples = np.ones(len(upto), np.bool_)
        samples[len(rows.decode) :] = [row.samples for row in rows.others]
        slots = np.concatenate([rows.decode, np.array([row.slot for row in rows.others], np.int32)]).astype(np.int32)
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
        """Slots in the order in which their rows stand in a step."""
        columns = self.s.slots
        return np.fromiter(columns.used, np.int32, len(columns.used))

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
        s.group_tokens = [group.num_tokens for group in groups]
        for index, group in enumerate(groups):
            columns.group[list(group.members)] = index
