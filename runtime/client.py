"""A client of an engine: branch handles whose operations are messages, and futures that events complete.

The same code serves the engine in this process and one in another: only what carries the messages differs. It has the shape
that `lang/backend.py` asks for, and imports nothing of it; segments and sampling records are read by their fields.

Garbage collection may close a branch or cancel a future at any moment, in any thread, in the middle of any line here. So
nothing takes a lock: the tables are changed by single operations of dicts, which Python makes whole.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol, get_args

import msgspec

from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.errors import EngineLost, InvalidRequest, from_wire
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
    ToClient,
    Tokenize,
    TokenLogprobs,
    Tokens,
    TokensAre,
    ToTokenizer,
    Welcome,
    as_ints,
)
from anabranch.runtime.messages import EngineLost as EngineLostMessage
from anabranch.runtime.tokenizer.validation import (
    MAX_CHILDREN,
    MAX_LEASE_S,
    check_ids,
    check_label,
    check_options,
    check_seconds,
    check_text,
    check_types,
    milliseconds,
    refuse,
)

log = logging.getLogger("anabranch.client")
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

    def send(self, message: ToTokenizer) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Waiting:
    future: "Future[Any]"
    convert: Callable[[Any], Any]
    on_text: Callable[[str], None] | None = None


class Client:
    """One connection. `on_event` is called with what the engine says, by a thread of the carrier that may wait for users' code.

    What can be seen to be wrong without the model (types, ranges) is raised where it was written, before anything is sent.
    """

    def __init__(self, limits: LimitsConfig | None = None) -> None:
        self.limits = limits or LimitsConfig()
        self._carrier: Carrier | None = None
        self._ops: dict[int, _Waiting] = {}
        self._labels = count(1)
        self._lost: Error | None = None
        self._pid = os.getpid()
        self.welcome: Future[Welcome] = Future()

    def connect(self, carrier: Carrier) -> None:
        self._carrier = carrier

    # ------------------------------------------------------------ messages

    def send(self, message: ToTokenizer) -> None:
        carrier = self._carrier
        if self._lost is None and carrier is not None and self._pid == os.getpid():
            carrier.send(message)

    def next_label(self) -> int:
        return next(self._labels)

    def ask(
        self,
        make: Callable[[int], ToTokenizer],
        convert: Callable[[Any], Any],
        on_text: Callable[[str], None] | None = None,
    ) -> "Future[Any]":
        """Send `make(op)`; the future gets `convert(answer)`. Cancelling the future cancels the operation."""
        self.check_usable()
        op, future = next(self._labels), Future()  # type: ignore[var-annotated]
        self._ops[op] = _Waiting(future, convert, on_text)
        future.add_done_callback(lambda done: self._on_done(op, done))
        self.send(make(op))
        if self._lost is not None:  # perhaps it was lost before it could see this operation in the table
            self._complete(op, error=self._lost)
        return future

    def check_usable(self) -> None:
        """Raises EngineLost in a process forked from the one that made the engine: threads and sockets do not come along."""
        if self._pid != os.getpid():
            raise EngineLost("this engine belongs to the process that made it: make one in this process, or use Engine.connect")

    def _on_done(self, op: int, future: "Future[Any]") -> None:
        if future.cancelled() and self._ops.pop(op, None) is not None:
            self.send(Cancel(ops=(op,)))
            future.set_running_or_notify_cancel()

    def on_event(self, message: ToClient) -> None:
        """Take one event of the engine. Events for operations that nobody waits for any more are dropped."""
        match message:
            case Delta():
                self._pass_on(message)
            case Failed(op=None) | Done(op=0):
                pass  # a branch failed: its operations are told one by one
            case Failed():
                self._complete(message.op or 0, error=message.error)
            case Welcome():
                with suppress(InvalidStateError):
                    self.welcome.set_result(message)
            case EngineLostMessage():
                self.lose(message.error)
            case Generated() | Prefilled() | Scored() | Explained() | TokensAre() | StatsAre() | Done():
                self._complete(message.op, message)
            case _:
                raise AssertionError(f"{type(message).__name__} is not an engine's event")

    def _pass_on(self, delta: Delta) -> None:
        """Give text to the user's function. What it raises fails the operation, and nothing else."""
        waiting = self._ops.get(delta.op)
        if waiting is None or waiting.on_text is None or not delta.text or waiting.future.cancelled():
            return
        try:
            waiting.on_text(delta.text)
        except Exception as fault:
            if self._ops.pop(delta.op, None) is not None and waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(fault)
            self.send(Cancel(ops=(delta.op,)))

    def _complete(self, op: int, answer: Any = None, error: Error | None = None) -> None:
        waiting = self._ops.pop(op, None)
        if waiting is None or not waiting.future.set_running_or_notify_cancel():
            return
        if error is not None:
            waiting.future.set_exception(from_wire(error))
            return
        try:
            result = waiting.convert(answer)
        except Exception as fault:
            waiting.future.set_exception(fault)
        else:
            waiting.future.set_result(result)

    def lose(self, error: Error) -> None:
        """The engine is gone: every open operation fails now, every later one at once. The first cause stays."""
        self._lost = self._lost or error
        for op in list(self._ops):
            self._complete(op, error=self._lost)
        with suppress(InvalidStateError):
            self.welcome.set_exception(from_wire(self._lost))

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def close(self) -> None:
        """End the connection; idempotent. Open operations fail."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None and self._pid == os.getpid():
            carrier.close()
        self.lose(Error(type="cancelled", message="the engine was closed", code="engine_closed"))

    # ------------------------------------------------------------ the Backend protocol

    def open(
        self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0, owner: object = None
    ) -> "BranchHandle":
        """`owner` lives as long as the branch or a descendant does."""
        self.check_usable()
        if self._lost is not None:
            raise from_wire(self._lost)
        options = check_options(BranchOptions(salt, seed, priority, program))
        label = next(self._labels)
        self.send(Open(label, options))
        return BranchHandle(self, label, owner)

    def new_program(self) -> int:
        return next(self._labels)

    def cancel_program(self, program: int) -> None:
        self.send(Cancel(programs=(check_label(program, "program"),)))

    def stats(self, *, check: bool = False) -> "Future[dict[str, Any]]":
        return self.ask(lambda op: GetStats(op, check), lambda reply: reply.stats)

    def flush_cache(self) -> "Future[None]":
        return self.ask(FlushCache, lambda _: None)

    def tokenize(self, segments: Sequence[Any]) -> "Future[list[int]]":
        wire = to_segments(segments, self.limits)
        return self.ask(lambda op: Tokenize(op, wire), lambda reply: as_ints(reply.token_ids).tolist())

    def info(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.welcome.result(600))


class BranchHandle:
    """A branch of the engine. Dropping the last reference releases it there."""

    __slots__ = ("__weakref__", "_client", "_owner", "_release", "label")

    def __init__(self, client: Client, label: int, owner: object = None) -> None:
        self.label = label
        self._client, self._owner = client, owner
        self._release = weakref.finalize(self, _close, client, label)
        self._release.atexit = False  # the engine is closed as a whole then

    def append(self, segments: Sequence[Any]) -> None:
        self._client.send(Append(self.label, to_segments(segments, self._client.limits)))

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
        if isinstance(choices, str | bytes) or not isinstance(choices, Iterable):
            raise refuse("choices", choices, "a list of texts")
        if method not in get_args(Method):
            raise refuse("method", method, f"one of {', '.join(get_args(Method))}")
        if not isinstance(append, bool):
            raise refuse("append", append, "true or false")
        wire = tuple(check_text(c, "choices") if isinstance(c, str) else check_ids(c, "choices") for c in choices)
        timeout_ms = milliseconds(timeout)
        return self._client.ask(lambda op: Score(op, self.label, wire, method, append, timeout_ms), to_scores)

    def fork(self, n: int) -> "list[BranchHandle]":
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHILDREN:
            raise refuse("n", n, f"an integer in 1..{MAX_CHILDREN}")
        labels = tuple(self._client.next_label() for _ in range(n))
        self._client.send(Fork(self.label, labels))
        return [BranchHandle(self._client, label, self._owner) for label in labels]

    def mark(self) -> int:
        mark = self._client.next_label()
        self._client.send(Mark(self.label, mark))
        return mark

    def rollback(self, mark: int) -> None:
        self._client.send(Rollback(self.label, check_label(mark, "mark")))

    def join(self, winner: "BranchHandle | None", drop: Sequence["BranchHandle"] = ()) -> None:
        won = self._label_of(winner, "winner") if winner is not None else None
        dropped = tuple(self._label_of(b, "drop") for b in drop if b is not winner)
        self._client.send(Join(self.label, won, drop=dropped))

    def append_spans(self, spans: Sequence[tuple["BranchHandle", int]]) -> None:
        wire = tuple((self._label_of(branch, "spans"), check_label(mark, "mark")) for branch, mark in spans)
        self._client.send(Join(self.label, spans=wire))

    def _label_of(self, branch: "BranchHandle", param: str) -> int:
        """Another branch of this engine. The same label means another branch to another engine: never take one for the other."""
        if not isinstance(branch, BranchHandle) or branch._client is not self._client:
            raise refuse(param, branch, "a branch of the same engine (and of the same connection to it)")
        return branch.label

    def lease(self, seconds: float) -> None:
        self._client.send(Lease(self.label, check_seconds("seconds", seconds, MAX_LEASE_S)))

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


def to_segments(segments: Sequence[Any], limits: LimitsConfig) -> tuple[Segment, ...]:
    """Wire segments from records of the same names and fields, whoever defined them. Raises InvalidRequest."""
    if isinstance(segments, str | bytes) or not isinstance(segments, Iterable):
        raise refuse("segments", segments, "a list of segments")
    wire = tuple(_segment(s) for s in segments)
    num_chars = sum(len(s.text) for s in wire if isinstance(s, Text | ControlText))
    num_ids = sum(len(s.token_ids) for s in wire if isinstance(s, Tokens))
    if num_chars + num_ids > limits.max_text_bytes:
        raise InvalidRequest(
            f"{num_chars} characters and {num_ids} ids are too much for one branch; the limit is {limits.max_text_bytes} bytes",
            param="segments", code="context_length_exceeded",
        )  # fmt: skip
    return wire


def _segment(segment: Any) -> Segment:
    match type(segment).__name__:
        case "Text":
            return Text(check_text(segment.text, "text"))
        case "ControlText":
            return ControlText(check_text(segment.text, "text"), bool(segment.add_bos))
        case "Tokens":
            return Tokens(check_ids(segment.token_ids, "token_ids"))
        case "RoleBegin":
            return RoleBegin(check_text(segment.role, "role"))
        case "RoleEnd":
            return RoleEnd()
        case "str":
            return Text(check_text(segment, "text"))
        case name:
            raise InvalidRequest(f"a segment must be Text, Tokens, RoleBegin or RoleEnd, got {name}", param="segments")


def to_params(sampling: Any, *, stream: bool) -> GenerateParams:
    """GenerateParams from a record whose None fields mean "default"."""
    if sampling is None:
        return GenerateParams(stream=stream)
    if isinstance(sampling, GenerateParams):
        params = msgspec.structs.replace(sampling, stream=stream)
    else:
        params = GenerateParams(**_fields(sampling), stream=stream)
    return check_types(params)


def _fields(sampling: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name in GenerateParams.__struct_fields__:
        value = getattr(sampling, name, None)
        if value is not None and name not in ("grammar", "stream", "timeout_ms"):
            said[name] = tuple(value) if isinstance(value, list) else value
    if (constraint := getattr(sampling, "constraint", None)) is not None:
        said["grammar"] = Grammar(constraint.kind, constraint.source)
    if (timeout := getattr(sampling, "timeout", None)) is not None:
        said["timeout_ms"] = milliseconds(timeout)
    return said


def to_generation(reply: Generated) -> Generation:
    return Generation(
        reply.text, reply.token_ids, reply.finish_reason, reply.matched, msgspec.structs.asdict(reply.usage), reply.logprobs,
        reply.prompt_logprobs, reply.seed,
    )  # fmt: skip


def to_scores(reply: Scored) -> Scores:
    return Scores(reply.best, reply.scores, reply.logprobs, msgspec.structs.asdict(reply.usage))


def to_explanation(reply: Explained) -> Explanation:
    spans = tuple(TokenSpan(s.start, s.stop, s.origin, s.text) for s in reply.spans)
    return Explanation(reply.length, reply.cached_now, spans, reply.miss, reply.text)


__all__ = ["BranchHandle", "Carrier", "Client", "EngineLost", "Explanation", "Generation", "Scores", "TokenSpan"]
