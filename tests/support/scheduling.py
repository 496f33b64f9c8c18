"""Short words for tests of the scheduler: an engine over a fake worker, requests, and what came of them."""

import random
from collections.abc import Sequence
from typing import Any

from anabranch.runtime.config import CacheConfig, SchedulerConfig
from anabranch.runtime.messages import (
    Error,
    Finished,
    OpenBranch,
    Produced,
    QueryStats,
    Refused,
    SamplingParams,
    StatsReply,
    Submit,
    ints,
)
from anabranch.runtime.scheduler.policy import Policy
from anabranch.runtime.scheduler.scheduler import Scheduler
from anabranch.runtime.testing import TOLD_TO_FAIL, FakeEngine, FakeWorker

GREEDY = SamplingParams(temperature=0.0)


def make_engine(
    *, num_pages: int = 64, page_size: int = 4, max_slots: int = 8, budget: int = 32, depth: int = 2, vocab_size: int = 64,
    context_length: int = 512, cache: CacheConfig | None = None, max_waiting: int = 65_536, fail: Any = None,
    failure: Error = TOLD_TO_FAIL, raise_errors: bool = True, **policy: Any,
) -> FakeEngine:  # fmt: skip
    """`fail` and `failure` as in `FakeWorker`; further keywords are those of `Policy`."""
    worker = FakeWorker(
        num_pages=num_pages, page_size=page_size, max_slots=max_slots, vocab_size=vocab_size, context_length=context_length,
        fail=fail, failure=failure,
    )  # fmt: skip
    config = SchedulerConfig(max_slots=max_slots, tokens_per_step=budget, max_waiting=max_waiting)
    policy = {"pipeline_depth": depth, "raise_errors": raise_errors, **policy}
    return FakeEngine(Scheduler(config, worker.ready(), cache=cache, policy=Policy(**policy)), worker)


def submit(
    engine: FakeEngine, number: int, tokens: Sequence[int], max_tokens: int = 4, *, params: SamplingParams = GREEDY,
    program: int = 0, namespace: bytes = b"n", priority: int = 0, **fields: Any,
) -> None:  # fmt: skip
    """A request with a branch of its own; both have this number."""
    engine.send(
        OpenBranch(number, program, namespace, priority=priority),
        Submit(number, number, ints(tokens), max_tokens, params, arrival=engine.clock(), **fields),
    )


def prompt(seed: int, length: int, vocab_size: int = 64) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def finished(events: Sequence[object]) -> dict[int, Finished]:
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def refused(events: Sequence[object]) -> dict[int, Refused]:
    return {event.request_id: event for event in events if isinstance(event, Refused)}


def tokens_of(events: Sequence[object], request_id: int) -> list[int]:
    return [t for e in events if isinstance(e, Produced) and e.request_id == request_id for t in e.token_ids]


def stats_of(engine: FakeEngine) -> dict[str, Any]:
    engine.send(QueryStats(1, check=True))
    return next(event.stats for event in engine.run_until_idle() if isinstance(event, StatsReply))


def expect_all(engine: FakeEngine) -> None:
    """Admission expects every output to end at once, lets everybody in, and preemption has work."""
    engine.scheduler.state.headroom.expect = lambda generated, limit: generated * 0  # type: ignore[attr-defined]


def reasons(engine: FakeEngine) -> dict[int, object]:
    """Of the last decision; the first reason of each request."""
    return {denied.request_id: denied.reason for denied in reversed(engine.decision.denied)}  # type: ignore[attr-defined]


def tick(engine: FakeEngine, times: int = 1, *, works: bool = True) -> None:
    for _ in range(times):
        engine.tick(works=works)
