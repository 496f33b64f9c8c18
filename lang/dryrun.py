"""A program run without a model: which operations it does, and which prefix every run of it shares.

The function is called with placeholders for the arguments that are not given. A placeholder is a string whose text
carries private-use characters, so it can be formatted, concatenated and passed on like any other; whatever contains
one is not constant. Where the function needs a real value (`int(s["x"])`), the dry run ends there, and what came
before still holds.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.lang.backend import (
    Backend,
    Explanation,
    Generation,
    Method,
    RoleBegin,
    RoleEnd,
    Sampling,
    Scores,
    Segment,
    Text,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from anabranch.lang.function import Function

OPEN, CLOSE = "\ue000", "\ue001"  # private use: no prompt contains them
MAX_OPERATIONS = 10_000


@dataclass(frozen=True, slots=True)
class FunctionTrace:
    """What a dry run saw.

    operations  in order, as short texts; children of forks are indented by their depth
    prefix      the segments before the first thing that depends on an argument or on the model
    stopped_by  the exception that ended the dry run early, if one did
    """

    operations: tuple[str, ...]
    prefix: tuple[Segment, ...]
    stopped_by: BaseException | None = None

    def prefix_text(self) -> str:
        return "".join(s.text if isinstance(s, Text) else _turn_text(s) for s in self.prefix)

    def __str__(self) -> str:
        lines = [f"constant prefix: {len(self.prefix_text())} characters", *self.operations]
        if self.stopped_by is not None:
            lines.append(f"(ended by {type(self.stopped_by).__name__}: {self.stopped_by})")
        return "\n".join(lines)


class _Stop(BaseException):
    """Ends a dry run from inside; not an Exception, so that a program's own `except` lets it pass."""


def trace_function(function: "Function", arguments: dict[str, Any], *, prefix_only: bool = False) -> FunctionTrace:
    recorder = _Recorder(prefix_only)
    given = {**function.bind_arguments, **arguments}
    missing = {name: placeholder(name) for name in function._required if name not in given}
    stopped_by: BaseException | None = None
    try:
        function.run(backend=recorder, **{**given, **missing})
    except _Stop as stop:
        stopped_by = None if prefix_only else stop
    except Exception as error:
        stopped_by = error
    return FunctionTrace(tuple(recorder.operations), tuple(recorder.prefix), stopped_by)


def cache_function(function: "Function", backend: Backend, *, seconds: float) -> dict[str, Any] | None:
    """Compute the constant prefix; returns what that cost, or None if there is no constant prefix.

    The function is called up to its first operation that is not constant. With `seconds` the prefix is leased for
    that long.
    """
    prefix = trace_function(function, {}, prefix_only=True).prefix
    if not prefix:
        return None
    branch = backend.open()
    try:
        branch.append(prefix)
        cost = branch.prefill().result()
        if seconds:
            branch.lease(seconds)
    finally:
        if not seconds:
            branch.close()
    if seconds:
        function._leased = branch  # type: ignore[attr-defined]  # dropped with the function, or by the lease's end
    return cost


def placeholder(name: str) -> str:
    return f"{OPEN}{name}{CLOSE}"


def is_constant(text: str) -> bool:
    return OPEN not in text and CLOSE not in text


def shown(text: str) -> str:
    return re.sub(f"{OPEN}(.*?){CLOSE}", r"{\1}", text)


def _turn_text(segment: Segment) -> str:
    return f"<{segment.role}>" if isinstance(segment, RoleBegin) else "</>" if isinstance(segment, RoleEnd) else ""


class _Recorder:
    """A Backend that writes down what it is asked for and answers with placeholders at once."""

    def __init__(self, prefix_only: bool) -> None:
        self.prefix_only = prefix_only
        self.operations: list[str] = []
        self.prefix: list[Segment] = []
        self.constant = True
        self.ids = itertools.count(1)

    def open(self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0) -> "_Branch":
        return _Branch(self, 0)

    def new_program(self) -> int:
        return next(self.ids)

    def cancel_program(self, program: int) -> None: ...

    def stats(self) -> "Future[dict[str, Any]]":
        return _done({})

    def flush_cache(self) -> "Future[None]":
        return _done(None)

    def info(self) -> dict[str, Any]:
        return {"model": "dry run"}

    def note(self, depth: int, text: str) -> None:
        self.operations.append("  " * depth + text)
        if len(self.operations) >= MAX_OPERATIONS:
            raise _Stop(f"more than {MAX_OPERATIONS} operations")

    def end_of_constant(self) -> None:
        self.constant = False
        if self.prefix_only:
            raise _Stop


class _Branch:
    def __init__(self, recorder: _Recorder, depth: int) -> None:
        self.recorder, self.depth = recorder, depth

    def append(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            text = segment.text if isinstance(segment, Text) else _turn_text(segment)
            self.recorder.note(self.depth, repr(shown(text)) if isinstance(segment, Text) else text)
            if self.recorder.constant:
                self._extend_prefix(segment)

    def _extend_prefix(self, segment: Segment) -> None:
        if isinstance(segment, Text) and not is_constant(segment.text):
            before = segment.text[: segment.text.index(OPEN)]
            if before:
                self.recorder.prefix.append(Text(before))
            self.recorder.end_of_constant()
        else:
            self.recorder.prefix.append(segment)

    def generate(self, sampling: Sampling, on_text: Callable[[str], None] | None = None) -> "Future[Generation]":
        said = {k: getattr(sampling, k) for k in ("max_tokens", "stop", "temperature") if getattr(sampling, k)}
        self.recorder.note(self.depth, f"gen {said}" + (f" {sampling.constraint}" if sampling.constraint else ""))
        self.recorder.end_of_constant()
        text = placeholder(f"gen {next(self.recorder.ids)}")
        if on_text is not None:
            on_text(text)
        return _done(Generation(text, (0,), "stop", logprobs=TokenLogprobs((0,), (0.0,))))

    def score(
        self, choices: Sequence[str], method: Method, *, append: bool = True, timeout: float | None = None
    ) -> "Future[Scores]":
        self.recorder.note(self.depth, f"select {list(choices)}")
        self.recorder.end_of_constant()
        return _done(Scores(0, (0.0,) * len(choices), (TokenLogprobs((0,), (0.0,)),) * len(choices)))

    def prefill(self) -> "Future[dict[str, Any]]":
        return _done({})

    def fork(self, n: int) -> "list[_Branch]":
        self.recorder.note(self.depth, f"fork {n}")
        self.recorder.end_of_constant()
        return [_Branch(self.recorder, self.depth + 1) for _ in range(n)]

    def mark(self) -> int:
        return next(self.recorder.ids)

    def rollback(self, mark: int) -> None:
        self.recorder.end_of_constant()
        self.recorder.note(self.depth, "rollback")

    def join(self, winner: Any, drop: Sequence[Any] = ()) -> None:
        self.recorder.note(self.depth, "join" if winner is not None else "drop")

    def append_spans(self, spans: Sequence[tuple[Any, int]]) -> None:
        self.recorder.note(self.depth, f"append {len(spans)} spans")

    def lease(self, seconds: float) -> None:
        self.recorder.note(self.depth, f"lease {seconds} s")

    def token_ids(self) -> "Future[list[int]]":
        return _done([])

    def explain(self) -> "Future[Explanation]":
        return _done(Explanation(0, 0, ()))

    def cancel(self) -> None: ...

    def close(self, *, superseded: bool = False) -> None: ...


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future
