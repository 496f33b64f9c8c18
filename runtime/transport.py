"""How messages move: typed, bounded, never pickled. ZMQ over ipc between processes, plain queues within one.

Every socket lives in a fresh directory that only its owner may enter (`private_directory`). What arrives and is not a
message of the expected union (malformed, oversized, unknown) is dropped and counted; it disturbs nobody.

    StageLink      one peer: PAIR sockets between the stages
    ClientServer   many peers: the tokenizer process's ROUTER, with its own notion of who is who
    ClientLink     a client's DEALER; knows when the server is gone
    Mailbox        a queue within the process that any thread, and `__del__`, may put into

An empty frame is a sign of life: never a message, never counted.
"""

import contextlib
import errno
import fcntl
import logging
import math
import os
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from anabranch.runtime.config import LimitsConfig, runtime_dir
from anabranch.runtime.errors import EngineError

log = logging.getLogger("anabranch.transport")
T = TypeVar("T")

PING = b""
PREFIX = "anabranch-"
MAX_IPC_PATH = 100  # sockaddr_un has 108 bytes on Linux, 104 elsewhere
MAX_CLIENTS = 4096
_encoder = msgspec.msgpack.Encoder()


class LinkFull(EngineError):
    """The peer has not read for so long that the bound of the queue is reached."""


# ---------------------------------------------------------------- directories


def private_directory(base: Path | None = None) -> Path:
    """A new directory with mode 0700, its path short enough for a socket; removed by `remove_directory`.

    It holds a locked file while its owner lives, so that a later engine can clear what a killed one left behind.
    """
    for parent in (base, runtime_dir(), Path(tempfile.gettempdir()), Path("/tmp")):
        if parent is None or len(str(parent)) > MAX_IPC_PATH - 40:
            continue
        with contextlib.suppress(OSError):
            clear_stale_directories(parent)
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            _locks[path] = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(_locks[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path
    raise EngineError("no writable directory with a short path for sockets: set XDG_RUNTIME_DIR or TMPDIR")


_locks: dict[Path, int] = {}


def remove_directory(path: Path) -> None:
    """Remove a directory made here. Idempotent."""
    shutil.rmtree(path, ignore_errors=True)
    descriptor = _locks.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def clear_stale_directories(parent: Path) -> None:
    """Remove our directories whose owner is dead: nobody holds the lock any more."""
    for path in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < 60:
                continue  # somebody else's, or so new that its lock may not be taken yet
            descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


# ---------------------------------------------------------------- decoding


class Inlet(Generic[T]):
    """Decodes one direction's union; counts what it drops, and warns at most once in ten seconds."""

    def __init__(self, union: Any, name: str) -> None:
        self.name = name
        self.dropped: Counter[str] = Counter()
        self._decoder = msgspec.msgpack.Decoder(union)
        self._last_warning = float("-inf")

    def decode(self, frames: list[bytes]) -> T | None:
        """The message, or None if there is none in these frames."""
        if len(frames) != 1:
            self.drop("multipart", f"{len(frames)} frames")
            return None
        if frames[0] == PING:
            return None
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as fault:
            self.drop("malformed", str(fault))
            return None

    def drop(self, kind: str, why: str) -> None:
        self.dropped[kind] += 1
        now = time.monotonic()
        if now - self._last_warning >= 10.0:
            self._last_warning = now
            log.warning("%s: dropped a %s message (%s); %d so far", self.name, kind, why, self.dropped.total())


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


# ---------------------------------------------------------------- waking


class Waker:
    """Wakes a poller from any thread, from `__del__`, and from signal handlers: one write that takes no lock."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is left to wake
            os.write(self._write, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        write, self._write = self._write, -1
        for descriptor in (self._read, write):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Mailbox(Generic[T]):
    """A queue with one reader. `put` may be called from anywhere; the reader polls `waker` or calls `wait`."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._items: deque[T] = deque()
        self._poller = zmq.Poller()
        self._poller.register(self.waker.fileno(), zmq.POLLIN)
        self._is_waiting = False

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._is_waiting:  # set before the reader looks at the queue for the last time: no wake-up is lost
            self.waker.wake()

    def take(self) -> list[T]:
        """Everything that is waiting, in order."""
        items = []
        with contextlib.suppress(IndexError):
            while True:
                items.append(self._items.popleft())
        return items

    def arm(self) -> bool:
        """Ask to be woken from now on. True if something is waiting already."""
        self._is_waiting = True
        return bool(self._items)

    def disarm(self) -> None:
        self._is_waiting = False
        self.waker.clear()

    def wait(self, timeout_s: float | None) -> None:
        """Return when something is waiting, or after the timeout (None: never)."""
        if not self.arm():
            self._poller.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000)))
        self.disarm()


# ---------------------------------------------------------------- sockets


def _prepare(socket: zmq.Socket[bytes], limits: LimitsConfig) -> None:
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, limits.max_queued_messages)
    socket.setsockopt(zmq.RCVHWM, limits.max_queued_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.IMMEDIATE, 0)


def endpoint(directory: Path, name: str) -> str:
    path = directory / f"{name}.sock"
    assert len(str(path)) <= MAX_IPC_PATH, f"socket path too long: {path}"
    return f"ipc://{path}"


