"""The three stages in one thread of the host's process: the same objects as in three processes, joined by plain queues.

The thread takes every waiting message, lets the scheduler decide, executes the plan, and so on; when there is nothing to do it
sleeps until somebody puts a message into its mailbox, or until the next deadline.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.runtime.config import EngineConfig
from anabranch.runtime.errors import EngineStartError
from anabranch.runtime.laps import Laps
from anabranch.runtime.messages import Error, StepResult, ToClient, ToScheduler, ToTokenizer
from anabranch.runtime.trace import say
from anabranch.runtime.transport import Mailbox

if TYPE_CHECKING:
    from anabranch.runtime.client import Client
    from anabranch.runtime.faults import AnyWorker
    from anabranch.runtime.scheduler.scheduler import Scheduler
    from anabranch.runtime.tokenizer.service import TokenizerService

log = logging.getLogger("anabranch.engine")

Deliver = Callable[[ToClient], None]


@dataclass(frozen=True, slots=True)
class Arrived:
    client: int
    message: ToTokenizer


@dataclass(frozen=True, slots=True)
class Connected:
    client: int
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class Disconnected:
    client: int


@dataclass(frozen=True, slots=True)
class JobDone:
    job_id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Item = Arrived | Connected | Disconnected | JobDone | Stop
Build = Callable[["EngineThread"], "Parts"]


@dataclass(slots=True)
class Parts:
    """What the loop drives, and what is to be closed with it."""

    service: TokenizerService
    scheduler: Scheduler
    worker: AnyWorker
    close: Callable[[], None] = lambda: None


class EngineThread:
    """Runs an engine. `put` may be called from any thread. `started` is done when the model is loaded, or has failed to."""

    def __init__(self, config: EngineConfig, build: Build | None = None) -> None:
        self.config = config
        self.mailbox: Mailbox[Item] = Mailbox()
        self.started: Future[None] = Future()
        self.error: Error | None = None  # why it ended, once it has
        self.step_started: float | None = None  # time.monotonic of the step under way
        self._build = build or build_parts
        self._ports: dict[int, Deliver] = {}
        self._next_client = 1
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.thread = threading.Thread(target=self._main, name="anabranch-engine", daemon=True)

    def start(self) -> None:
        """Start, and wait until the engine is ready. Raises EngineStartError with the cause."""
        self.thread.start()
        try:
            wait([self.started], self.config.start_timeout_s)
        except BaseException:  # an interrupt: the thread ends as soon as it has loaded
            self.stop(0.0)
            raise
        if not self.started.done():
            self.stop(0.0)
            raise EngineStartError(f"the engine was not ready after {self.config.start_timeout_s:g} s")
        fault = self.started.exception()
        if fault is not None:
            raise EngineStartError(f"the engine did not start: {fault}") from fault

    def put(self, item: Item) -> None:
        self.mailbox.put(item)

    def new_client(self) -> int:
        with self._lock:
            self._next_client += 1
            return self._next_client - 1

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after the step under way, and wait for it so long. True if it has ended. Idempotent."""
        self.mailbox.put(Stop())
        if self._pid == os.getpid() and self.thread is not threading.current_thread() and self.thread.is_alive():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive() and self._pid == os.getpid()

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        self._note(f"the engine starts in a thread of this process, pid {self._pid}")
        try:
            parts = self._build(self)
        except BaseException as fault:
            self.error = Error("internal_error", f"the engine did not start: {fault}", code="engine_lost")
            self.started.set_exception(fault)
            return
        self.started.set_result(None)
        why = "the engine was closed"
        code = "engine_closed"
        loop = _Loop(self, parts)
        try:
            loop.run()
        except BaseException as fault:
            log.exception("the engine's loop failed")
            why, code = f"the engine failed: {type(fault).__name__}: {fault}", "engine_lost"
        loop.close()
        self._end(parts, Error("internal_error", why, code=code))

    def _note(self, what: str) -> None:
        if self.config.debug.level:
            say(what)

    def _end(self, parts: Parts, error: Error) -> None:
        self.error = error
        self._note(f"the engine's thread ends: {error.message}")
        for item in self.mailbox.take():
            if isinstance(item, Connected):
                self._ports[item.client] = item.deliver
        parts.service.engine_lost(error)
        for client, message in parts.service.to_clients:
            if client in self._ports:
                self._ports[client](message)
        parts.close()
        parts.worker.close()


