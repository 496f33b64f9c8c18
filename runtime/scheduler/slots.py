"""What is known of each slot, in numpy columns: a decode step touches no Python object per row.

Positions of one slot, in order:

```
0 ......... committed ......... planned ......... capacity ......... limit
  KV is there          in flight         may be written     (known: tokens whose ids are known)
```
"""

from __future__ import annotations

import numpy as np

from anabranch.runtime.scheduler.requests import Request

MAX_STOPS = 8  # stop ids compared in columns; a request with more takes the slow path
BUFFER = 64  # sampled tokens kept here before they are handed to the branch

_INT_COLUMNS = (
    "committed", "planned", "capacity", "known", "prompt_len", "limit", "last_token", "in_flight", "num_steps", "buffered",
    "pages_sent", "table_version", "rank", "group",
)  # fmt: skip
_FLAG_COLUMNS = ("live", "leaving", "filling", "follows", "started", "is_plain", "can_feed", "is_dirty")


class Slots:
    """Columns [num_slots]:

    committed, planned, capacity, known, limit    as in the picture
    prompt_len     position of the first generated token
    last_token     id of the last known token
    in_flight      steps on their way that have a row of this slot
    buffered       tokens in `buffer` that the branch has not got yet
    pages_sent, table_version   what the worker's copy of the page table is: length, and version of the branch's
    rank           place among the rows of a step; siblings are neighbours
    group          index of its shared-prefix group, or -1
    live           its request has not ended
    leaving        give it back when nothing of it is in flight
    filling        tokens are known whose KV is missing, beyond the one that a decode row computes
    follows        it has no pages: its tokens have been those of another request so far, whose logits it samples from
    started        the worker knows it
    is_plain       a result of one token needs nothing but appending it, and comparing it with stop ids and limit
    can_feed       a row may be planned while its token is still being sampled
    is_dirty       the page table changed since it was last sent
    """

    committed: np.ndarray
    planned: np.ndarray
    capacity: np.ndarray
    known: np.ndarray
    prompt_len: np.ndarray
    limit: np.ndarray
    last_token: np.ndarray
    in_flight: np.ndarray
    num_steps: np.ndarray
    buffered: np.ndarray
    pages_sent: np.ndarray
    table_version: np.ndarray
    rank: np.ndarray
    group: np.ndarray
    live: np.ndarray
    leaving: np.ndarray
    filling: np.ndarray
    follows: np.ndarray
    started: np.ndarray
    is_plain: np.ndarray
    can_feed: np.ndarray
    is_dirty: np.ndarray

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        for name in _INT_COLUMNS:
            setattr(self, name, np.zeros(num_slots, np.int32))
        for name in _FLAG_COLUMNS:
            setattr(self, name, np.zeros(num_slots, np.bool_))
        self.request_id = np.zeros(num_slots, np.int64)
        self.stops = np.full((num_slots, MAX_STOPS), -1, np.int32)
        self.buffer = np.zeros((num_slots, BUFFER), np.int32)
        self.owner: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.ends: list[int] = []  # given back, and the worker has not been told
        self.used: dict[int, Request] = {}  # slot -> its request, in the order they were taken
        self.changes = 0  # grows when the set of used slots changes
        self.num_following = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request) -> int:
        """A free slot, all columns fresh."""
        slot = self._free.pop()
        for name in _INT_COLUMNS:
            getattr(self, name)[slot] = 0
        for name in _FLAG_COLUMNS:
            getattr(self, name)[slot] = False
        self.table_version[slot] = -1
        self.group[slot] = -1
        self.rank[slot] = 2**30
        self.is_dirty[slot] = self.live[slot] = True
        self.request_id[slot] = request.request_id
        self.set_rules(slot, request)
        self.owner[slot] = self.used[slot] = request
        request.slot = slot
        self.changes += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Nothing of the slot is in flight, and its branch holds no pages."""
        request = self.used.pop(slot)
        assert not self.in_flight[slot], f"slot {slot} is given back with {self.in_flight[slot]} steps in flight"
        request.slot = -1
        self.owner[slot] = None
        self.live[slot] = self.leaving[slot] = self.filling[slot] = False
        if self.started[slot]:
            self.ends.append(slot)
        self._free.append(slot)
        self.changes += 1

    def unbuffered(self, slot: int) -> np.ndarray:
        """Sampled tokens that the branch has not got yet; the buffer is empty afterwards."""
        tokens = self.buffer[slot, : self.buffered[slot]].copy()
        self.buffered[slot] = 0
        return tokens

    def set_rules(self, slot: int, request: Request) -> None:
        """How the request's tokens are chosen and end."""
        params = request.params
        stops = params.stop_token_ids
        self.stops[slot] = -1
        self.stops[slot, : min(len(stops), MAX_STOPS)] = stops[:MAX_STOPS]
        self.is_plain[slot] = params.num_top_logprobs is None and params.grammar is None and len(stops) <= MAX_STOPS
        self.can_feed[slot] = params.grammar is None and not request.num_followers
        self.limit[slot], self.prompt_len[slot] = request.limit, request.prompt_len
