"""The scheduler's own work per step, against the number of running branches.

What is timed lies between two forwards: decode the worker's result, decide, encode the plan and the events. The worker is replaced by one that
answers any plan with arbitrary tokens, outside of the timed part. Decode-only batches: each branch generates without an end.
"""

import time
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from anabranch.runtime.config import SchedulerConfig
from anabranch.runtime.messages import (
    FromScheduler,
    OpenBranch,
    SamplingParams,
    StepPlan,
    StepResult,
    Submit,
    WorkerReady,
    as_ints,
    ints,
)
from anabranch.runtime.scheduler.policy import Policy
from anabranch.runtime.scheduler.scheduler import Scheduler

PAGE_SIZE = 16
BUDGET_US = 150.0
BUDGET_US_PER_ROW = 4.0
_VOCAB = 49_152


@dataclass(frozen=True, slots=True)
class Shape:
    """How many branches run, and what each has in front of its own tokens."""

    num_rows: int
    shared_tokens: int = 256
    own_tokens: int = 64
    pipeline_depth: int = 1


def run(*, small: bool = False) -> dict[str, float]:
    """Median and 90th percentile of microseconds a step, for each batch size and pipeline depth; and the budget's share used.

    small   fewer steps and sizes, for a test
    """
    sizes = (1, 32) if small else (1, 8, 32, 64, 128, 256)
    result: dict[str, float] = {}
    for depth in (1, 2):
        for num_rows in sizes:
            times = _step_times(Shape(num_rows, pipeline_depth=depth), num_steps=40 if small else 300)
            name = f"rows_{num_rows}_depth_{depth}"
            result[f"{name}_us"] = median(times)
            result[f"{name}_p90_us"] = float(np.percentile(times, 90))
            result[f"{name}_of_budget"] = median(times) / (BUDGET_US + BUDGET_US_PER_ROW * num_rows)
    result["order_10k_us"] = _order_time(500 if small else 10_000)
    return result


def table(result: dict[str, float]) -> str:
    """The result for people."""
    lines = ["rows  depth  median us    p90 us  budget us  used"]
    for key, value in result.items():
        if key.endswith("_of_budget"):
            _, rows, _, depth, *_ = key.split("_")
            budget = BUDGET_US + BUDGET_US_PER_ROW * int(rows)
            name = f"rows_{rows}_depth_{depth}"
            lines.append(
                f"{rows:>4}  {depth:>5}  {result[name + '_us']:9.0f}  {result[name + '_p90_us']:8.0f}  {budget:9.0f}  {value:4.0%}"
            )
    lines.append(f"a step with every slot taken and 10,000 requests waiting: {result['order_10k_us']:.0f} us")
    return "\n".join(lines)


def _step_times(shape: Shape, num_steps: int) -> list[float]:
    """Microseconds of each of `num_steps` decode steps."""
    scheduler = _scheduler(shape.num_rows, shape)
    shared = np.arange(shape.shared_tokens) % 97
    inbox: list[object] = []
    for i in range(shape.num_rows):
        own = (np.arange(shape.own_tokens + i % PAGE_SIZE) * 7 + i) % 89  # page ends spread over the steps
        inbox += [OpenBranch(i, i % 4, b"bench"), _endless(i, np.concatenate([shared, own]))]
    loop = _Loop(scheduler)
    loop.step(inbox)
    for _ in range(4 * shape.num_rows + 64):
        if loop.is_decoding(shape.num_rows):
            break
        loop.step([])
    assert loop.is_decoding(shape.num_rows), f"{shape.num_rows} branches do not decode together"
    for _ in range(8):
        loop.step([])
    return [loop.step([]) for _ in range(num_steps)]


def _order_time(num_waiting: int) -> float:
    """Microseconds of a step in which one branch runs, every slot is taken, and so many requests wait."""
    scheduler = _scheduler(1, Shape(1))
    loop = _Loop(scheduler)
    loop.step([OpenBranch(0, 0, b"bench"), _endless(0, np.arange(64))])
    waiting: list[object] = []
    for i in range(1, num_waiting + 1):
        waiting += [OpenBranch(i, i % 16, b"bench"), _endless(i, np.arange(48 + i % 16))]
    loop.step(waiting)
    for _ in range(8):
        loop.step([])
    return median(loop.step([]) for _ in range(50))


def _scheduler(max_slots: int, shape: Shape) -> Scheduler:
    ready = WorkerReady(
        num_pages=1 << 16, page_size=PAGE_SIZE, max_slots=max_slots, vocab_size=_VOCAB, context_length=1 << 20, load_report=""
    )
    config = SchedulerConfig(max_slots=max_slots, tokens_per_step=max(512, 2 * max_slots))
    return Scheduler(config, ready, policy=Policy(pipeline_depth=shape.pipeline_depth))


def _endless(i: int, prompt: np.ndarray) -> Submit:
    params = SamplingParams(temperature=0.8, seed=i, stop_token_ids=(2,))
    return Submit(i, i, ints(prompt), max_tokens=1024, params=params)


class _Loop:
    """Serves one scheduler: encodes what it sends, and answers each plan when the next step begins."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._plans: list[StepPlan] = []
        self._now = 0.0

    def step(self, messages: list) -> float:
        """One step; returns its microseconds."""
        self._now += 0.001
        answer = self._encoder.encode(self._answer(self._plans.pop(0))) if self._plans else None
        started = time.perf_counter()
        inbox = messages if answer is None else [*messages, self._decoder.decode(answer)]
        decision = self.scheduler.step(self._now, inbox)
        if decision.plan is not None:
            self._encoder.encode(decision.plan)
        self._encode_events(decision.outbox)
        elapsed = time.perf_counter() - started
        if decision.plan is not None:
            self._plans.append(decision.plan)
        return elapsed * 1e6

    def is_decoding(self, num_rows: int) -> bool:
        """Whether the last plan is one token for each of so many rows."""
        return bool(self._plans) and as_ints(self._plans[-1].num_new).tolist() == [1] * num_rows

    def _encode_events(self, events: list[FromScheduler]) -> None:
        if events:
            self._encoder.encode(events)

    def _answer(self, plan: StepPlan) -> StepResult:
        slots = as_ints(plan.slots)[as_ints(plan.sample) == 1]
        ids = (slots.astype(np.int64) * 31 + plan.step_id * 17) % (_VOCAB - 3) + 3
        return StepResult(plan.step_id, ints(slots), ints(np.ones(len(slots))), ints(ids), ints(np.zeros(len(slots))))
