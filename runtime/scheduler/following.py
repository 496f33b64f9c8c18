"""Requests with the same tokens compute them once.

When a request fills the last of its prompt, waiting requests with the very same prompt (siblings of a fork, say) take slots
without pages and *follow* it: each samples its own token, with its own path and parameters, from the logits of the host's
row. As long as a follower's tokens stay the host's, it goes on like that. When they part, the host publishes what they
have in common, and the follower attaches to it and goes on by itself, or as the host of others that drew the same token.

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
        """The host fills its last token in this step: rows for those that have been waiting for that."""
        for twin in host.twins:
            if twin.state is State.WAITING and twin in self.s.line and self.s.slots.num_free:
                self._take_slot(twin, host)
        host.twins.clear()
        return [self._row(request) for request in self._followers() if request.host is host]

    def part(self) -> None:
        """Followers whose tokens are not their host's any more, or whose host is gone, go on by themselves; those that left the
        same host with the same token, one after the other."""
        new_hosts: dict[tuple[int, int], Request] = {}
        for request in self._followers():
            host = request.host
            assert host is not None
            if self._is_in_step(request, host):
                continue
            key = (host.request_id, self._new_token(request))
            new_host = new_hosts.get(key)
            with self.lifecycle.guard(request, "seating"):
                self._leave(request, host)
                if new_host is not None:
                    self._follow(request, new_host)
                elif self._seat(request) and key[1] >= 0:
                    new_hosts[key] = request

    def rows(self, decode: np.ndarray) -> list[Row]:
        """Rows of the followers of these decode rows."""
        if not self.s.slots.num_following:
            return []
        in_step = set(decode.tolist())
        return [self._row(request) for request in self._followers() if request.host and request.host.slot in in_step]

    def _followers(self) -> list[Request]:
        """Those of which nothing is in flight."""
        columns = self.s.slots
        if not columns.num_following:
            return []
        slots = np.flatnonzero(columns.follows & columns.live & ~columns.leaving & (columns.in_flight == 0))
        return [columns.used[slot] for slot in slots.tolist()]

    def _is_in_step(self, request: Request, host: Request) -> bool:
        columns = self.s.slots
        if host.state is not State.RUNNING or columns.in_flight[host.slot]:
            return False
        if columns.known[request.slot] != columns.known[host.slot]:
            return False
        if request.agreed != columns.known[request.slot]:
            if self._new_token(request) != int(columns.last_token[host.slot]):
                return False
            request.agreed += 1
        return True

    def _new_token(self, request: Request) -> int:
        """The one token that the request got since it agreed with its host, or -1 if it got none or several."""
        columns, slot = self.s.slots, request.slot
        return int(columns.last_token[slot]) if columns.known[slot] == request.agreed + 1 else -1

    def _leave(self, request: Request, host: Request) -> None:
        """What the two have in common is cached from now on."""
        if host.slot >= 0 and host.branch.known().attached:
            self.lifecycle.publish(host)
        self.lifecycle.stop_following(request)
        self.s.counters["followers_parted"] += 1

    def _follow(self, request: Request, host: Request) -> None:
        slots = self.s.slots
        request.host, request.agreed = host, int(slots.known[host.slot])
        host.num_followers += 1
        slots.follows[request.slot] = True
        slots.num_following += 1
        slots.can_feed[host.slot] = False

    def _row(self, request: Request) -> Row:
        assert request.host is not None
        length = int(self.s.slots.known[request.slot])
        self.s.counters["shared_logits"] += 1
        return Row(request.slot, length, _NO_TOKENS, length, samples=True, host=request.host.slot)

    def _take_slot(self, request: Request, host: Request) -> None:
        """A slot without pages. What the host computes counts as cached for the follower."""
        s, slots, length = self.s, self.s.slots, host.fill_len
        s.line.remove(request)
        if request.scheduled_at is None:
            request.scheduled_at = s.now
        slot = slots.take(request)
        request.state = State.RUNNING
        slots.committed[slot] = slots.planned[slot] = slots.known[slot] = slots.capacity[slot] = length
        request.count_attached(length)
        request.charged_upto = length  # what others compute is free
        self._follow(request, host)

    def _seat(self, request: Request) -> bool:
        """Pages of its own, from what is cached of its tokens; back to the waiting line, and False, if there are none."""
        s, slot = self.s, request.slot
        self.lifecycle.sync(slot)
        s.slots.committed[slot] = s.slots.planned[slot] = 0  # what it goes on from is what it finds
        cached = self.lifecycle.attach(request)
        known = len(request.branch.known())
        if self.lifecycle.reserve(request, known):
            self.lifecycle.seat(request, cached)
            return True
        s.deny(request, NeedsPages(s.pages_for(known), s.free_pages()))
        self.lifecycle.give_up_seat(request)
        return False