def build_parts(thread: EngineThread) -> Parts:
    """The real stages. Raises what their making raises."""
    from anabranch.runtime.models_cache import resolve_model
    from anabranch.runtime.parts import (
        GrammarGate,
        Lanes,
        build_model_side,
        build_scheduler,
        build_worker,
        open_text,
        scheduler_ready,
    )
    from anabranch.runtime.tokenizer.service import TokenizerService

    config, laps = thread.config, Laps()
    path = resolve_model(config.model)
    laps.lap("model found")
    text = open_text(config, path)
    laps.lap("tokenizer and template")
    worker = build_worker(config, path, text, laps)
    ready = worker.ready()
    lanes = Lanes(lambda job_id, result: thread.put(JobDone(job_id, result)))
    gate = GrammarGate()
    service = TokenizerService(
        build_model_side(config, path, text, gate.check), scheduler_ready(ready), offload=lanes.offload, clock=time.monotonic,
        limits=config.limits,
    )  # fmt: skip

    def close() -> None:
        lanes.close()
        gate.close()

    return Parts(service, build_scheduler(config, ready), worker, close)


class _Loop:
    """The loop itself, apart from the thread's coming and going."""

    def __init__(self, thread: EngineThread, parts: Parts) -> None:
        from anabranch.runtime.faults import MessageFaults
        from anabranch.runtime.trace import StepRecorder

        self._thread, self._mailbox, self._ports = thread, thread.mailbox, thread._ports
        self._service, self._scheduler, self._worker = parts.service, parts.scheduler, parts.worker
        debug = thread.config.debug
        self._faults = MessageFaults(debug.faults) if debug.faults is not None else None
        self._recorder = StepRecorder(debug, thread.config) if debug.level else None
        self._results: list[StepResult] = []
        self._wakeup: float | None = None
        self._stopping = False

    def run(self) -> None:
        while True:
            now = time.monotonic()
            self._take_mail()
            if self._stopping:
                return
            deadline = self._service.poll(now)
            inbox = self._to_scheduler(now)
            has_work = inbox or self._results or not self._scheduler.is_idle
            if has_work or (self._wakeup is not None and self._wakeup <= now):
                if self._step(inbox):
                    continue
                if self._service.to_scheduler:
                    continue
            self._deliver()
            self._sleep(deadline)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _to_scheduler(self, now: float) -> list[ToScheduler]:
        inbox, self._service.to_scheduler = self._service.to_scheduler, []
        return inbox if self._faults is None else self._faults.pass_on(inbox, now)

    def _step(self, inbox: list[ToScheduler]) -> bool:
        """One decision and its execution. True if a plan was executed, so that its result must be taken next."""
        began = time.monotonic()
        results, self._results = self._results, []
        decision = self._scheduler.step(began, [*inbox, *results])
        self._scheduler.observe_planning((time.monotonic() - began) * 1e6)
        if self._recorder is not None:
            self._recorder.record(began, [*inbox, *results], decision, self._scheduler)
        self._wakeup = decision.next_wakeup
        for message in decision.outbox:
            self._service.on_scheduler(message)
        self._deliver()
        if decision.plan is None:
            return False
        self._thread.step_started = time.monotonic()
        self._results.append(self._worker.execute(decision.plan))
        self._thread.step_started = None
        return True

    def _sleep(self, deadline: float | None) -> None:
        held = self._faults.next_at if self._faults is not None else None
        times = [at for at in (deadline, self._wakeup, held) if at is not None]
        self._mailbox.wait(max(0.0, min(times) - time.monotonic()) if times else None)

    def _take_mail(self) -> None:
        for item in self._mailbox.take():
            match item:
                case Arrived(client, message):
                    self._service.handle(client, message)
                case JobDone(job_id, result):
                    self._service.on_job(job_id, result)
                case Connected(client, deliver):
                    self._ports[client] = deliver
                case Disconnected(client):
                    self._service.disconnect(client)
                    self._ports.pop(client, None)
                case Stop():
                    self._stopping = True

    def _deliver(self) -> None:
        if not self._service.to_clients:
            return
        events, self._service.to_clients = self._service.to_clients, []
        for client, message in events:
            deliver = self._ports.get(client)
            if deliver is not None:
                deliver(message)


class EmbeddedCarrier:
    """Carries one client's messages to the engine's thread and back. Events come on a thread of their own, because users' code
    hangs on them: what is slow there, or waits for the engine, must not hold up the engine."""

    def __init__(self, thread: EngineThread, client: Client) -> None:
        self._engine, self._number, self._client = thread, thread.new_client(), client
        self._events: Mailbox[ToClient | None] = Mailbox()
        thread.put(Connected(self._number, self._events.put))
        self._thread = threading.Thread(target=self._run, name="anabranch-client", daemon=True)
        self._thread.start()

    def send(self, message: ToTokenizer) -> None:
        self._engine.put(Arrived(self._number, message))

    def close(self) -> None:
        self._engine.put(Disconnected(self._number))
        self._events.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        while True:
            self._events.wait(None)
            for event in self._events.take():
                if event is None:
                    return
                self._client.on_event(event)
