"""Clients of an engine in another process, and the door through which an engine lets them in."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from anabranch.runtime.client import Client
from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.errors import EngineError
from anabranch.runtime.inprocess import Arrived, Connected, Disconnected, EngineThread
from anabranch.runtime.messages import Error, Hello, ToClient, ToTokenizer
from anabranch.runtime.transport import ClientLink, ClientServer, Mailbox, endpoint, private_directory, remove_directory

PING_S = 1.0
log = logging.getLogger("anabranch.client")
LOST = Error(
    type="internal_error",
    message="the engine is gone: its process ended, or it was closed. Start a new one, and run the program again",
    code="engine_lost",
)


class RemoteCarrier:
    """A thread that carries one client's messages over its socket. `lost` tells why the engine went, if somebody knows."""

    def __init__(self, address: str, client: Client, *, lost: Callable[[], Error | None] = lambda: None) -> None:
        if not address.startswith("ipc://") or not Path(address.removeprefix("ipc://")).exists():
            raise EngineError(
                f"no engine listens at {address!r}: pass the `address` of an Engine(listen=True) that is running"
            )
        self._address, self._client, self._lost = address, client, lost
        self._mailbox: Mailbox[ToTokenizer | None] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="anabranch-client", daemon=True)
        self._thread.start()

    def send(self, message: ToTokenizer) -> None:
        self._mailbox.put(message)

    def close(self) -> None:
        self._mailbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        try:
            self._carry()
        except Exception as fault:
            log.exception("the connection to the engine failed")
            self._client.lose(Error("internal_error", f"the connection to the engine failed: {fault}", code="engine_lost"))

    def _carry(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link: ClientLink[ToClient] = ClientLink(context, self._address, ToClient, LimitsConfig())
        poller = zmq.Poller()
        for readable in (link.socket, link.monitor, self._mailbox.waker.fileno()):
            poller.register(readable, zmq.POLLIN)
        try:
            while not link.is_lost:
                for message in self._mailbox.take():
                    if message is None:
                        return
                    link.send(message)
                link.flush()
                for event in link.receive():
                    self._client.on_event(event)
                if not self._mailbox.arm():
                    poller.poll(10 if link.has_backlog else None)
                self._mailbox.disarm()
            self._client.lose(self._lost() or LOST)
        finally:
            link.close()
            context.destroy(linger=200)


class Door:
    """Lets other processes of this user into an engine thread: a ROUTER in a directory that only they may enter."""

    def __init__(self, engine: EngineThread, limits: LimitsConfig) -> None:
        self._engine, self._limits = engine, limits
        self._directory = private_directory()
        self.address = endpoint(self._directory, "clients")
        self._mailbox: Mailbox[tuple[int, ToClient] | None] = Mailbox()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anabranch-door", daemon=True)
        self._thread.start()
        if not self._bound.wait(10):
            raise EngineError(f"the engine cannot listen at {self.address}")

    def close(self) -> None:
        self._mailbox.put(None)
        self._thread.join(2.0)
        remove_directory(self._directory)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server: ClientServer[ToTokenizer] = ClientServer(context, self.address, ToTokenizer, Hello, self._limits)
        self._bound.set()
        inside: dict[int, int] = {}  # client of the socket -> client of the engine
        outside: dict[int, int] = {}
        poller = zmq.Poller()
        poller.register(server.socket, zmq.POLLIN)
        poller.register(self._mailbox.waker.fileno(), zmq.POLLIN)
        next_ping = time.monotonic() + PING_S
        try:
            while True:
                for item in self._mailbox.take():
                    if item is None:
                        return
                    if item[0] in outside:
                        server.send(outside[item[0]], item[1])
                server.flush()
                for client, message in server.receive():
                    if client not in inside:
                        inside[client] = number = self._engine.new_client()
                        outside[number] = client
                        self._engine.put(Connected(number, self._forward(number)))
                    self._engine.put(Arrived(inside[client], message))
                for client in server.gone:
                    if (gone := inside.pop(client, None)) is not None:
                        del outside[gone]
                        self._engine.put(Disconnected(gone))
                server.gone.clear()
                if time.monotonic() >= next_ping:
                    server.ping()
                    next_ping = time.monotonic() + PING_S
                if not self._mailbox.arm() and not server.gone:
                    until_ping = max(0, int(1000 * (next_ping - time.monotonic())) + 1)
                    poller.poll(10 if server.has_backlog else until_ping)
                self._mailbox.disarm()
        finally:
            server.close()
            with suppress(zmq.ZMQError):
                context.destroy(linger=200)

    def _forward(self, number: int) -> Callable[[ToClient], None]:
        return lambda event: self._mailbox.put((number, event))
