"""The scheduler: a pure object that turns messages and results into plans and events.

`step(now, inbox) -> Decision` reads no clock, opens no socket, touches no tensor and draws no number. The same calls give
the same decisions, in production, in tests with a fake worker, and when a recorded inbox is run again.

What happens in a step, in order: leases end; messages and results are taken; requests past their deadline end; a plan is
made, if fewer than `pipeline_depth` are in flight.

Rules that users can rely on
- A request ends exactly once, with `Finished` or `Refused`. Afterwards its branch takes the next operation.
- `Refused` puts the branch back to where it was before the request: an error, a passed deadline, or an abort before it ran.
  What was computed stays cached. `Finished` keeps what was generated; an abort of a request that ran is `Finished("abort")`.
- A stop token is not part of the branch, nor of what was produced; `Finished.matched_token_id` names it.
- Generation ends with "length" at max_tokens, at the end of the context, or, for a request that runs alone, when the
  whole KV pool is full of it. A prompt that cannot fit the context or the pool with one token more is refused at once.
- An operation on a branch that is busy waits for it; closing a branch aborts what runs on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from heapq import heappop

from anabranch.runtime.config import CacheConfig, SchedulerConfig
from anabranch.runtime.errors import internal
from anabranch.runtime.messages import Error, StepPlan, StepResult, ToScheduler, WorkerReady
from anabranch.runtime.scheduler.branches import Pending
from anabranch.runtime.scheduler.decisions import Decision, Denied
from anabranch.runtime.scheduler.intake import Intake
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.planning import Planner
from anabranch.runtime.scheduler.policy import Policy
from anabranch.runtime.scheduler.restart import restart
from anabranch.runtime.scheduler.results import Results
from anabranch.runtime.scheduler.state import SchedulerState

log = logging.getLogger(__name__)


class Scheduler:
    """Owns every decision for one worker.

    config   how requests share the steps
    ready    what the worker said about itself
    cache    whether and how prefixes are kept
    policy   knobs that users seldom touch
    """

    def __init__(
        self, config: SchedulerConfig, ready: WorkerReady, *, cache: CacheConfig | None = None, policy: Policy | None = None
    ) -> None:
        self.state = SchedulerState(config, ready, cache or CacheConfig(), policy or Policy(), self._carry_out)
        self._lifecycle = Lifecycle(self.state)
        self._intake = Intake(self.state, self._lifecycle)
        self._results = Results(self.state, self._lifecycle)
        self._planner = Planner(self.state, self._lifecycle)
        self._stalled_since: float | None = None

    def step(self, now: float, inbox: Sequence[ToScheduler | StepResult]) -> Decision:
        """Take every message, decide, and say what to send. The caller gives the plan to the worker, and its result to a later
        step. `now` never goes back."""
        s = self.state
        s.now = now
        s.outbox, s.denied = [], []
        self._end_leases()
        for message in inbox:
            self._take(message)
        self._end_what_is_late()
        plan: StepPlan | None = None
        many_denied: tuple[Denied, ...] = ()
        if len(s.flights) < s.policy.pipeline_depth:
            plan, many_denied = self._planner.plan()
        self._watch(plan is not None)
        return Decision(
            plan=plan,
            outbox=s.outbox,
            denied=(*s.denied, *many_denied),
            num_behind=max(0, len(s.line) - s.policy.window),
            next_wakeup=self._next_wakeup(),
            is_finished=s.is_stopping and not s.flights and not s.slots.used,
        )

    def restart(self, now: float, ready: WorkerReady) -> None:
        """The worker was lost, and this is the new one. Live requests go on from their tokens; see `restart.py`."""
        s = self.state
        s.now = now
        for ended in restart(s, ready):
            self._lifecycle.give_back_branch(ended)

    @property
    def num_in_flight(self) -> int:
        return len(self.state.flights)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        s = self.state
        return not (s.requests or s.flights or s.slots.used or s.branches.num_queued)

    def observe_planning(self, us: float) -> None:
        """The caller, who has a clock, says how long a step took."""
        self.state.durations.observe(us)

    def _carry_out(self, pending: Pending) -> None:
        self._intake.carry_out(pending)

    def _take(self, message: ToScheduler | StepResult) -> None:
        if isinstance(message, StepResult):
            self._results.take(message)
            return
        try:
            self._intake.handle(message)
        except Exception as fault:
            if self.state.policy.raise_errors:
                raise
            log.exception("a message of type %s failed", type(message).__name__)
            self.state.counters["internal_errors"] += 1
            request_id = getattr(message, "request_id", None)
            request = self.state.requests.get(request_id) if request_id is not None else None
            if request is not None:
                self._lifecycle.fail(request, internal(fault, "handling a message"))

    def _end_what_is_late(self) -> None:
        s = self.state
        while s.deadlines and s.deadlines[0][0] <= s.now:
            self._intake.expire(heappop(s.deadlines)[1])

    def _end_leases(self) -> None:
        s = self.state
        if s.lease_ends and s.lease_ends[0] <= s.now:
            while s.lease_ends and s.lease_ends[0] <= s.now:
                heappop(s.lease_ends)
            s.manager.expire(s.now)

    def _next_wakeup(self) -> float | None:
        s = self.state
        while s.deadlines and s.deadlines[0][1] not in s.requests and s.deadlines[0][1] not in s.queued:
            heappop(s.deadlines)
        times = [s.deadlines[0][0]] if s.deadlines else []
        if s.lease_ends:
            times.append(s.lease_ends[0])
        if self._stalled_since is not None:
            times.append(self._stalled_since + s.policy.watchdog_s)
        return min(times) if times else None

    def _watch(self, has_plan: bool) -> None:
        """Waiting requests while nothing runs and nothing is planned: there is no such state by design. If there is, say so, and
        after a while end the request at the head rather than hang."""
        s = self.state
        is_stalled = bool(len(s.line)) and not has_plan and not s.flights and not s.slots.used
        if not is_stalled:
            self._stalled_since = None
            return
        if self._stalled_since is None:
            self._stalled_since = s.now
            s.counters["stalls"] += 1
            log.error("stalled: %d requests wait, nothing runs; reasons %s", len(s.line), s.denied[:8])
        elif s.now - self._stalled_since >= s.policy.watchdog_s:
            self._stalled_since = None
            oldest = s.line.oldest()
            assert oldest is not None
            self._lifecycle.refuse(oldest, Error("internal_error", f"the scheduler stalled: {s.denied[:1]}", code="stalled"))
