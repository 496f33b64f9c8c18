"""The three processes' loops, as thin as they can be: take every waiting message, take one step, send.

Run as `python -m anabranch.runtime.stages STAGE DIRECTORY`, with the configuration as JSON on the first line of standard input. When
standard input ends, the parent is gone, and so is this process: at once, whatever it is doing.
"""

import ctypes
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from anabranch.runtime.config import EngineConfig, from_json
from anabranch.runtime.laps import Laps
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

log = logging.getLogger("anabranch.stages")
STAGES = ("worker", "scheduler", "tokenizer")
READY = "ready"
HEARTBEAT_S = 1.0
PR_SET_PDEATHSIG = 1


def poller_of(*readable: Any) -> zmq.Poller:
    poller = zmq.Poller()
    for source in readable:
        poller.register(source, zmq.POLLIN)
    return poller


def wait(poller: zmq.Poller, timeout_s: float | None) -> None:
    poller.poll(None if timeout_s is None else max(0, math.ceil(1000 * timeout_s)))


class Life:
    """What the parent hears of this process: that it is ready, and once a second that it lives and what its loop does.

    The signs come from a thread of their own, so that a long step is told from a process that has been stopped; `turned` and
    `busy_since` come from the loop, so that a long step is told from a loop that hangs.
    """

    def __init__(self) -> None:
        self.turned = time.monotonic()  # when the loop last came round
        self.busy_since: float | None = None  # when the step under way began
        self._lock = threading.Lock()

    def ready(self) -> None:
        self._say(READY)
        threading.Thread(target=self._beat, name="anabranch-beats", daemon=True).start()

    def turn(self) -> None:
        self.turned = time.monotonic()

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            now = time.monotonic()
            since = self.busy_since
            self._say(f"{now - (since if since is not None else self.turned):.1f}")

    def _say(self, line: str) -> None:
        with self._lock, suppress(OSError):
            os.write(1, line.encode() + b"\n")


class Heartbeats:
    """When the next message of that name is due, for those who serve the health of the engine."""

    def __init__(self) -> None:
        self.next_at = time.monotonic()

    def due(self, step_id: int, busy: bool) -> Heartbeat | None:
        now = time.monotonic()
        if now < self.next_at:
            return None
        self.next_at = now + HEARTBEAT_S
        return Heartbeat(step_id, now, busy)


def run_worker(config: EngineConfig, directory: Path, life: Life) -> None:
    from anabranch.runtime.models_cache import resolve_model
    from anabranch.runtime.parts import build_worker, open_text

    laps = Laps()
    path = resolve_model(config.model)
    laps.lap("model found")
    text = open_text(config, path)
    laps.lap("tokenizer and template")
    worker = build_worker(config, path, text, laps)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link: StageLink[ToWorker] = StageLink(context, endpoint(directory, "worker"), ToWorker, config.limits, bind=False)
    link.send(worker.ready())
    life.ready()
    beats, step_id = Heartbeats(), 0
    poller = poller_of(link.socket)
    while True:
        life.turn()
        plans = link.receive()
        for plan in plans:
            if isinstance(plan, WorkerShutdown):
                worker.close()
                return
            step_id = plan.step_id
            life.busy_since = time.monotonic()
            link.send(worker.execute(plan))
            life.busy_since = None
        if (beat := beats.due(step_id, bool(plans))) is not None:
            link.send(beat)
        link.flush()
        if not plans:
            wait(poller, 0.01 if link.has_backlog else HEARTBEAT_S)


def run_scheduler(config: EngineConfig, directory: Path, life: Life) -> None:
    from anabranch.runtime.faults import MessageFaults
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
    faults = MessageFaults(config.debug.faults) if config.debug.faults is not None else None
    above.send(scheduler_ready(first))
    life.ready()
    beats, step_id = Heartbeats(), 0
    poller = poller_of(above.socket, below.socket)
    while True:
        life.turn()
        now = time.monotonic()
        requests: list[Any] = above.receive()
        if faults is not None:
            requests = faults.pass_on(requests, now)
        inbox = [*requests, *(m for m in below.receive() if isinstance(m, StepResult))]
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
            if recorder is not None:
                recorder.close()
            return
        above.flush()
        below.flush()
        if decision.plan is None:
            held = faults.next_at if faults is not None else None
            times = [at - time.monotonic() for at in (decision.next_wakeup, held) if at is not None]
            left = min(HEARTBEAT_S, *times) if times else HEARTBEAT_S
            wait(poller, min(left, 0.01) if above.has_backlog or below.has_backlog else left)


def run_tokenizer(config: EngineConfig, directory: Path, life: Life) -> None:
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
        build_model_side(config, path, text, gate.check),
        first,
        offload=lanes.offload,
        clock=time.monotonic,
        limits=config.limits,
    )
    clients: ClientServer[ToTokenizer] = ClientServer(
        context, endpoint(directory, "clients"), ToTokenizer, Hello, config.limits
    )
    life.ready()
    next_ping = time.monotonic() + HEARTBEAT_S
    poller = poller_of(clients.socket, below.socket, jobs.waker.fileno())
    while True:
        life.turn()
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
        if not jobs.arm() and not clients.gone:
            wait(poller, left)
        jobs.disarm()


def wait_for(link: StageLink[Any], kind: type) -> Any:
    """The first message of a kind; the parent ends us if it takes too long."""
    poller = poller_of(link.socket)
    while True:
        for message in link.receive():
            if isinstance(message, kind):
                return message
        wait(poller, None)


# ---------------------------------------------------------------- life and death


def die_with_the_parent(directory: Path, last: bool) -> None:
    """When the pipe from the parent closes, however the parent died, this process is gone; the last one clears the sockets away."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    if last:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def take_config() -> EngineConfig:
    """The first line of standard input, read byte by byte so that what follows is left for `die_with_the_parent`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(0)
        line += byte
    return from_json(bytes(line))


def main(stage: str, directory: Path) -> None:
    is_last = stage == "tokenizer"  # it holds the clients' socket, and needs no more than a moment to end by itself
    if sys.platform == "linux" and not is_last:  # the parent starts us from a thread that lives as long as the engine
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the program; it closes the engine if it wants to
    config = take_config()
    threading.Thread(target=die_with_the_parent, args=(directory, is_last), name="anabranch-parent", daemon=True).start()
    level = logging.INFO if config.debug.level else logging.WARNING
    logging.basicConfig(level=level, format=f"anabranch {stage}: %(message)s")
    log.info("started, pid %d", os.getpid())
    {"worker": run_worker, "scheduler": run_scheduler, "tokenizer": run_tokenizer}[stage](config, directory, Life())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
