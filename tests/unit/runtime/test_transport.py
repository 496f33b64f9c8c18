"""Links between stages: what is no message is dropped and counted, and disturbs nobody; nothing is lost, nothing blocks."""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from anabranch.runtime import transport
from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.messages import Delta, GetTokens, Hello, Open, Shutdown, ToClient, ToScheduler, ToTokenizer
from anabranch.runtime.transport import (
    ClientLink,
    ClientServer,
    LinkFull,
    Mailbox,
    StageLink,
    Waker,
    clear_stale_directories,
    encode,
    endpoint,
    private_directory,
    remove_directory,
)

LIMITS = LimitsConfig(max_message_bytes=1 << 20)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory()
    yield path
    remove_directory(path)


@pytest.fixture
def context() -> Iterator[Any]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def until(condition: Callable[[], Any]) -> Any:
    """The first true value; the test's own time limit ends it otherwise."""
    while not (value := condition()):
        time.sleep(0.005)
    return value


@pytest.fixture
def server(context: Any, directory: Path) -> Iterator[ClientServer[Any]]:
    server: ClientServer[Any] = ClientServer(context, endpoint(directory, "clients"), ToTokenizer, Hello, LIMITS)
    yield server
    server.close()


@pytest.fixture
def link(context: Any, directory: Path, server: ClientServer[Any]) -> Iterator[ClientLink[Any]]:
    link: ClientLink[Any] = ClientLink(context, endpoint(directory, "clients"), ToClient, LIMITS)
    yield link
    link.close()


def raw(context: Any, directory: Path, kind: int = zmq.DEALER, identity: bytes | None = None) -> Any:
    other = context.socket(kind)
    other.setsockopt(zmq.LINGER, 0)
    if identity is not None:
        other.setsockopt(zmq.IDENTITY, identity)
    other.connect(endpoint(directory, "clients"))
    return other


# ---------------------------------------------------------------- directories


def test_sockets_live_where_only_their_owner_may_enter(directory: Path, server: ClientServer[Any]) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (directory / "clients.sock").is_socket()


def test_what_a_killed_engine_left_is_cleared_and_what_lives_is_kept(directory: Path) -> None:
    base = directory / "base"
    base.mkdir(0o700)
    living, dead = private_directory(base), private_directory(base)
    os.close(transport._locks.pop(dead))  # its process is gone: the system has dropped the lock
    foreign = base / "anabranch-without-lock"
    foreign.mkdir()
    for path in (living, dead, foreign):
        os.utime(path, (1, 1))
    clear_stale_directories(base)
    assert living.exists() and not dead.exists() and foreign.exists()
    remove_directory(living)
    remove_directory(living)
    assert not living.exists()


def test_a_base_with_a_long_path_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    path = private_directory(deep)
    assert deep not in path.parents
    remove_directory(path)


# ---------------------------------------------------------------- hostile bytes


class Canary:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pickled(self) -> bytes:
        return b"cos\nsystem\n(S'touch " + str(self.path).encode() + b"'\ntR."


def hostile(tmp_path: Path) -> list[list[bytes]]:
    deep = b"\x91" * 100_000
    return [
        [Canary(tmp_path / "canary").pickled()], [os.urandom(64)], [b"\xc1"], [b"\x00"], [deep], [b"a", b"b"], [b"", b"x"], [b"x", b""],
        [encode(Open(1)), encode(Open(2))], [encode(Shutdown())], [msgspec.msgpack.encode(["Open", "one"])],
        [msgspec.msgpack.encode(["Nobody", 1])], [msgspec.msgpack.encode({"message_type": "Open", "branch": 1})],
        [msgspec.json.encode(Open(1))], [msgspec.msgpack.encode(["Append", 1, [["Text", "\x00", 5, 6, 7]], 1, 2])],
        [msgspec.msgpack.encode(["GetTokens", True, 1])], [encode(GetTokens(1, 1))[:-1]],
    ]  # fmt: skip


