"""Everything the scheduler remembers between two steps. Each part of the scheduler reads and changes this one object."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush

import numpy as np

from anabranch.radix.manager import KVManager
from anabranch.runtime.config import CacheConfig, SchedulerConfig
from anabranch.runtime.messages import FromScheduler, WorkerReady
from anabranch.runtime.scheduler.branches import Branches, BranchRecord, Pending
from anabranch.runtime.scheduler.decisions import Denied, Reason
from anabranch.runtime.scheduler.headroom import Headroom
from anabranch.runtime.scheduler.policy import Policy, Program, WaitingLine
from anabranch.runtime.scheduler.prefixes import Frontier
from anabranch.runtime.scheduler.requests import Request
from anabranch.runtime.scheduler.slots import Slots
from anabranch.runtime.scheduler.stats import Durations


@dataclass(slots=True)
class Flight:
    """A plan that the worker has, and whose result is awaited. Columns have an entry for each row.

    upto      positions below it have KV when the result is there
    samples   whether the row samples a token
    notes     rows that are more than a decode step: slot -> what to do with the result
    """

    step_id: int
    slots: np.ndarray
    upto: np.ndarray
    samples: np.ndarray
    notes: dict[int, Note] = field(default_factory=dict)
    has_copies: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """first             first position that the row computes
    logprobs_from     the row was asked for the logprobs of the tokens from this position on
    tree              index of its score tree among the plan's
    is_follower       it samples from another row's logits and holds no pages
    """

    first: int
    logprobs_from: int | None = None
    tree: int | None = None
    is_follower: bool = False


class SchedulerState:
    """See the parts. `max_running` is what the settings, the worker's slots and the token budget allow: decode rows take at
    most half of a step, so that prefill always gets on."""

    def __init__(
        self, config: SchedulerConfig, ready: WorkerReady, cache: CacheConfig, policy: Policy,
        carry_out: Callable[[Pending], None],
    ) -> None:  # fmt: skip
        self.config, self.cache, self.policy = config, cache, policy
        self.use(ready)
        self.manager = self.new_manager()
        self.slots = Slots(self.max_running)
        self.line = WaitingLine(policy)
        self.frontier = Frontier()
        self.headroom = Headroom()
        self.branches = Branches(carry_out)
        self.programs: dict[int, Program] = {}
        self.requests: dict[int, Request] = {}
        self.queued: dict[int, Pending] = {}  # request_id -> a Submit that waits for its branch
        self.ended: dict[int, int] = {}  # request_id -> branch_id, of the last request of each idle branch
        self.deadlines: list[tuple[float, int]] = []  # a heap; entries of ended requests are dropped when they come up
        self.lease_ends: list[float] = []  # a heap
        self.flights: deque[Flight] = deque()
        self.copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot -> (src, dst) to send with its next row
        self.fresh: dict[int, list[np.ndarray]] = {}  # slot -> pages to report as fresh with its next row
        self.outbox: list[FromScheduler] = []
        self.denied: list[Denied] = []
        self.counters: Counter[str] = Counter()
        self.durations = Durations()
        self.now = 0.0
        self.num_steps = 0
        self.num_requests = 0
        self.num_families = 0
        self.is_stopping = False
        self.group_tokens: list[int] = []  # of each shared-prefix group

    def use(self, ready: WorkerReady) -> None:
        """Plan for this worker from now on."""
        self.ready = ready
        self.max_running = max(1, min(self.config.max_slots, ready.max_slots, self.config.tokens_per_step // 2))
        self.page_size = ready.page_size

    def new_manager(self) -> KVManager:
        return KVManager(
            self.ready.num_pages, self.page_size, policy=self.cache.policy, lease_share=self.cache.lease_share
        )

    def program(self, program_id: int) -> Program:
        program = self.programs.get(program_id)
        if program is None:
            program = self.programs[program_id] = Program(program_id)
        return program

    def push_deadline(self, deadline: float | None, request_id: int) -> None:
        if deadline is None:
            return
        heappush(self.deadlines, (deadline, request_id))
        live = len(self.requests) + len(self.queued)
        if len(self.deadlines) > 64 + 4 * live:  # most belong to requests that have ended
            self.deadlines = sorted(d for d in self.deadlines if d[1] in self.requests or d[1] in self.queued)

    def lease(self, record: BranchRecord, until: float) -> bool:
        """Keep an idle branch's cached prefix; False if the lease budget is too small for it."""
        if not self.manager.lease(record.known(), until, self.now):
            return False
        heappush(self.lease_ends, until)
        return True

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def free_pages(self) -> int:
        """Pages to be had without preempting anybody or breaking a lease."""
        return self.manager.num_free() + self.manager.num_cached()

    def deny(self, request: Request, reason: Reason) -> None:
        self.denied.append(Denied(request.request_id, reason))
        request.wait_reason = type(reason).__name__