def _waiting(socket: zmq.Socket[bytes], limit: int) -> Iterator[list[bytes]]:
    """Up to `limit` whole messages that have arrived."""
    for _ in range(limit):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class StageLink(Generic[T]):
    """One end of a PAIR between two stages. Sending never blocks: what does not fit yet waits here, up to a bound."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: Any, limits: LimitsConfig, *, bind: bool
    ) -> None:
        self.inlet: Inlet[T] = Inlet(union, address.rsplit("/", 1)[-1])
        self.socket = context.socket(zmq.PAIR)
        self._limit = limits.max_queued_messages
        self._backlog: deque[bytes] = deque()
        _prepare(self.socket, limits)
        if bind:
            self.socket.bind(address)
        else:
            self.socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        """Raises LinkFull when the peer has not read for too long."""
        self._backlog.append(encode(message))
        self.flush()
        if len(self._backlog) > self._limit:
            raise LinkFull(f"{self.inlet.name}: the peer has left {len(self._backlog)} messages unread")

    def flush(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._backlog:
                self.socket.send(self._backlog[0], zmq.NOBLOCK)
                self._backlog.popleft()

    def receive(self, limit: int = 4096) -> list[T]:
        """Every message that has arrived, in order."""
        messages = (self.inlet.decode(frames) for frames in _waiting(self.socket, limit))
        return [message for message in messages if message is not None]

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def close(self) -> None:
        self.socket.close()


class ClientServer(Generic[T]):
    """The ROUTER that clients talk to. A client is a number minted here, whatever routing id it chose.

    A client must say Hello first; a second Hello under the same routing id is a new client, and the old one is gone. One that
    does not read its results is dropped when they exceed `max_outbox_bytes`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: Any, hello: type, limits: LimitsConfig
    ) -> None:
        self.inlet: Inlet[T] = Inlet(union, address.rsplit("/", 1)[-1])
        self.socket = context.socket(zmq.ROUTER)
        self.gone: list[int] = []  # clients that left since the caller last looked; the caller clears it
        self._hello, self._limits = hello, limits
        self._numbers: dict[bytes, int] = {}
        self._routes: dict[int, bytes] = {}
        self._backlog: dict[int, deque[bytes]] = {}
        self._backlog_bytes: dict[int, int] = {}
        self._next = 1
        _prepare(self.socket, limits)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(address)

    def receive(self, limit: int = 4096) -> list[tuple[int, T]]:
        """(client, message) of everything that has arrived, in order."""
        arrived: list[tuple[int, T]] = []
        for route, *frames in _waiting(self.socket, limit):
            message = self.inlet.decode(frames)
            if message is None:
                continue
            if isinstance(message, self._hello):
                self._admit(route)
            number = self._numbers.get(route)
            if number is None:
                self.inlet.drop("unannounced", "a client must say Hello first")
            else:
                arrived.append((number, message))
        return arrived

    def _admit(self, route: bytes) -> None:
        if route in self._numbers:
            self.drop_client(self._numbers[route])
        if len(self._numbers) >= MAX_CLIENTS:
            return
        self._numbers[route], self._routes[self._next] = self._next, route
        self._backlog[self._next], self._backlog_bytes[self._next] = deque(), 0
        self._next += 1

    def drop_client(self, client: int) -> None:
        route = self._routes.pop(client, None)
        if route is not None:
            del self._numbers[route], self._backlog[client], self._backlog_bytes[client]
            self.gone.append(client)

    def send(self, client: int, message: msgspec.Struct) -> None:
        """Results for clients that are gone are dropped."""
        if client not in self._routes:
            return
        data = encode(message)
        self._backlog[client].append(data)
        self._backlog_bytes[client] += len(data)
        self._flush_client(client)
        if self._backlog_bytes.get(client, 0) > self._limits.max_outbox_bytes:
            log.warning("a client has left %d bytes of results unread; it is dropped", self._backlog_bytes[client])
            self.drop_client(client)

    def flush(self) -> None:
        for client in [c for c, waiting in self._backlog.items() if waiting]:
            self._flush_client(client)

    def ping(self) -> None:
        """Find out who is gone: a route without a peer cannot be sent to."""
        for client, route in list(self._routes.items()):
            self._send_frame(client, route, PING)

    def _flush_client(self, client: int) -> None:
        waiting = self._backlog[client]
        while waiting and self._send_frame(client, self._routes[client], waiting[0]):
            self._backlog_bytes[client] -= len(waiting.popleft())

    def _send_frame(self, client: int, route: bytes, data: bytes) -> bool:
        try:
            self.socket.send_multipart([route, data], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as fault:
            if fault.errno != errno.EHOSTUNREACH:
                raise
            self.drop_client(client)
            return False

    @property
    def num_clients(self) -> int:
        return len(self._routes)

    @property
    def has_backlog(self) -> bool:
        return any(self._backlog.values())

    def close(self) -> None:
        self.socket.close()


class ClientLink(Generic[T]):
    """A client's DEALER. `is_lost` turns True when the server's end is closed: by itself, or by the death of its process."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: Any, limits: LimitsConfig
    ) -> None:
        self.inlet: Inlet[T] = Inlet(union, address.rsplit("/", 1)[-1])
        self.socket = context.socket(zmq.DEALER)
        self.is_lost = False
        self._backlog: deque[bytes] = deque()
        _prepare(self.socket, limits)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self.monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        self._backlog.append(encode(message))
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._backlog:
                self.socket.send(self._backlog[0], zmq.NOBLOCK)
                self._backlog.popleft()

    def receive(self, limit: int = 4096) -> list[T]:
        messages = (self.inlet.decode(frames) for frames in _waiting(self.socket, limit))
        found = [message for message in messages if message is not None]
        for _ in _waiting(self.monitor, limit):
            self.is_lost = True
        return found

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()
