"""Faults on purpose: lost and late messages, steps that raise, hang or die. Only under an explicit debug setting."""

import os
import time
from collections.abc import Iterable
from typing import Protocol, TypeVar

from anabranch.runtime.config import FaultConfig
from anabranch.runtime.messages import StepPlan, StepResult, WorkerReady

T = TypeVar("T")


class AnyWorker(Protocol):
    """What a worker process drives: the real worker, a fake one, or either with faults."""

    def ready(self) -> WorkerReady: ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class InjectedFault(RuntimeError):
    """Raised where a debug setting asked for it."""


class FaultyWorker:
    """A worker whose steps fail as the setting says. Steps are counted from 1."""

    def __init__(self, worker: AnyWorker, faults: FaultConfig) -> None:
        self._worker, self._faults, self._step = worker, faults, 0

    def ready(self) -> WorkerReady:
        return self._worker.ready()

    def execute(self, plan: StepPlan) -> StepResult:
        self._step += 1
        if self._step == self._faults.raise_at_step:
            raise InjectedFault(f"step {self._step} raises, as the debug setting asks")
        if self._step == self._faults.exit_at_step:
            os._exit(70)
        time.sleep(self._faults.slow_step_s)
        return self._worker.execute(plan)

    def close(self) -> None:
        self._worker.close()


class MessageFaults:
    """Loses or holds back messages on their way to the scheduler, by the names of their types."""

    def __init__(self, faults: FaultConfig) -> None:
        self._faults = faults
        self._to_drop = faults.drop_count
        self._held: list[tuple[float, object]] = []

    def pass_on(self, messages: Iterable[T], now: float) -> list[T]:
        """What arrives now: of these messages, and of those held back before."""
        arrived: list[T] = [message for at, message in self._held if at <= now]  # type: ignore[misc]  # put in below
        self._held = [(at, message) for at, message in self._held if at > now]
        for message in messages:
            name = type(message).__name__
            if name in self._faults.drop and self._to_drop > 0:
                self._to_drop -= 1
            elif name in self._faults.delay:
                self._held.append((now + self._faults.delay_s, message))
            else:
                arrived.append(message)
        return arrived

    @property
    def next_at(self) -> float | None:
        return min((at for at, _ in self._held), default=None)
