"""Pages for a running request's next positions: evicted first, then taken from younger requests."""

from __future__ import annotations

from anabranch.runtime.scheduler.decisions import NeedsPages
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.policy import choose_victim
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.state import SchedulerState


class Room:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle

    def make(self, request: Request, upto: int) -> bool:
        """Make positions below `upto` writable. False: not in this step (somebody is on the way out), or the request itself had
        to go."""
        with self.lifecycle.guard(request, "reserving pages for"):
            while not self.lifecycle.reserve(request, upto):
                if not self._take_from_others(request, upto):
                    return False
            return True
        return False

    def _take_from_others(self, request: Request, upto: int) -> bool:
        """Pages are short. True: some became free, try again."""
        s, slot = self.s, request.slot
        missing = s.manager.can_reserve(request.branch.known(), s.pages_for(upto) * s.page_size)
        need = NeedsPages(max(1, missing), s.free_pages())
        if any(r.state is not State.RUNNING for r in s.slots.used.values()):
            s.deny(request, need)  # somebody is on the way out
            return False
        holders = [r for r in s.slots.used.values() if r.host is None]
        victim = choose_victim(holders, request, s.policy.max_preemptions)
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