def test_hostile_bytes_are_dropped_and_counted_and_a_client_beside_them_is_served(
    context: Any, directory: Path, server: ClientServer[Any], link: ClientLink[Any], tmp_path: Path
) -> None:
    link.send(Hello())
    ((client, hello),) = until(server.receive)
    assert isinstance(hello, Hello)
    evil = raw(context, directory)
    evil.send(encode(Hello()))
    ((evil_number, _),) = until(server.receive)
    for frames in hostile(tmp_path):
        evil.send_multipart(frames)
    # A well-formed message behind all that shows that everything before it has been looked at.
    evil.send(encode(Open(77)))
    arrived: list[Any] = []
    until(lambda: arrived.extend(server.receive()) or any(m == (evil_number, Open(77)) for m in arrived))
    assert server.inlet.dropped.total() >= len(hostile(tmp_path)) - 2  # one is valid (extra fields are), one may be a sign of life
    assert all(isinstance(message, Open | Hello | object) for _, message in arrived)
    link.send(Open(5))
    assert until(server.receive) == [(client, Open(5))]
    assert not (tmp_path / "canary").exists()
    evil.close()


def test_a_message_over_the_limit_ends_its_sender_and_nobody_else(
    context: Any, directory: Path, server: ClientServer[Any], link: ClientLink[Any]
) -> None:
    link.send(Hello())
    ((client, _),) = until(server.receive)
    evil = raw(context, directory)
    evil.send(encode(Hello()))
    ((evil_number, _),) = until(server.receive)
    evil.send(b"x" * (4 << 20))

    def evil_is_gone() -> bool:
        assert server.receive() == []
        server.ping()
        return evil_number in server.gone

    until(evil_is_gone)
    link.send(Open(5))
    assert until(server.receive) == [(client, Open(5))]
    evil.close()


def test_garbage_instead_of_a_handshake_disturbs_nobody(
    directory: Path, server: ClientServer[Any], link: ClientLink[Any]
) -> None:
    strangers = []
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + b"\x00" * 8 + b"\x7f", b"\xff" * 70_000):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(directory / "clients.sock"))
        stranger.setblocking(False)
        with suppress(BlockingIOError, BrokenPipeError):
            stranger.send(greeting)
        strangers.append(stranger)
    link.send(Hello())
    ((_, hello),) = until(server.receive)
    assert isinstance(hello, Hello)
    for stranger in strangers:
        stranger.close()


def test_a_second_peer_of_a_stage_is_not_let_in(context: Any, directory: Path) -> None:
    below: StageLink[Any] = StageLink(context, endpoint(directory, "clients"), ToScheduler, LIMITS, bind=True)
    above: StageLink[Any] = StageLink(context, endpoint(directory, "clients"), ToScheduler, LIMITS, bind=False)
    above.send(Shutdown())
    assert until(below.receive) == [Shutdown()]
    evil = raw(context, directory, zmq.PAIR)
    with pytest.raises(zmq.Again):
        for _ in range(100):
            evil.send(b"evil", zmq.NOBLOCK)
            time.sleep(0.001)
        raise zmq.Again  # accepted into its own queue, and read by nobody
    above.send(Shutdown())
    assert until(below.receive) == [Shutdown()]
    assert below.inlet.dropped.total() == 0
    for closing in (below, above, evil):
        closing.close()


# ---------------------------------------------------------------- who is who


def test_a_client_must_say_hello_first(server: ClientServer[Any], link: ClientLink[Any]) -> None:
    link.send(Open(1))
    link.send(Hello())
    ((_, message),) = until(server.receive)
    assert isinstance(message, Hello) and server.inlet.dropped["unannounced"] == 1


def test_who_takes_the_name_of_another_gets_nothing_of_it(
    context: Any, directory: Path, server: ClientServer[Any]
) -> None:
    first = raw(context, directory, identity=b"me")
    first.send(encode(Hello()))
    ((one, _),) = until(server.receive)
    meanwhile = raw(context, directory, identity=b"me")
    meanwhile.send(encode(Open(5)))
    first.send(encode(Open(6)))
    assert until(server.receive) == [(one, Open(6))], "while the first is there, the second is not let in"
    meanwhile.close()
    first.close()
    until(lambda: server.ping() or server.gone)
    while True:  # the old connection is being taken down: the name is free a moment later
        second = raw(context, directory, identity=b"me")
        second.send(encode(Hello()))
        if server.socket.poll(200) and (arrived := server.receive()):
            break
        second.close()
    ((two, _),) = arrived
    assert one != two and server.gone == [one]
    server.send(one, Delta(1, "for the first"))  # late: dropped
    server.send(two, Delta(1, "for the second"))
    assert until(lambda: second.poll(10)) and second.recv() == encode(Delta(1, "for the second"))
    second.close()


