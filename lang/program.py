"""One run of a program: its options, limits and backend; and the backend that programs use unless told otherwise."""

import asyncio
import contextvars
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anabranch.lang import events
from anabranch.lang.backend import Backend, is_generation, is_scores
from anabranch.lang.errors import BranchErrors, WouldBlock
from anabranch.lang.options import Options
from anabranch.lang.pending import failure
from anabranch.lang.record import PREVIEW, BranchRecord, Usage
from anabranch.lang.stream import News

if TYPE_CHECKING:
    from anabranch.lang.state import State

# Makes the backend of programs that name none; the facade puts the embedded engine here. Called once, on first use.
default_backend_factory: Callable[[], Backend] | None = None
_default_backend: Backend | None = None
_default_lock = threading.Lock()

current_program: "contextvars.ContextVar[Program | None]" = contextvars.ContextVar("anabranch_program", default=None)


def set_default_backend(backend: Any) -> None:
    """Use `backend` (an Engine, a Runtime, an endpoint) for programs that name none. None: back to the embedded
    engine.
    """
    global _default_backend
    _default_backend = None if backend is None else as_backend(backend)


def default_backend() -> Backend:
    global _default_backend
    with _default_lock:
        if _default_backend is None:
            if default_backend_factory is None:
                raise RuntimeError("no backend: call set_default_backend(...), or pass backend= to run")
            _default_backend = default_backend_factory()
        return _default_backend


def as_backend(backend: Any) -> Backend:
    """The Backend in what the user gave: itself, or the one that a Runtime or Engine carries."""
    for candidate in (backend, getattr(backend, "endpoint", None), getattr(backend, "backend", None)):
        if candidate is not None and callable(getattr(candidate, "open", None)) and hasattr(candidate, "new_program"):
            return candidate
    raise TypeError(f"{backend!r} is no backend: it needs the methods of anabranch.lang.backend.Backend")


@dataclass(slots=True)
class Op:
    id: int
    name: str
    record: BranchRecord
    future: Future[Any]
    on_failure: Callable[[], None] | None = None


