"""The three processes' loops, as thin as they can be: take every waiting message, take one step, send.

Run as `python -m anabranch.runtime.stages STAGE DIRECTORY`, with the configuration as JSON on the first line of standard input. When
standard input ends, the parent is gone, and so is this process: at once, whatever it is doing.
"""

import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from anabranch.runtime.config import EngineConfig, from_json
from anabranch.runtime.messages import (
    FromScheduler,
    FromWorker,
    Heartbeat,
    Hello,
    SchedulerReady,
    StepResult,
    ToScheduler,
    ToTokenizer,
    ToWorker,
    WorkerReady,
    WorkerShutdown,
)
from anabranch.runtime.transport import ClientServer, Mailbox, StageLink, endpoint

STAGES = ("worker", "scheduler", "tokenizer")
READY = "ready"
HEARTBEAT_S = 1.0
PR_SET_PDEATHSIG = 1


def poll(sockets: list[Any], timeout_s: float | None) -> None:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(None if timeout_s is None else max(0, math.ceil(1000 * timeout_s)))


class Beats:
    """When the next sign of life is due, on the loop's own clock: a loop that hangs falls silent."""

    def __init__(self) -> None:
        self.next_at = time.monotonic()

    def due(self, step_id: int, busy: bool) -> Heartbeat | None:
        now = time.monotonic()
        if now < self.next_at:
            return None
        self.next_at = now + HEARTBEAT_S
        return Heartbeat(step_id, now, busy)


def run_worker(config: EngineConfig, directory: Path, ready: Callable[[], None]) -> None:
    from anabranch.runtime.models_cache import resolve_model
    from anabranch.runtime.parts import build_worker, open_text

    path = resolve_model(config.model)
    worker = build_worker(config, path, open_text(config, path))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link: StageLink[ToWorker] = StageLink(context, endpoint(directory, "worker"), ToWorker, config.limits, bind=False)
    link.send(worker.ready())
    ready()
    beats, step_id = Beats(), 0
    while True:
        plans = link.receive()
        for plan in plans:
            if isinstance(plan, WorkerShutdown):
                worker.close()
                return
            step_id = plan.step_id
            link.send(worker.execute(plan))
        if (beat := beats.due(step_id, bool(plans))) is not None:
            link.send(beat)
        link.flush()
        if not plans:
            poll([link.socket], HEARTBEAT_S)


def run_scheduler(config: EngineConfig, directory: Path, ready: Callable[[], None]) -> None:
    from anabranch.runtime.parts import build_scheduler, scheduler_ready
    from anabranch.runtime.trace import StepRecorder

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    limits = config.limits
    below: StageLink[FromWorker] = StageLink(context, endpoint(directory, "worker"), FromWorker, limits, bind=True)
    above: StageLink[ToScheduler] = StageLink(
        context, endpoint(directory, "scheduler"), ToScheduler, limits, bind=False
    )
    first = wait_for(below, WorkerReady)
    scheduler = build_scheduler(config, first)
    recorder = StepRecorder(config.debug, config) if config.debug.level else None
    above.send(scheduler_ready(first))
    ready()
    beats, step_id, wakeup = Beats(), 0, None
    while True:
        inbox: list[Any] = [*above.receive(), *(m for m in below.receive() if isinstance(m, StepResult))]
        now = time.monotonic()
        decision = scheduler.step(now, inbox)
        scheduler.observe_planning((time.monotonic() - now) * 1e6)
        if recorder is not None:
            recorder.record(now, inbox, decision, scheduler)
        if decision.plan is not None:
            step_id = decision.plan.step_id
            below.send(decision.plan)
        for event in decision.outbox:
            above.send(event)
        if (beat := beats.due(step_id, not scheduler.is_idle)) is not None:
            above.send(beat)
        if decision.is_finished:
            below.send(WorkerShutdown())
            return
        above.flush()
        below.flush()
        wakeup = decision.next_wakeup
        if decision.plan is None:
            left = HEARTBEAT_S if wakeup is None else min(HEARTBEAT_S, wakeup - time.monotonic())
            poll([above.socket, below.socket], left)


def run_tokenizer(config: EngineConfig, directory: Path, ready: Callable[[], None]) -> None:
    from anabranch.runtime.models_cache import resolve_model
    from anabranch.runtime.parts import GrammarGate, Lanes, build_model_side, open_text
    from anabranch.runtime.tokenizer.service import TokenizerService

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    below: StageLink[FromScheduler] = StageLink(
        context, endpoint(directory, "scheduler"), FromScheduler, config.limits, bind=True
    )
    path = resolve_model(config.model)
    text = open_text(config, path)
    first = wait_for(below, SchedulerReady)
    jobs: Mailbox[tuple[int, Any]] = Mailbox()
    lanes, gate = Lanes(lambda job_id, result: jobs.put((job_id, result))), GrammarGate()
    service = TokenizerService(
        build_model_side(path, text, gate.check),
        first,
        offload=lanes.offload,
        clock=time.monotonic,
        limits=config.limits,
    )
    clients: ClientServer[ToTokenizer] = ClientServer(
        context, endpoint(directory, "clients"), ToTokenizer, Hello, config.limits
    )
    ready()
    next_ping = time.monotonic() + HEARTBEAT_S
    while True:
        for client, message in clients.receive():
            service.handle(client, message)
        for client in clients.gone:
            service.disconnect(client)
        clients.gone.clear()
        for job_id, result in jobs.take():
            service.on_job(job_id, result)
        for event in below.receive():
            service.on_scheduler(event)
        deadline = service.poll(time.monotonic())
        requests, service.to_scheduler = service.to_scheduler, []
        for request in requests:
            below.send(request)
        events, service.to_clients = service.to_clients, []
        for client, answer in events:
            clients.send(client, answer)
        clients.flush()
        below.flush()
        if time.monotonic() >= next_ping:
            clients.ping()
            next_ping = time.monotonic() + HEARTBEAT_S
        left = min(next_ping, deadline if deadline is not None else next_ping) - time.monotonic()
        if clients.has_backlog or below.has_backlog:
            left = min(left, 0.01)
        if not jobs.arm():
            poll([clients.socket, below.socket, jobs.waker.fileno()], left)
        jobs.disarm()


def wait_for(link: StageLink[Any], kind: type) -> Any:
    """The first message of a kind; the parent ends us if it takes too long."""
    while True:
        for message in link.receive():
            if isinstance(message, kind):
                return message
        poll([link.socket], None)


# ---------------------------------------------------------------- life and death


def die_with_the_parent() -> None:
    """When the pipe from the parent closes, however the parent died, this process is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


def main(stage: str, directory: Path) -> None:
    if sys.platform == "linux":  # the parent starts us from a thread that lives as long as the engine
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the program; it closes the engine if it wants to
    config = from_json(sys.stdin.buffer.readline())
    threading.Thread(target=die_with_the_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format=f"anabranch {stage}: %(message)s")

    def ready() -> None:
        sys.stdout.write(READY + "\n")
        sys.stdout.flush()

    {"worker": run_worker, "scheduler": run_scheduler, "tokenizer": run_tokenizer}[stage](config, directory, ready)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
