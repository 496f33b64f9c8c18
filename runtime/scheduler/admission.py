"""Who gets a slot and pages in this step, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from anabranch.runtime.scheduler.decisions import (
    Denied,
    HeldFor,
    MaxRunning,
    NeedsPages,
    Reason,
    TokenBudget,
    WaitsForPrefix,
)
from anabranch.runtime.scheduler.lifecycle import Lifecycle, over_capacity
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.state import SchedulerState

MAX_SHORT = 64  # requests that are found to lack pages before a step stops looking for one that does not


class Admission:
    """Prompts get all their pages at admission, so that prefill never runs short in the middle and two long prompts that do
    not fit together take turns instead of throwing each other out. Besides, room is left for what the running requests
    are expected to grow by. A request that would run alone needs no such room."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle
        self._since_fifo = 0  # admissions that passed over the oldest waiting request
        self._no_slot: _Verdict | None = None
        self._no_pages: _Verdict | None = None

    def admit(self, budget: int) -> tuple[Denied, ...]:
        """Give slots to waiting requests, best first, while there are slots, pages and tokens. `budget`: tokens for prefill.

        Returns  reasons that were found in an earlier step and still hold; new ones are noted one by one
        """
        s = self.s
        if not len(s.line):
            return ()
        if not s.slots.num_free:
            return self._deny_all()
        growth = self._growth()
        if self._no_pages is not None and self._no_pages.holds(s, s.free_pages() - growth.expected):
            return self._no_pages.denied
        demand = _Demand(s, budget)
        first, own_needs = len(s.denied), list[int]()
        held_for: int | None = None
        for request in self._candidates():
            reason: Reason | None
            if not s.slots.num_free:
                reason = MaxRunning(s.max_running)
            elif held_for is not None:
                reason = HeldFor(held_for)
            elif not demand.has_room:
                reason = TokenBudget(s.config.tokens_per_step)
            else:
                is_oldest = request is s.line.oldest()
                reason = self._try(request, growth)
                if reason is None:
                    self._since_fifo = 0 if is_oldest else self._since_fifo + 1
                    demand.add(request)
                    growth.add(self._growth_of(request))
                    continue
                if isinstance(reason, NeedsPages):
                    own_needs.append(reason.need - growth.expected)
                    if is_oldest and self._must_hold():
                        held_for = request.request_id
            if request.request_id in s.requests:
                s.deny(request, reason)
            if len(own_needs) == MAX_SHORT:
                break
        self._remember_shortage(first, own_needs, growth)
        return ()

    def _deny_all(self) -> tuple[Denied, ...]:
        """Every slot is taken. Nothing to compute again while the line stays as it is."""
        s = self.s
        if self._no_slot is None or not self._no_slot.holds(s, -1):
            reason = MaxRunning(s.max_running)
            front = s.line.ordered(s.manager)
            for request in front:
                request.wait_reason = "MaxRunning"
            denied = tuple(Denied(request.request_id, reason) for request in front)
            self._no_slot = _Verdict(denied, (s.line.version, s.line.num_removed), 0)
        return self._no_slot.denied

    def _remember_shortage(self, first: int, own_needs: list[int], growth: _Growth) -> None:
        """If pages were all that anybody lacked, nobody needs to be asked again before there are enough for the smallest."""
        s, denied = self.s, tuple(self.s.denied[first:])
        is_shortage = len(denied) == len(own_needs) > 0 and not growth.is_guarded
        self._no_pages = None
        if is_shortage and all(isinstance(entry.reason, NeedsPages) for entry in denied):
            state = (s.line.version, s.line.num_removed, s.manager.epoch)
            self._no_pages = _Verdict(denied, state, min(own_needs))

    def _candidates(self) -> Iterator[Request]:
        """Waiting requests in the order of the line, each once; the oldest first when its turn has come."""
        s, examined = self.s, set[int]()
        oldest = s.line.oldest()
        if oldest is not None and self._since_fifo >= s.policy.fifo_every - 1:
            examined.add(oldest.request_id)
            yield oldest
        version = -1
        while version != s.line.version and s.slots.num_free:
            version = s.line.version
            for request in s.line.ordered(s.manager):
                if request.request_id in examined or request not in s.line:
                    continue
                examined.add(request.request_id)
                yield request
                if s.line.version != version and s.slots.num_free:
                    break  # an admission changed the order: its program has had its share

    def _must_hold(self) -> bool:
        return self._since_fifo >= self.s.policy.fifo_every + self.s.policy.hold_after

    def _try(self, request: Request, growth: _Growth) -> Reason | None:
        """Give the request a slot, or say why not."""
        with self.lifecycle.guard(request, "admitting"):
            blocker = self._blocker(request)
            if blocker is not None:
                return WaitsForPrefix(blocker.request_id)
            return self._try_to_seat(request, growth)
        return TokenBudget(self.s.config.tokens_per_step)  # it has ended; nobody reads this

    def _try_to_seat(self, request: Request, growth: _Growth) -> NeedsPages | None:
        s, kv = self.s, request.branch.known()
        upto = self._pages_upto(request)
        if s.pages_for(upto) > s.manager.pool.num_pages:  # it has outgrown the pool, as far as it can ever get
            self._end_outgrown(request)
            return NeedsPages(s.pages_for(upto), s.manager.pool.num_pages)
        is_alone = not s.slots.used
        own, free = s.pages_for(upto) - s.manager.lookup(kv) // s.page_size, s.free_pages()
        if not is_alone and own > free - growth.expected:
            return NeedsPages(own + growth.expected, free)
        spare = 0 if is_alone else growth.with_(self._growth_of(request))
        if not is_alone and own + spare > free:
            return NeedsPages(own + spare, free)
        if is_alone and request.must_start_over:
            self._empty_pool()
            request.must_start_over = False
        cached = self.lifecycle.attach(request)
        kv = request.branch.known()
        if not is_alone:
            own, free = s.pages_for(upto) - kv.num_pages, s.free_pages()
            if own + spare > free or s.manager.can_reserve(kv, upto):
                s.manager.detach(kv)
                return NeedsPages(own + spare, free)
        self._seat(request, cached, upto)
        return None

    def _seat(self, request: Request, cached: int, upto: int) -> None:
        s = self.s
        s.line.remove(request)
        s.slots.take(request)
        request.state = State.RUNNING
        if not self.lifecycle.reserve(request, upto):
            cached = self._start_over(request, upto)
        if request.scheduled_at is None:
            request.scheduled_at = s.now
        kv = request.branch.known()
        expected = self._expected(request)
        request.charged_upto = len(kv) + expected
        s.line.charge(request.branch.program, len(kv) - kv.computed + expected)
        self.lifecycle.seat(request, cached)

    def _end_outgrown(self, request: Request) -> None:
        """A pool cannot hold what the request knows: it has grown to that, or the pool was a larger one when it came."""
        s = self.s
        s.counters["outgrew_pool"] += 1
        if len(request.branch.known()) > request.prompt_len:
            self.lifecycle.finish(request, "length")
        else:
            self.lifecycle.refuse(request, over_capacity(request.prompt_len, 1, s.manager.pool.num_pages, s.page_size))

    def _blocker(self, request: Request) -> Request | None:
        """Who is computing what this request needs and does not have."""
        s, kv = self.s, request.branch.known()
        if not len(s.frontier):
            return None
        cached = s.manager.lookup(kv)
        wanted = len(kv) - 1  # the last token is always computed, for its logits
        if request.prompt_logprobs is not None and request.prompt_logprobs.next < request.prompt_len:
            wanted = max(0, request.prompt_logprobs.needs_kv_from)
        if cached >= wanted:
            return self._twin_host(request, cached)
        found = s.frontier.blocker(request, cached)
        if found is None:
            return None
        other, shared = found
        self._offer_twin(request, other, shared)
        return other

    def _twin_host(self, request: Request, cached: int) -> Request | None:
        """The last token is all that is missing, and somebody with the very same prompt is computing it: share its logits."""
        found = self.s.frontier.blocker(request, cached)
        return found[0] if found is not None and self._offer_twin(request, found[0], found[1]) else None

    def _offer_twin(self, request: Request, host: Request, shared: int) -> bool:
        is_same = shared == len(request.branch.known()) == host.fill_len
        is_same = is_same and self.s.slots.planned[host.slot] < host.fill_len  # its last row is still to be planned
        can = self.s.ready.shares_logits and self.s.policy.share_logits
        if not (can and is_same and request.wants_tokens and request.prompt_logprobs is None and host.score is None):
            return False
        if request not in host.twins:
            host.twins.append(request)
        return True

    def _pages_upto(self, request: Request) -> int:
        """Positions whose pages a request gets at admission: all it knows, and the scratch of its score trees."""
        known = len(request.branch.known())
        return known + (max(trie.num_nodes for trie in request.score.tries) if request.score is not None else 0)

    def _start_over(self, request: Request, upto: int) -> int:
        """Alone, and still short: its own cached path is in the way (a page to copy needs one more). Give that up."""
        s, kv = self.s, request.branch.known()
        s.manager.detach(kv)
        s.copies.clear()
        self._empty_pool()
        cached = self.lifecycle.attach(request)
        is_seated = self.lifecycle.reserve(request, upto)
        assert is_seated, f"{upto} tokens do not fit into an empty pool: {s.manager.stats()}"
        return cached

    def _empty_pool(self) -> None:
        manager = self.s.manager
        manager.settle()
        while len(manager.leases):
            manager.leases.demote_oldest()
        manager.flush()

    # ------------------------------------------------------------ head-room

    def _growth(self) -> _Growth:
        """Pages that the running requests are expected to take on top of those they have, and those that they may take."""
        s = self.s
        used = np.fromiter((slot for slot, r in s.slots.used.items() if r.state is State.RUNNING), np.int64)
        is_guarded = any(map(self._is_often_preempted, s.slots.used.values()))
        if not len(used):
            return _Growth(0, 0, is_guarded)
        known, limit, prompt = s.slots.known[used], s.slots.limit[used], s.slots.prompt_len[used]
        has = s.slots.capacity[used] // s.page_size
        finals = (known + s.headroom.expect(known - prompt, limit - prompt), limit)
        expected, most = (int(np.maximum(-(-final // s.page_size) - has, 0).sum()) for final in finals)
        return _Growth(most if is_guarded else expected, most, is_guarded)

    def _growth_of(self, request: Request) -> _Growth:
        s, known = self.s, len(request.branch.known())
        has, is_guarded = s.pages_for(known), self._is_often_preempted(request)
        most = s.pages_for(request.limit) - has
        return _Growth(s.pages_for(known + self._expected(request)) - has, most, is_guarded)

    def _expected(self, request: Request) -> int:
        """Tokens that the request is expected to generate from here on; remembered until something new is learnt."""
        s, generated = self.s, len(request.branch.known()) - request.prompt_len
        key = (generated, s.headroom.num_observed)
        if request.expected_at != key:
            limit = request.limit - request.prompt_len
            request.expected = int(s.headroom.expect(np.array([generated]), np.array([limit]))[0])
            request.expected_at = key
        return request.expected

    def _is_often_preempted(self, request: Request) -> bool:
        return request.num_preemptions > 0 and request.num_preemptions >= self.s.policy.max_preemptions


@dataclass(slots=True)
class _Growth:
    """Pages to leave free for requests that run. Guarded (somebody was preempted often enough), `expected` is the most."""

    expected: int
    most: int
    is_guarded: bool

    def with_(self, other: _Growth) -> int:
        """What both together need."""
        is_guarded = self.is_guarded or other.is_guarded
        return self.most + other.most if is_guarded else self.expected + other.expected

    def add(self, other: _Growth) -> None:
        self.expected = self.with_(other)
        self.most += other.most
        self.is_guarded |= other.is_guarded


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why nobody in the line gets a slot: true while the line (and the cache) stay as they are and pages are fewer than `least`."""

    denied: tuple[Denied, ...]
    state: tuple[int, ...]
    least: int

    def holds(self, s: SchedulerState, spare_pages: int) -> bool:
        now = (s.line.version, s.line.num_removed, s.manager.epoch)
        return self.state == now[: len(self.state)] and spare_pages < self.least and bool(s.slots.used)


class _Demand:
    """Whether a newcomer would get any of the step's prefill tokens: the oldest request may take half of them."""

    def __init__(self, s: SchedulerState, budget: int) -> None:
        self._slots = s.slots
        self._budget = budget
        remaining = [self._remaining(r) for r in sorted(s.slots.used.values(), key=Request.rank) if self._is_filling(r)]
        self._oldest = remaining[0] if remaining else None
        self._others = sum(remaining[1:])

    def add(self, request: Request) -> None:
        if self._oldest is None:
            self._oldest = self._remaining(request)
        else:
            self._others += self._remaining(request)

    @property
    def has_room(self) -> bool:
        if self._oldest is None:
            return self._budget > 0
        return self._oldest + self._others < self._budget or self._others < self._budget // 2

    def _is_filling(self, request: Request) -> bool:
        return request.state is State.RUNNING and self._remaining(request) > 0

    def _remaining(self, request: Request) -> int:
        missing = int(self._slots.known[request.slot] - self._slots.planned[request.slot])
        return max(0, missing) + (request.score.trie.num_nodes if request.score is not None else 0)
