"""A client of an engine: branch handles whose operations are messages, and futures that events complete.

The same code serves the engine in this process and one in another: only what carries the messages differs. It has the shape
that `lang/backend.py` asks for, and imports nothing of it; segments and sampling records are read by their fields.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol

import msgspec

from anabranch.runtime.errors import EngineLost, from_wire
from anabranch.runtime.messages import (
    Append,
    BranchOptions,
    Cancel,
    Close,
    ControlText,
    Delta,
    Done,
    Error,
    Explain,
    Explained,
    Failed,
    FlushCache,
    Fork,
    Generate,
    Generated,
    GenerateParams,
    GetStats,
    GetTokens,
    Grammar,
    Join,
    Lease,
    Mark,
    Message,
    Open,
    Prefill,
    Prefilled,
    RoleBegin,
    RoleEnd,
    Rollback,
    Score,
    Scored,
    Segment,
    StatsAre,
    Text,
    Tokenize,
    TokenLogprobs,
    Tokens,
    TokensAre,
    Welcome,
    as_ints,
)
from anabranch.runtime.messages import EngineLost as EngineLostMessage

Method = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "sum"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation. `usage` has the fields of `messages.Usage`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"]
    matched: str | int | None
    usage: dict[str, Any]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    seed: int


@dataclass(frozen=True, slots=True)
class Scores:
    best: int
    scores: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...]
    usage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    start: int
    stop: int
    origin: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    length: int
    cached_now: int
    spans: tuple[TokenSpan, ...]
    miss: str = ""
    text: str = ""


class Carrier(Protocol):
    """What takes messages to the engine. `send` never blocks and may be called from any thread, `__del__` included."""

    def send(self, message: Message) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Waiting:
    future: "Future[Any]"
    convert: Callable[[Any], Any]
    on_text: Callable[[str], None] | None = None


class Client:
    """One connection. `on_event` is called by the carrier's thread with what the engine says."""

    def __init__(self) -> None:
        self._carrier: Carrier | None = None
        self._lock = threading.Lock()
        self._ops: dict[int, _Waiting] = {}
        self._labels = count(1)
        self._lost: Error | None = None
        self.welcome: Future[Welcome] = Future()

    def connect(self, carrier: Carrier) -> None:
        self._carrier = carrier

    # ------------------------------------------------------------ messages

    def send(self, message: Message) -> None:
        if self._lost is None and self._carrier is not None:
            self._carrier.send(message)

    def next_label(self) -> int:
        return next(self._labels)

    def ask(
        self,
        make: Callable[[int], Message],
        convert: Callable[[Any], Any],
        on_text: Callable[[str], None] | None = None,
    ) -> "Future[Any]":
        """Send `make(op)`; the future gets `convert(answer)`. Cancelling the future cancels the operation."""
        op, future = next(self._labels), Future()  # type: ignore[var-annotated]
        with self._lock:
            lost = self._lost
            if lost is None:
                self._ops[op] = _Waiting(future, convert, on_text)
        if lost is not None:
            future.set_exception(from_wire(lost))
            return future
        future.add_done_callback(lambda done: self._on_done(op, done))
        self.send(make(op))
        return future

    def _on_done(self, op: int, future: "Future[Any]") -> None:
        if future.cancelled():
            with self._lock:
                self._ops.pop(op, None)
            self.send(Cancel(ops=(op,)))

    def on_event(self, message: Message) -> None:
        """Take one event of the engine. Events for operations that nobody waits for any more are dropped."""
        match message:
            case Delta():
                waiting = self._ops.get(message.op)
                if waiting is not None and waiting.on_text is not None and message.text:
                    waiting.on_text(message.text)
            case Failed(op=None) | Done(op=0):
                pass  # a branch failed: its operations are told one by one
            case Failed():
                self._complete(message.op or 0, error=message.error)
            case Welcome():
                if not self.welcome.done():
                    self.welcome.set_result(message)
            case EngineLostMessage():
                self.lose(message.error)
            case Generated() | Prefilled() | Scored() | Explained() | TokensAre() | StatsAre() | Done():
                self._complete(message.op, message)
            case _:
                raise AssertionError(f"{type(message).__name__} is not an engine's event")

    def _complete(self, op: int, answer: Any = None, error: Error | None = None) -> None:
        with self._lock:
            waiting = self._ops.pop(op, None)
        if waiting is None or not waiting.future.set_running_or_notify_cancel():
            return
        if error is not None:
            waiting.future.set_exception(from_wire(error))
            return
        try:
            waiting.future.set_result(waiting.convert(answer))
        except Exception as fault:
            waiting.future.set_exception(fault)

    def lose(self, error: Error) -> None:
        """The engine is gone: every open operation fails now, every later one at once."""
        with self._lock:
            self._lost = self._lost or error
            ops = list(self._ops)
        for op in ops:
            self._complete(op, error=error)
        if not self.welcome.done():
            self.welcome.set_exception(from_wire(error))

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def close(self) -> None:
        """End the connection; idempotent. Open operations fail."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()
        self.lose(Error(type="cancelled", message="the engine was closed", code="engine_closed"))

    # ------------------------------------------------------------ the Backend protocol

    def open(self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0) -> "BranchHandle":
        if self._lost is not None:
            raise from_wire(self._lost)
        label = next(self._labels)
        self.send(Open(label, BranchOptions(salt, seed, priority, program)))
        return BranchHandle(self, label)

    def new_program(self) -> int:
        return next(self._labels)

    def cancel_program(self, program: int) -> None:
        self.send(Cancel(programs=(program,)))

    def stats(self, *, check: bool = False) -> "Future[dict[str, Any]]":
        return self.ask(lambda op: GetStats(op, check), lambda reply: reply.stats)

    def flush_cache(self) -> "Future[None]":
        return self.ask(FlushCache, lambda _: None)

    def tokenize(self, segments: Sequence[Any]) -> "Future[list[int]]":
        wire = to_segments(segments)
        return self.ask(lambda op: Tokenize(op, wire), lambda reply: as_ints(reply.token_ids).tolist())

    def info(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.welcome.result(600))


class BranchHandle:
    """A branch of the engine. Dropping the last reference releases it there."""

    def __init__(self, client: Client, label: int) -> None:
        self.label = label
        self._client = client
        self._release = weakref.finalize(self, _close, client, label)
        self._release.atexit = False  # the engine is closed as a whole then

    def append(self, segments: Sequence[Any]) -> None:
        self._client.send(Append(self.label, to_segments(segments)))

    def generate(self, sampling: Any = None, on_text: Callable[[str], None] | None = None) -> "Future[Generation]":
        params = to_params(sampling, stream=on_text is not None)
        return self._client.ask(lambda op: Generate(op, self.label, params), to_generation, on_text)

    def prefill(self) -> "Future[dict[str, Any]]":
        return self._client.ask(lambda op: Prefill(op, self.label), lambda reply: msgspec.structs.asdict(reply.usage))

    def score(
        self,
        choices: Sequence[str],
        method: Method = "token_length_normalized",
        *,
        append: bool = True,
        timeout: float | None = None,
    ) -> "Future[Scores]":
        wire = tuple(c if isinstance(c, str) else tuple(c) for c in choices)
        timeout_ms = None if timeout is None else 1000 * timeout
        return self._client.ask(lambda op: Score(op, self.label, wire, method, append, timeout_ms), to_scores)

    def fork(self, n: int) -> "list[BranchHandle]":
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        labels = tuple(self._client.next_label() for _ in range(n))
        self._client.send(Fork(self.label, labels))
        return [BranchHandle(self._client, label) for label in labels]

    def mark(self) -> int:
        mark = self._client.next_label()
        self._client.send(Mark(self.label, mark))
        return mark

    def rollback(self, mark: int) -> None:
        self._client.send(Rollback(self.label, mark))

    def join(self, winner: "BranchHandle | None", drop: Sequence["BranchHandle"] = ()) -> None:
        dropped = tuple(b.label for b in drop if b is not winner)
        self._client.send(Join(self.label, winner.label if winner is not None else None, drop=dropped))

    def append_spans(self, spans: Sequence[tuple["BranchHandle", int]]) -> None:
        self._client.send(Join(self.label, spans=tuple((branch.label, mark) for branch, mark in spans)))

    def lease(self, seconds: float) -> None:
        self._client.send(Lease(self.label, float(seconds)))

    def token_ids(self) -> "Future[list[int]]":
        return self._client.ask(lambda op: GetTokens(op, self.label), lambda reply: as_ints(reply.token_ids).tolist())

    def explain(self) -> "Future[Explanation]":
        return self._client.ask(lambda op: Explain(op, self.label), to_explanation)

    def cancel(self) -> None:
        self._client.send(Cancel(branches=(self.label,)))

    def close(self, *, superseded: bool = False) -> None:
        """Idempotent. What runs on the branch is cancelled, unless a fork or join that is under way needs it.

        superseded   nobody is expected to come back to what it computed: evicted first
        """
        if superseded and self._release.detach() is not None:
            self._client.send(Close((self.label,), True))
        self._release()


def _close(client: Client, label: int) -> None:
    client.send(Close((label,)))


# ---------------------------------------------------------------- conversions


def to_segments(segments: Sequence[Any]) -> tuple[Segment, ...]:
    """Wire segments from records of the same names and fields, whoever defined them."""
    return tuple(_segment(s) for s in segments)


def _segment(segment: Any) -> Segment:
    if isinstance(segment, Text | Tokens | RoleBegin | RoleEnd | ControlText):
        return segment
    match type(segment).__name__:
        case "Text":
            return Text(segment.text)
        case "Tokens":
            return Tokens(tuple(segment.token_ids))
        case "RoleBegin":
            return RoleBegin(segment.role)
        case "RoleEnd":
            return RoleEnd()
        case "str":
            return Text(segment)
        case name:
            raise TypeError(f"a segment must be Text, Tokens, RoleBegin or RoleEnd, got {name}")


def to_params(sampling: Any, *, stream: bool) -> GenerateParams:
    """GenerateParams from a record whose None fields mean "default"."""
    if sampling is None:
        return GenerateParams(stream=stream)
    if isinstance(sampling, GenerateParams):
        return msgspec.structs.replace(sampling, stream=stream)
    said: dict[str, Any] = {}
    for name in GenerateParams.__struct_fields__:
        value = getattr(sampling, name, None)
        if value is not None and name not in ("grammar", "stream", "timeout_ms"):
            said[name] = tuple(value) if isinstance(value, list) else value
    if (constraint := getattr(sampling, "constraint", None)) is not None:
        said["grammar"] = Grammar(constraint.kind, constraint.source)
    if (timeout := getattr(sampling, "timeout", None)) is not None:
        said["timeout_ms"] = 1000.0 * timeout
    return GenerateParams(**said, stream=stream)


def to_generation(reply: Generated) -> Generation:
    return Generation(
        reply.text, reply.token_ids, reply.finish_reason, reply.matched, msgspec.structs.asdict(reply.usage), reply.logprobs,
        reply.prompt_logprobs, reply.seed,
    )  # fmt: skip


def to_scores(reply: Scored) -> Scores:
    return Scores(reply.best, reply.scores, reply.logprobs, msgspec.structs.asdict(reply.usage))


def to_explanation(reply: Explained) -> Explanation:
    spans = tuple(TokenSpan(s.start, s.stop, s.origin) for s in reply.spans)
    return Explanation(reply.length, reply.cached_now, spans, reply.miss, reply.text)


__all__ = ["BranchHandle", "Carrier", "Client", "EngineLost", "Explanation", "Generation", "Scores", "TokenSpan"]
