"""Who goes first: the waiting line, fair shares of programs, and who is preempted.

The line orders waiting requests by

1. priority, higher first;
2. what their program has been given so far, in units of `fair_quantum` tokens, less first;
3. whether they ran before (preempted ones first);
4. tokens of their prompt that are cached now, more first;
5. family (siblings of one fork together), then arrival.

Of the requests that are equal up to 3, the `window` oldest are compared by 4 and 5: ordering costs the same at any length of the
line, and nothing while neither the tree nor the line has changed.

Nobody starves. After every `fifo_every` - 1 admissions that passed over the oldest waiting request, the oldest is tried first,
whatever its priority, program or cached prefix. If it does not fit then, others may pass `hold_after` times more; after
that nobody is admitted until the oldest has its room. So with p older requests in the line, a request starts after at most
(p + 1) * (fifo_every + hold_after) admissions, and the time that the requests which run then take to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from anabranch.runtime.config import require_int, require_number

if TYPE_CHECKING:
    from anabranch.radix.manager import KVManager
    from anabranch.runtime.scheduler.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Knobs of the scheduler that users seldom touch."""

    pipeline_depth: int = 2  # plans in flight: 1 waits for each result, 2 plans one step ahead of the worker
    window: int = 256  # waiting requests that are compared by cached prefix
    fifo_every: int = 8  # each so-manieth admission is the oldest's
    hold_after: int = 32  # further admissions before room is kept for the oldest
    fair_quantum: int = 4096  # tokens of a program's share that count as equal
    max_preemptions: int = 3  # a request preempted so often runs only where everybody's worst case fits
    min_shared_tokens: int = 64  # shorter shared prefixes are not worth a group
    share_logits: bool = True  # requests with one and the same prompt sample from one row, if the worker can
    logits_bytes: int = 32 << 20  # rows of logits that a step may hold for scores and for logprobs of prompts
    watchdog_s: float = 5.0  # waiting requests, nothing running and nothing planned for so long is a stall
    raise_errors: bool = False  # tests: let exceptions out instead of ending the one request they belong to

    def __post_init__(self) -> None:
        require_int("pipeline_depth", self.pipeline_depth, 1, 2)
        for name in ("window", "fifo_every", "fair_quantum", "min_shared_tokens", "logits_bytes"):
            require_int(name, getattr(self, name), 1, 1 << 30)
        for name in ("hold_after", "max_preemptions"):
            require_int(name, getattr(self, name), 0, 1 << 30)
        require_number("watchdog_s", self.watchdog_s, 0.0, 86_400.0)


@dataclass(slots=True, eq=False)
class Program:
    """Requests of one program share with other programs as one. `served` counts tokens, from a floor that rises with time.

    `share` is that in quanta, as far as the waiting line goes by it: while no other program waits, it need not be exact.
    """

    program_id: int
    served: float = 0.0
    share: int = 0
    num_branches: int = 0
    waiting: dict[int, Request] = field(default_factory=dict)


LineKey = tuple[int, int, int]  # (-priority, program's share in quanta, 0 if it ran before else 1)


class WaitingLine:
    """Requests without a slot, in the order of the module's head."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._classes: dict[LineKey, dict[int, Request]] = {}
        self._by_age: list[tuple[int, int, Request]] = []  # a heap; those that left are dropped when they come up
        self._members: dict[int, Request] = {}
        self._programs: dict[int, Program] = {}  # those with a request in the line
        self._floor = 0.0  # a program that comes back starts here
        self._ordered: list[Request] = []
        self._ordered_at: tuple[int, int, int] | None = None
        self.version = 0  # changes when somebody joins or changes class: the order may be another one
        self.num_removed = 0  # of those who left

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._members.values()))

    def add(self, request: Request) -> None:
        program = request.branch.program
        if not program.waiting:
            self._welcome(program)
        program.waiting[request.request_id] = request
        self._members[request.request_id] = request
        heappush(self._by_age, (request.seq, request.request_id, request))
        self._file(request)

    def remove(self, request: Request) -> None:
        del self._members[request.request_id]
        program = request.branch.program
        del program.waiting[request.request_id]
        if not program.waiting:
            del self._programs[program.program_id]
        self._unfile(request)
        self.num_removed += 1
        if len(self._by_age) > 64 and len(self._by_age) > 4 * len(self._members):
            self._by_age = sorted((r.seq, r.request_id, r) for r in self._members.values())

    def charge(self, program: Program, tokens: float) -> None:
        """The program was given so many tokens' worth of work (or gave them back, if negative)."""
        self._floor = max(self._floor, program.served) if tokens > 0 else self._floor
        program.served += tokens
        if len(self._programs) > 1:
            self._refile(program)

    def _welcome(self, program: Program) -> None:
        """The program has not been waiting: idle time earns it nothing. Now the shares of the others count, too."""
        program.served = max(program.served, self._floor)
        self._programs[program.program_id] = program
        for other in self._programs.values() if len(self._programs) == 2 else (program,):
            self._refile(other)

    def _refile(self, program: Program) -> None:
        """Move the program's waiting requests if its share, in quanta, has changed. O(its waiting requests)."""
        share = int(program.served // self.policy.fair_quantum)
        if share == program.share:
            return
        program.share = share
        for request in program.waiting.values():
            self._unfile(request)
            self._file(request)

    def reorder(self) -> None:
        """The cache is another one: nothing that was known about it holds."""
        self.version += 1

    def oldest(self) -> Request | None:
        while self._by_age:
            request = self._by_age[0][2]
            if self._members.get(request.request_id) is request:
                return request
            heappop(self._by_age)
        return None

    def ordered(self, manager: KVManager) -> list[Request]:
        """The front of the line, best first; some may have left the line since. Do not change the list.

        Cost     nothing while neither line nor tree has changed; else O(window), whatever the length of the line
        """
        now = (self.version, self.num_removed // max(1, self.policy.window // 4), manager.epoch)
        if now != self._ordered_at:
            front = list(islice(self._in_classes(), self.policy.window))
            self._ordered = sorted(front, key=lambda r: self._sort_key(r, manager))
            self._ordered_at = now
        return self._ordered

    def _sort_key(self, request: Request, manager: KVManager) -> tuple[LineKey, int, int, int]:
        cached = manager.lookup(request.branch.known())
        if request.prompt_logprobs is not None:
            cached = max(0, min(cached, request.prompt_logprobs.needs_kv_from))
        return (request.line_key, -cached, request.branch.family, request.seq)

    def _in_classes(self) -> Iterator[Request]:
        for key in sorted(self._classes):
            yield from self._classes[key].values()

    def _file(self, request: Request) -> None:
        ran_before = 0 if request.scheduled_at is not None else 1
        request.line_key = (-request.branch.priority, request.branch.program.share, ran_before)
        self._classes.setdefault(request.line_key, {})[request.request_id] = request
        self.version += 1

    def _unfile(self, request: Request) -> None:
        members = self._classes[request.line_key]
        del members[request.request_id]
        if not members:
            del self._classes[request.line_key]


def choose_victim(running: Iterable[Request], asking: Request, max_preemptions: int) -> Request | None:
    """Who gives pages to `asking`: the youngest of the lowest priority, which may be `asking` itself.

    Never the most senior one. Those that were preempted often enough are spared while there is another choice. None if
    `asking` is the most senior and alone.
    """
    candidates = sorted(running, key=lambda r: r.rank())
    if len(candidates) < 2:
        return None
    juniors = candidates[1:]
    movable = [r for r in juniors if r.num_preemptions < max_preemptions]
    return (movable or juniors)[-1]
