"""What an engine says about its steps under `anabranch_DEBUG`: a line per step (2), every decision (3), checks (4), a record (5)."""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.runtime.config import CacheConfig, DebugConfig, EngineConfig, SchedulerConfig, cache_dir
from anabranch.runtime.errors import ConfigError
from anabranch.runtime.messages import StepResult, ToScheduler, WorkerReady

if TYPE_CHECKING:
    from anabranch.runtime.scheduler.decisions import Decision
    from anabranch.runtime.scheduler.scheduler import Scheduler

KEPT_RECORDS = 16

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToScheduler | StepResult)


class StepRecorder:
    """Looks at each step. At level 5 the inbox goes to a JSON-lines file that `anabranch replay FILE` runs again."""

    def __init__(self, debug: DebugConfig, config: EngineConfig) -> None:
        self._level, self._config = debug.level, config
        self._record_to = Path(debug.record_to) if debug.record_to else None
        self._file: Any = None

    def record(
        self, now: float, inbox: Sequence[ToScheduler | StepResult], decision: Decision, scheduler: Scheduler
    ) -> None:
        if self._level >= 2 and (inbox or decision.plan):
            say(describe(now, inbox, decision))
        if self._level >= 3:
            for denied in decision.denied:
                say(f"  request {denied.request_id} waits: {denied.reason}")
        if self._level >= 5:
            self._write(now, inbox, decision, scheduler)
        if self._level >= 4:
            check(scheduler)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, scheduler: Scheduler) -> Any:
        path = self._record_to or new_record(cache_dir() / "records")
        file = open(  # noqa: SIM115  # closed by `close`
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0
        )
        say(f"recording the scheduler's inbox to {path}")
        head = {"scheduler": self._config.scheduler, "cache": self._config.cache, "ready": scheduler.state.ready}
        file.write(msgspec.json.encode(head) + b"\n")
        return file

    def _write(
        self, now: float, inbox: Sequence[ToScheduler | StepResult], decision: Decision, scheduler: Scheduler
    ) -> None:
        if self._file is None:
            self._file = self._open(scheduler)
        plan = decision.plan.step_id if decision.plan is not None else None
        line = {"now": now, "inbox": [base64.b64encode(_encoder.encode(m)).decode() for m in inbox], "step_id": plan}
        self._file.write(msgspec.json.encode(line) + b"\n")


def new_record(directory: Path) -> Path:
    """The path of a new record in a directory of records, of which only the last ones are kept."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in sorted(directory.glob("*.jsonl"))[: -KEPT_RECORDS + 1]:
        old.unlink(missing_ok=True)
    return directory / f"{time.time_ns()}-{os.getpid()}.jsonl"


class _Head(msgspec.Struct):
    scheduler: SchedulerConfig
    cache: CacheConfig
    ready: WorkerReady


class _Line(msgspec.Struct):
    now: float
    inbox: list[str]
    step_id: int | None = None


def replay(path: Path, *, show: bool = True) -> int:
    """Run a recorded inbox through a new scheduler, with the cache checked after each step. Returns the number of steps.

    Raises ConfigError for a file that is no record, AssertionError where a rule breaks or a decision differs from the record.
    """
    from anabranch.runtime.scheduler.scheduler import Scheduler

    with open(path, "rb") as file:
        try:
            head = msgspec.json.decode(file.readline(), type=_Head)
            lines = [msgspec.json.decode(line, type=_Line) for line in file]
            inboxes = [[_decoder.decode(base64.b64decode(text)) for text in line.inbox] for line in lines]
        except (msgspec.MsgspecError, ValueError) as fault:
            raise ConfigError(f"{path} is not a record of an inbox: {fault}") from fault
    scheduler = Scheduler(head.scheduler, head.ready, cache=head.cache)
    for line, inbox in zip(lines, inboxes, strict=True):
        decision = scheduler.step(line.now, inbox)
        if show:
            say(describe(line.now, inbox, decision), to=sys.stdout)
        step_id = decision.plan.step_id if decision.plan is not None else None
        assert step_id == line.step_id, f"the record has step {line.step_id}, the replay decides {step_id}"
        check(scheduler)
    return len(lines)


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError if a rule of the cache is broken."""
    from anabranch.radix import invariants

    invariants.check(scheduler.state.manager)


def describe(now: float, inbox: Sequence[object], decision: Decision) -> str:
    names = ",".join(sorted({type(message).__name__ for message in inbox})) or "-"
    plan = decision.plan
    what = "no plan" if plan is None else f"step {plan.step_id}: {len(plan.slots) // 4} rows, {len(plan.token_ids) // 4} ids"
    return f"{now:.6f} in [{names}] {what}; out {len(decision.outbox)}, waiting {len(decision.denied) + decision.num_behind}"


def say(text: str, to: Any = None) -> None:
    print(f"anabranch: {text}", file=to or sys.stderr, flush=True)