class Program:
    """The shared part of all states of one run.

    label     the backend's name for this run: fair share, cancelling
    deadline  time.monotonic after which no wait of this run goes on; None once it has finished
    """

    def __init__(
        self,
        backend: Backend,
        options: Options | None = None,
        *,
        name: str = "",
        seed: int | None = None,
        timeout: float | None = None,
        salt: str = "",
        priority: int = 0,
        stream: bool = False,
        is_async: bool = False,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds > 0, got {timeout!r}")
        self.backend = backend
        self.options = options or Options()
        self.name = name
        self.seed = seed
        self.salt = salt
        self.priority = priority
        self.stream = stream
        self.is_async = is_async
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.timeout = timeout
        self.label = backend.new_program()
        self.root = BranchRecord(label=name)
        self._states: dict[int, weakref.ref[State]] = {}
        self.started: list[State] = []  # states of programs that this one started and that nobody has waited for
        self.news = News() if stream else None
        self.thread: threading.Thread | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.began = time.monotonic()
        self._failed: list[tuple[weakref.ref[State], int, Exception]] = []
        self._running: dict[int, Op] = {}
        self._op_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._seeds = itertools.count(1)

    # ---------------------------------------------------------------- states

    def add_state(self, state: "State") -> None:
        key, states = state._record.id, self._states
        states[key] = weakref.ref(state, lambda _: states.pop(key, None))

    def open_states(self) -> "list[State]":
        """The states of this run that are alive and open, oldest first."""
        alive = [ref() for ref in list(self._states.values())]
        return [s for s in alive if s is not None and not s.closed]

    # ---------------------------------------------------------------- operations

    def limit(self, options: Options) -> tuple[Options, float | None]:
        """Options whose timeout also respects the run's, and the moment by which the operation must be done."""
        now = time.monotonic()
        limits = [t for t in (options.timeout, None if self.deadline is None else max(self.deadline - now, 0.001)) if t]
        if not limits:
            return options, None
        timeout = min(limits)
        return (options if timeout == options.timeout else replace(options, timeout=timeout)), now + timeout

    def track(
        self, record: BranchRecord, name: str, future: Future[Any], on_failure: Callable[[], None] | None
    ) -> None:
        op = Op(next(self._op_ids), name, record, future, on_failure)
        with self._lock:
            self._running[op.id] = op
            record.last_op = op.id
            record.running += 1
        if events.watched():
            events.emit(events.Event("start", self.label, record.id, name, op.id))
        future.add_done_callback(lambda _: self._account(op))

    def _account(self, op: Op) -> None:
        """Count what a finished operation cost, once. Runs on the runtime's thread, or in `usage` if that comes
        first.
        """
        with self._lock:
            if self._running.pop(op.id, None) is None:
                return
            op.record.running -= 1
            error = failure(op.future, op.name)
            if error is None:
                _add_result(op.record, op.future.result(0))
            else:
                op.record.error = op.record.error or f"{type(error).__name__}: {error}"
        if error is not None and op.on_failure is not None:
            op.on_failure()
        if events.watched():
            data = {} if error else {"usage": op.future.result(0).usage, "preview": op.record.preview}
            told = {"error": op.record.error} if error else data
            events.emit(events.Event("finish", self.label, op.record.id, op.name, op.id, data=told))

    def usage(self) -> Usage:
        """What this run has cost until now, all branches together."""
        for op in list(self._running.values()):
            if op.future.done():
                self._account(op)
        return self.root.total()

    def next_seed(self) -> int | None:
        """A seed for a program started by this one; None if this one has none."""
        return None if self.seed is None else derive_seed(self.seed, next(self._seeds))

    def check_may_block(self, what: str) -> None:
        """An async program that blocks its own event loop would stop every other branch; say so instead."""
        if self.is_async and not self.finished and asyncio._get_running_loop() is not None:
            raise WouldBlock(
                f"reading {what} here would block the event loop; await it first: await s.value(name), await s"
            )

    # ---------------------------------------------------------------- failures of user code, kept until somebody
    # meets them

    def keep_failure(self, state: "State", index: int, error: Exception) -> None:
        self._failed.append((weakref.ref(state), index, error))

    def met(self, error: BaseException) -> None:
        """The user has seen this failure."""
        self._failed = [f for f in self._failed if f[2] is not error]

    def raise_unmet(self) -> None:
        if failed := self._failed:
            self._failed = []
            raise BranchErrors.of([(index, error) for _, index, error in failed], len(failed))

    # ---------------------------------------------------------------- the end

    def finish(self) -> None:
        self.deadline = None
        self.finished = True
        if self.news:
            self.news.tell()

    def abort(self, error: BaseException | None = None) -> None:
        """End everything this run does in the runtime, and release its branches. Idempotent."""
        self.error = self.error or error
        self.backend.cancel_program(self.label)
        for state in self.open_states():
            state.close()
        for state in self.started:
            state._program.abort(error)
        self.started = []
        self.finish()


def _add_result(record: BranchRecord, result: Any) -> None:
    usage = getattr(result, "usage", result)
    if isinstance(usage, dict):
        record.usage.add(usage)
    if is_generation(result):
        record.length = max(record.length, int(usage.get("prompt_tokens", 0)) + len(result.token_ids))
        record.cold_length = record.length - bool(result.token_ids)
        record.preview = result.text[:PREVIEW]
    elif is_scores(result):
        chosen = result.logprobs[result.best].token_ids if result.logprobs else ()
        record.length = max(record.length, int(usage.get("prompt_tokens", 0)) + len(chosen))
        record.cold_length = record.length


def derive_seed(seed: int, index: int) -> int:
    """A seed for item `index` of a run seeded with `seed`: well spread, and the same on every machine (splitmix64)."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1  # 63 bits: fits a signed integer everywhere