def test_a_client_that_is_gone_is_noticed(context: Any, directory: Path, server: ClientServer[Any]) -> None:
    client = raw(context, directory)
    client.send(encode(Hello()))
    ((number, _),) = until(server.receive)
    server.ping()
    assert server.gone == []
    client.close()
    until(lambda: server.ping() or server.gone)
    assert server.gone == [number] and server.num_clients == 0
    server.send(number, Delta(1, "nobody"))


def test_a_client_that_reads_nothing_is_dropped_at_the_bound(context: Any, directory: Path) -> None:
    limits = LimitsConfig(max_queued_messages=4, max_outbox_bytes=100_000)
    server: ClientServer[Any] = ClientServer(context, endpoint(directory, "clients"), ToTokenizer, Hello, limits)
    lazy = context.socket(zmq.DEALER)
    lazy.setsockopt(zmq.RCVHWM, 1)
    lazy.connect(endpoint(directory, "clients"))
    lazy.send(encode(Hello()))
    ((number, _),) = until(server.receive)
    for _ in range(100_000):
        server.send(number, Delta(1, "x" * 1000))
        if server.gone:
            break
    assert server.gone == [number] and not server.has_backlog
    lazy.close(0)
    server.close()


def test_a_client_sees_that_the_server_is_gone(server: ClientServer[Any], link: ClientLink[Any]) -> None:
    link.send(Hello())
    until(server.receive)
    assert link.receive() == [] and not link.is_lost
    server.close()
    until(lambda: link.receive() or link.is_lost)


def test_signs_of_life_are_no_messages(server: ClientServer[Any], link: ClientLink[Any]) -> None:
    link.send(Hello())
    ((number, _),) = until(server.receive)
    server.ping()
    server.send(number, Delta(1, "x"))
    assert until(link.receive) == [Delta(1, "x")] and link.inlet.dropped.total() == 0


# ---------------------------------------------------------------- bounds, order, waking


def test_a_stage_keeps_order_beyond_what_the_socket_holds_and_says_when_it_is_too_much(
    context: Any, directory: Path
) -> None:
    limits = LimitsConfig(max_queued_messages=50)
    sender: StageLink[Any] = StageLink(context, endpoint(directory, "s"), ToTokenizer, limits, bind=True)
    receiver: StageLink[Any] = StageLink(context, endpoint(directory, "s"), ToTokenizer, limits, bind=False)
    sender.send(Open(0))
    got = until(lambda: sender.flush() or receiver.receive())
    for i in range(1, 140):
        sender.send(Open(i))
        if sender.has_backlog and i > 90:
            break
    sent = i
    while len(got) < sent + 1:
        sender.flush()
        got += receiver.receive(8)
    assert [m.branch for m in got] == list(range(sent + 1))
    with pytest.raises(LinkFull, match="unread"):
        for i in range(10_000):
            sender.send(Open(i))
    sender.close()
    receiver.close()


def test_no_wake_up_is_lost_between_threads() -> None:
    mailbox: Mailbox[int] = Mailbox()
    total, threads = 4000, 4

    def fill(first: int) -> None:
        for i in range(first, total, threads):
            mailbox.put(i)
            if i % 97 == 0:
                time.sleep(0)

    for first in range(threads):
        threading.Thread(target=fill, args=(first,)).start()
    got: list[int] = []
    while len(got) < total:
        mailbox.wait(None)  # hangs, and the time limit of the test ends it, if a wake-up is lost
        got += mailbox.take()
    assert sorted(got) == list(range(total))
    for first in range(threads):
        own = [i for i in got if i % threads == first]
        assert own == sorted(own), "what one thread put stays in order"


def test_a_mailbox_may_be_filled_while_its_reader_is_filling_it() -> None:
    """As `__del__` does, in the middle of any line."""
    mailbox: Mailbox[int] = Mailbox()

    class Closes:
        def __del__(self) -> None:
            mailbox.put(1)

    def reader() -> None:
        thing = Closes()
        mailbox.put(0)
        del thing
        mailbox.wait(None)

    reader()
    assert mailbox.take() == [0, 1]


def test_waiting_ends_at_the_timeout_and_for_what_is_there_already() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.wait(0.001)
    mailbox.put(1)
    mailbox.wait(None)
    assert mailbox.take() == [1] and mailbox.take() == []


def test_a_closed_waker_may_be_woken() -> None:
    waker = Waker()
    for _ in range(100_000):
        waker.wake()  # its pipe is full long before; nobody blocks
    waker.clear()
    waker.close()
    waker.wake()
