"""Who gets a slot and pages in this step, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator

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


class Admission:
    """Prompts get all their pages at admission, so that prefill never runs short in the middle and two long prompts that do
    not fit together take turns instead of throwing each other out. Besides, room is left for what the running requests
    are expected to grow by. A request that would run alone needs no such room."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle
        self._since_fifo = 0  # admissions that passed over the oldest waiting request
        self._full_line: tuple[int, tuple[Denied, ...]] = (-1, ())  # (version of the line, why: no slot is free)

    def admit(self, budget: int) -> tuple[Denied, ...]:
        """Give slots to waiting requests, best first, while there are slots, pages and tokens. `budget`: tokens for prefill.

        Returns  reasons of those that got none because of the slots; others are noted one by one
        """
        s = self.s
        if not len(s.line):
            return ()
        if not s.slots.num_free:
            return self._deny_all()
        demand = _Demand(s, budget)
        growth = self._growth()
        held_for: int | None = None
        examined: set[int] = set()
        for request in self._candidates(examined):
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
                    growth += self._growth_of(request)
                    continue
                if is_oldest and isinstance(reason, NeedsPages) and self._must_hold():
                    held_for = request.request_id
            if request.request_id in s.requests:
                s.deny(request, reason)
        return ()

    def _deny_all(self) -> tuple[Denied, ...]:
        """Every slot is taken. Nothing to compute again while the line stays as it is."""
        s = self.s
        version, denied = self._full_line
        if version != s.line.version:
            reason = MaxRunning(s.max_running)
            front = s.line.ordered(s.manager)
            for request in front:
                request.wait_reason = "MaxRunning"
            denied = tuple(Denied(request.request_id, reason) for request in front)
            self._full_line = (s.line.version, denied)
        return denied

    def _candidates(self, examined: set[int]) -> Iterator[Request]:
        """Waiting requests in the order of the line, each once; the oldest first when its turn has come."""
        s = self.s
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
                    break  # an admission may have changed the order: a program had its share, or a prefix is cached now

    def _must_hold(self) -> bool:
        return self._since_fifo >= self.s.policy.fifo_every + self.s.policy.hold_after

    def _try(self, request: Request, growth: int) -> Reason | None:
        """Give the request a slot, or say why not."""
        with self.lifecycle.guard(request, "admitting"):
            return self._try_to_seat(request, growth)
        return TokenBudget(self.s.config.tokens_per_step)  # it has ended; nobody reads this

    def _try_to_seat(self, request: Request, growth: int) -> Reason | None:
        s = self.s
        blocker = self._blocker(request)
        if blocker is not None:
            return WaitsForPrefix(blocker.request_id)
        kv = request.branch.known()
        upto = self._pages_upto(request)
        if s.pages_for(upto) > s.manager.pool.num_pages:  # it has outgrown the pool, as far as it can ever get
            self._end_outgrown(request)
            return NeedsPages(s.pages_for(upto), s.manager.pool.num_pages)
        is_alone = not s.slots.used
        growth = 0 if is_alone else growth + self._growth_of(request)
        if not is_alone and self._is_often_preempted(request):
            growth = self._growth(in_worst_case=True) + self._growth_of(request)
        need, free = s.pages_for(upto) - s.manager.lookup(kv) // s.page_size + growth, s.free_pages()
        if not is_alone and need > free:
            return NeedsPages(need, free)
        if is_alone and request.must_start_over:
            self._empty_pool()
            request.must_start_over = False
        known = len(kv)
        cached = self.lifecycle.attach(request)
        kv = request.branch.known()
        if not is_alone:
            need, free = s.pages_for(upto) - kv.num_pages + growth, s.free_pages()
            if need > free or s.manager.can_reserve(kv, upto):
                s.manager.detach(kv)
                return NeedsPages(need, free)
        s.line.remove(request)
        s.slots.take(request)
        request.state = State.RUNNING
        if not self.lifecycle.reserve(request, upto):
            cached = self._start_over(request, upto)
        if request.scheduled_at is None:
            request.scheduled_at = s.now
        s.line.charge(request.branch.program, known - min(cached, kv.computed) + self._expected(request))
        self.lifecycle.seat(request, cached)
        return None

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

    def _growth(self, *, in_worst_case: bool = False) -> int:
        """Pages that the running requests are expected to take on top of those they have."""
        s = self.s
        used = np.fromiter((slot for slot, r in s.slots.used.items() if r.state is State.RUNNING), np.int64)
        if not len(used):
            return 0
        known, limit, prompt = s.slots.known[used], s.slots.limit[used], s.slots.prompt_len[used]
        if in_worst_case or self._is_guarded():
            final = limit
        else:
            final = known + s.headroom.expect(known - prompt, limit - prompt)
        pages = -(-final // s.page_size) - s.slots.capacity[used] // s.page_size
        return int(np.maximum(pages, 0).sum())

    def _growth_of(self, request: Request) -> int:
        s, known = self.s, len(request.branch.known())
        is_guarded = self._is_often_preempted(request) or self._is_guarded()
        final = request.limit if is_guarded else known + self._expected(request)
        return s.pages_for(final) - s.pages_for(known)

    def _expected(self, request: Request) -> int:
        generated = len(request.branch.known()) - request.prompt_len
        return int(self.s.headroom.expect(np.array([generated]), np.array([request.limit - request.prompt_len]))[0])

    def _is_guarded(self) -> bool:
        """Somebody runs who has been preempted often enough: only what fits in everybody's worst case is admitted."""
        return any(map(self._is_often_preempted, self.s.slots.used.values()))

    def _is_often_preempted(self, request: Request) -> bool:
        return request.num_preemptions > 0 and request.num_preemptions >= self.s.policy.max_preemptions


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
