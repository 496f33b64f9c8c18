"""HTTP calls with the standard library: a bounded number of daemon threads, each call with an end and a way to
cancel it.
"""

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from anabranch.lang.errors import Cancelled, ProgramError
from anabranch.lang.workers import Workers

CALL_LIMIT_S = 600.0  # no call waits longer for its next bytes, whatever the program says
MAX_BODY = 64 << 20  # bytes of one answer
MAX_LINE = 8 << 20  # bytes of one event


class EndpointError(ProgramError):
    """A server elsewhere refused, or answered what is no answer. `status` is the HTTP status, 0 where there was
    none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class Caller:
    """Makes calls to one server, at most `max_connections` at once."""

    def __init__(self, base_url: str, api_key: str | None, max_connections: int) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server's address must be an http or https URL, got {base_url!r}")
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path.rstrip("/")
        self.is_tls = parts.scheme == "https"
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._workers = Workers(max_connections, "anabranch-http")

    def start(self, work: "Callable[[Call], Any]", when_done: Callable[[], None], deadline: float | None) -> "Call":
        call = Call(self, deadline)
        self._workers.submit(_run_call, call, work, when_done)
        return call

    def now(self, verb: str, path: str) -> Any:
        """A call made here and now."""
        return Call(self, None).request(verb, path)

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)


class Call:
    """One piece of work in a thread: one request or several. `cancel` breaks its connection."""

    def __init__(self, caller: Caller, deadline: float | None) -> None:
        self.caller, self.deadline = caller, deadline
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        self.cancelled = False
        self._connection: http.client.HTTPConnection | None = None

    def cancel(self) -> None:
        self.cancelled = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def run(self, work: "Callable[[Call], Any]") -> None:
        try:
            self.result = work(self)
        except Exception as error:
            self.error = Cancelled("the call was cancelled") if self.cancelled else error
        self.done = True

    def request(self, verb: str, path: str, body: Any = None) -> Any:
        """The JSON answer. Raises EndpointError for anything else, ConnectionError, TimeoutError."""
        with self._sent(verb, path, body) as response:
            data = response.read(MAX_BODY + 1)
            if len(data) > MAX_BODY:
                raise EndpointError(f"{path} answered more than {MAX_BODY} bytes", response.status)
            return _parse(data, path) if data.strip() else None

    def events(self, verb: str, path: str, body: Any) -> Iterator[Any]:
        """The JSON of each server-sent event, until [DONE]."""
        with self._sent(verb, path, body) as response:
            while line := response.readline(MAX_LINE):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _parse(data, path)
                if isinstance(event, dict) and event.get("error"):
                    raise EndpointError(f"{path} failed: {_message(event)}", response.status)
                yield event
            raise EndpointError(f"{path} ended its stream before it was complete", response.status)

    @contextlib.contextmanager
    def _sent(self, verb: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        if self.cancelled:
            raise Cancelled("the call was cancelled")
        left = (
            CALL_LIMIT_S if self.deadline is None else max(0.001, min(CALL_LIMIT_S, self.deadline - time.monotonic()))
        )
        connection = self._connection = self.caller.connect(left)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(verb, self.caller.path + path, data, self.caller.headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _refusal(path, response)
            yield response
        except (ConnectionError, socket.gaierror) as error:
            where = f"{self.caller.host}:{self.caller.port or ''}"
            raise ConnectionError(f"no answer from {where.rstrip(':')}: {error}") from error
        finally:
            self._connection = None
            connection.close()


def _refusal(path: str, response: http.client.HTTPResponse) -> EndpointError:
    data = response.read(64 << 10)
    try:
        message = _message(json.loads(data))
    except ValueError:
        message = data.decode(errors="replace")[:500]
    return EndpointError(f"{path} answered {response.status}: {message or response.reason}", response.status)


def _message(answer: Any) -> str:
    """The words in an error object of either API."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _parse(data: bytes, path: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        text = data.decode(errors="replace").strip()
        if len(text) < 200 and "\n" not in text:
            return text  # some servers answer simple calls with a line of text
        raise EndpointError(f"{path} answered no JSON: {text[:200]!r}") from None


def _run_call(call: Call, work: Callable[[Call], Any], when_done: Callable[[], None]) -> None:
    call.run(work)
    when_done()
