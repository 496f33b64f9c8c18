"""Requests with the same tokens compute them once.

When a request fills the last of its prompt, waiting requests with the very same prompt (siblings of a fork, say) take slots
without pages and *follow* it: each samples its own token, with its own path and parameters, from the logits of the host's
row. As long as a follower's tokens stay the host's, it goes on like that. When they part, the host publishes what they
have in common, and the follower attaches to it and goes on by itself.

A host is not planned ahead of its results: its followers must see its token to know whether it is theirs.
"""

from __future__ import annotations

import numpy as np

from anabranch.runtime.scheduler.decisions import NeedsPages
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.plans import Row
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.state import SchedulerState

_NO_TOKENS = np.empty(0, np.int32)


class Following:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle

    def begin(self, host: Request) -> list[Row]:
        """The host computes the last token of its prompt in this step: rows for those that have been waiting for that."""
        rows = []
        for twin in host.twins:
            if twin.state is State.WAITING and twin in self.s.line and self.s.slots.num_free:
                self._take_slot(twin, host)
                rows.append(self._row(twin, host.fill_len))
        host.twins.clear()
        return rows

    def part(self) -> None:
        """Followers whose tokens are not their host's any more, or whose host is gone, go on by themselves."""
        s, columns = self.s, self.s.slots
        for slot in np.flatnonzero(columns.follows & columns.live & ~columns.leaving & (columns.in_flight == 0)).tolist():
            request = columns.used[slot]
            assert request.host is not None
            if self._is_in_step(request, request.host):
                continue
            host = request.host
            if host.slot >= 0 and host.branch.known().attached:
                self.lifecycle.publish(host)
            self.lifecycle.stop_following(request)
            self._seat(request)
            s.counters["followers_parted"] += 1

    def rows(self, decode: np.ndarray) -> list[Row]:
        """Rows of the followers of these decode rows."""
        columns = self.s.slots
        in_step = set(decode.tolist())
        rows = []
        for slot in np.flatnonzero(columns.follows & columns.live & ~columns.leaving & (columns.in_flight == 0)).tolist():
            host = columns.used[slot].host
            if host is not None and host.slot in in_step:
                rows.append(self._row(columns.used[slot], int(columns.known[slot])))
        return rows

    def _row(self, request: Request, length: int) -> Row:
        assert request.host is not None
        self.s.counters["shared_logits"] += 1
        return Row(request.slot, length, _NO_TOKENS, length, samples=True, host=request.host.slot)

    def _is_in_step(self, request: Request, host: Request) -> bool:
        columns = self.s.slots
        if host.state is not State.RUNNING or columns.filling[host.slot] or columns.in_flight[host.slot]:
            return False
        is_as_long = columns.known[request.slot] == columns.known[host.slot]
        return bool(is_as_long and columns.last_token[request.slot] == columns.last_token[host.slot])

    def _take_slot(self, request: Request, host: Request) -> None:
        """A slot without pages. What the host computes counts as cached for the follower."""
        s, slots, length = self.s, self.s.slots, host.fill_len
        s.line.remove(request)
        if request.scheduled_at is None:
            request.scheduled_at = s.now
        slot = slots.take(request)
        request.state = State.RUNNING
        request.host = host
        slots.follows[slot] = True
        slots.committed[slot] = slots.planned[slot] = slots.known[slot] = slots.capacity[slot] = length
        request.count_attached(length)
        host.num_followers += 1
        slots.can_feed[host.slot] = False

    def _seat(self, request: Request) -> None:
        """Pages of its own, from what is cached of its tokens; back to the waiting line if there are none."""
        s, slot = self.s, request.slot
        self.lifecycle.sync(slot)
        s.slots.committed[slot] = s.slots.planned[slot] = 0  # what it goes on from is what it finds
        cached = self.lifecycle.attach(request)
        known = len(request.branch.known())
        if self.lifecycle.reserve(request, known):
            self.lifecycle.seat(request, cached)
        else:
            s.deny(request, NeedsPages(s.pages_for(known), s.free_pages()))
            self.lifecycle.give_up_seat(request)
