"""What a step decided, as data: what runs, what is sent, and for each request that does not run, why."""

from dataclasses import dataclass

from anabranch.runtime.messages import FromScheduler, StepPlan


@dataclass(frozen=True, slots=True)
class NeedsPages:
    """No room in the KV pool: `need` pages (its own, and what the running requests are expected to grow by), `free` to be had."""

    need: int
    free: int


@dataclass(frozen=True, slots=True)
class WaitsForPrefix:
    """Another request is computing tokens that this one shares: waiting is cheaper than computing them twice."""

    request_id: int


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The step's tokens went to others."""

    limit: int


@dataclass(frozen=True, slots=True)
class LogitsBudget:
    """The step's rows of logits (each as wide as the vocabulary) went to others that want scores or their prompt's logprobs."""

    limit: int


@dataclass(frozen=True, slots=True)
class MaxRunning:
    """Every slot is taken."""

    limit: int


@dataclass(frozen=True, slots=True)
class HeldFor:
    """Room is being kept for an older request that has been overtaken too often."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """Its pages went to the tree, so that an older or more important request could go on."""

    by_request_id: int


Reason = NeedsPages | WaitsForPrefix | TokenBudget | LogitsBudget | MaxRunning | HeldFor | Preempted


@dataclass(frozen=True, slots=True)
class Denied:
    request_id: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call of `Scheduler.step` decided.

    plan           for the worker, or None: nothing to compute, or enough plans are in flight
    outbox         for the tokenizer process, in order
    denied         requests that did not run, and why; of a long queue only the front that was looked at
    num_behind     waiting requests further back than that
    next_wakeup    when to call again even if nothing arrives (a deadline or the end of a lease), on the scheduler's clock
    is_finished    a shutdown was asked for and nothing is in flight any more
    """

    plan: StepPlan | None
    outbox: list[FromScheduler]
    denied: tuple[Denied, ...] = ()
    num_behind: int = 0
    next_wakeup: float | None = None
    is_finished: bool = False
