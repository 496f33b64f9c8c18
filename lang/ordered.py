"""The order of operations on branches, for backends that keep their branches in the program's own process.

One dispatcher thread owns every branch and takes one message after another, so nothing here needs a lock. It is the
base of the scripted backend (`testing.py`) and of the text endpoints (`endpoints.py`); the embedded engine does the
same in its tokenizer process. A subclass of `Machine` says what operations do; this says when: in the order of the
calls on one branch, a fork's children after the fork, a join after what was asked of the winner before it.
"""

import contextlib
import copy
import itertools
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabranch.lang.backend import Explanation, Generation, Method, Sampling, Scores, Segment
from anabranch.lang.errors import Cancelled


class Content(Protocol):
    """What a branch holds. Positions count whatever the content is made of: tokens, or segments."""

    def append(self, segments: Sequence[Segment]) -> None: ...

    def end(self) -> int:
        """The position after everything that was appended."""
        ...

    def cut(self, position: int) -> None: ...

    def copy(self) -> Any: ...

    def since(self, position: int) -> Any: ...

    def extend(self, part: Any) -> None:
        """Append what `since` gave, of another branch's content."""
        ...


@dataclass(eq=False)
class Op:
    """One operation in a branch's queue. `run` is whatever a subclass keeps while it is under way."""

    kind: str
    future: "Future[Any] | None" = None
    args: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    run: Any = None
    reached: bool = False


class Core:
    """A branch, as the dispatcher sees it. It is born when the fork that makes it has been carried out."""

    def __init__(self, branch_id: int, content: Any, *, program: int, seed: int, salt: str, born: bool) -> None:
        self.id, self.content, self.program, self.seed, self.salt = branch_id, content, program, seed, salt
        self.path: tuple[int, ...] = ()
        self.num_children = 0
        self.inherited = 0  # where its fork was, or what is left of that after a rollback
        self.marks: dict[int, int] = {}
        self.queue: deque[Op] = deque()
        self.born = born
        self.closed = False
        self.failed: Exception | None = None
        self.leased = 0.0


class OrderedBackend:
    """The Backend protocol over a Machine. `calls` counts what was asked for: calls["fork"] ..."""

    def __init__(self, machine: "Machine") -> None:
        self.calls: Counter[str] = Counter()
        self._ids, self._programs = itertools.count(1), itertools.count(1)
        self._machine = machine
        self._closer = weakref.finalize(self, machine.inbox.put, None)

    def open(self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0) -> "OrderedBranch":
        branch_id = next(self._ids)
        seed = branch_id if seed is None else seed
        core = Core(branch_id, self._machine.new_content(), program=program, seed=seed, salt=salt, born=True)
        self._put("open", core)
        return OrderedBranch(self, core)

    def new_program(self) -> int:
        return next(self._programs)

    def cancel_program(self, program: int) -> None:
        self._put("cancel_program", program)

    def stats(self) -> "Future[dict[str, Any]]":
        return self._ask("stats")

    def flush_cache(self) -> "Future[None]":
        return self._ask("flush_cache")

    def info(self) -> dict[str, Any]:
        return self._machine.info()

    def settle(self) -> None:
        """Return once everything asked for until now has been done, or waits for something."""
        self._ask("barrier").result(30)

    def open_branches(self) -> int:
        """Branches that are held at this moment."""
        self.settle()
        return len(self._machine.cores)

    def die(self, error: Exception | None = None) -> None:
        """The engine is gone: everything open fails with `error`, and so does everything from now on."""
        self._put("die", error or RuntimeError("the engine is gone"))

    def _put(self, what: str, *args: Any) -> None:
        self.calls[what] += 1
        self._machine.put((what, *args))

    def _ask(self, what: str) -> "Future[Any]":
        future: Future[Any] = Future()
        self._put(what, future)
        return future


class OrderedBranch:
    """A handle. Dropping it closes the branch."""

    def __init__(self, backend: OrderedBackend, core: Core) -> None:
        self._backend, self._core = backend, core

    def append(self, segments: Sequence[Segment]) -> None:
        self._send(Op("append", args={"segments": tuple(segments)}))

    def generate(self, sampling: Sampling, on_text: Callable[[str], None] | None = None) -> "Future[Generation]":
        return self._ask("generate", timeout=sampling.timeout, sampling=sampling, on_text=on_text)

    def prefill(self) -> "Future[dict[str, Any]]":
        return self._ask("prefill")

    def score(
        self, choices: Sequence[str], method: Method, *, append: bool = True, timeout: float | None = None
    ) -> "Future[Scores]":
        return self._ask("score", timeout=timeout, choices=tuple(choices), method=method, append=append)

    def fork(self, n: int) -> "list[OrderedBranch]":
        ids, core, machine = self._backend._ids, self._core, self._backend._machine
        children = [
            Core(next(ids), machine.new_content(), program=core.program, seed=core.seed, salt=core.salt, born=False)
            for _ in range(n)
        ]
        self._send(Op("fork", args={"children": children}))
        return [OrderedBranch(self._backend, child) for child in children]

    def mark(self) -> int:
        mark = next(self._backend._ids)
        self._send(Op("mark", args={"mark": mark}))
        return mark

    def rollback(self, mark: int) -> None:
        self._send(Op("rollback", args={"mark": mark}))

    def join(self, winner: Any, drop: Sequence[Any] = ()) -> None:
        handles = [branch for branch in (winner, *drop) if branch is not None]  # kept until the join has been done
        cores = [branch._core for branch in drop]
        self._send(Op("join", args={"winner": winner and winner._core, "drop": cores, "keep": handles}))

    def append_spans(self, spans: Sequence[tuple[Any, int]]) -> None:
        self._send(Op("spans", args={"spans": [(b._core, mark) for b, mark in spans], "keep": [b for b, _ in spans]}))

    def lease(self, seconds: float) -> None:
        self._send(Op("lease", args={"seconds": seconds}))

    def token_ids(self) -> "Future[list[int]]":
        return self._ask("token_ids")

    def explain(self) -> "Future[Explanation]":
        return self._ask("explain")

    def cancel(self) -> None:
        self._backend._put("cancel", self._core)

    def close(self, *, superseded: bool = False) -> None:
        self._backend._put("close", self._core)

    def __del__(self) -> None:
        # Garbage collection may run anywhere, so this only puts a message into a queue that is made for that.
        self._backend._machine.inbox.put(("close", self._core))

    def _ask(self, kind: str, *, timeout: float | None = None, **args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        deadline = None if timeout is None else time.monotonic() + timeout
        op = Op(kind, future, args, deadline)
        inbox, core = self._backend._machine.inbox, self._core
        future.add_done_callback(lambda f: inbox.put(("cancelled", core, op)) if f.cancelled() else None)
        self._send(op)
        return future

    def _send(self, op: Op) -> None:
        self._backend.calls[op.kind] += 1
        self._backend._machine.put(("op", self._core, op))


class Machine:
    """The dispatcher. `do_*` handle messages; `op_*` carry out a branch's operations and return False where they
    must wait.

    An operation that waits is tried again when `advance` is told for its branch. Subclasses give `new_content`,
    `info`, `op_generate`, `op_score`, `op_prefill`, `op_token_ids`, `op_explain`.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cores: dict[int, Core] = {}
        self.dead: Exception | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._timed: list[tuple[Core, Op]] = []

    def new_content(self) -> Any:
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        raise NotImplementedError

    def put(self, message: Any) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="anabranch-branches", daemon=True)
                    self._thread.start()
        self.inbox.put(message)

    def _loop(self) -> None:
        while True:
            try:
                message = self.inbox.get(timeout=self._until_next_deadline())
            except queue.Empty:
                self._end_late()
                continue
            if message is None:
                return
            kind, *args = message
            getattr(self, "do_" + kind)(*args)
            del message, args  # hold nothing while waiting: an error holds frames, and those hold states
            self._end_late()

    def _until_next_deadline(self) -> float | None:
        self._timed = [(c, op) for c, op in self._timed if op.future and not op.future.done()]
        if not self._timed:
            return None
        return max(0.0, min(op.deadline for _, op in self._timed if op.deadline is not None) - time.monotonic())

    def _end_late(self) -> None:
        now = time.monotonic()
        for core, op in self._timed:
            if op.deadline is not None and op.deadline <= now and op.future and not op.future.done():
                self.fail(core, TimeoutError("the operation ran past its timeout"))

    # ---------------------------------------------------------------- messages

    def do_open(self, core: Core) -> None:
        self.cores[core.id] = core
        core.failed = self.dead

    def do_op(self, core: Core, op: Op) -> None:
        core.queue.append(op)
        if op.kind == "fork":
            self.cores.update((child.id, child) for child in op.args["children"])
        if op.kind == "join" and op.args["winner"] is not None:
            self._wait_for(op, [op.args["winner"]], core)
        if op.kind == "spans":
            self._wait_for(op, [child for child, _ in op.args["spans"]], core)
        if op.deadline is not None:
            self._timed.append((core, op))
        self.advance(core)

    def _wait_for(self, op: Op, others: Sequence[Core], core: Core) -> None:
        """`op` may run once each of `others` has done what was asked of it before."""
        op.args["reaches"] = [Op("reach", args={"for": core}) for _ in others]
        for other, reach in zip(others, op.args["reaches"], strict=True):
            other.queue.append(reach)
            self.advance(other)

    def do_advance(self, core: Core) -> None:
        self.advance(core)

    def do_cancelled(self, core: Core, op: Op) -> None:
        if op in core.queue:
            self.fail(core, Cancelled("the operation was cancelled"))

    def do_cancel(self, core: Core) -> None:
        if core.queue and core.failed is None:
            self.fail(core, Cancelled("the branch was cancelled"))

    def do_cancel_program(self, program: int) -> None:
        for core in [c for c in self.cores.values() if c.program == program]:
            self.do_cancel(core)

    def do_close(self, core: Core) -> None:
        if not core.closed:
            core.closed = True
            self.cores.pop(core.id, None)
            self.fail(core, Cancelled("the branch was closed"))

    def do_die(self, error: Exception) -> None:
        self.dead = error
        for core in list(self.cores.values()):
            self.fail(core, error)

    def do_barrier(self, future: "Future[None]") -> None:
        future.set_result(None)

    def do_stats(self, future: "Future[dict[str, Any]]") -> None:
        future.set_result({"branches": len(self.cores), "waiting_ops": sum(len(c.queue) for c in self.cores.values())})

    def do_flush_cache(self, future: "Future[None]") -> None:
        future.set_result(None)

    # ---------------------------------------------------------------- a branch's operations, in order

    def advance(self, core: Core) -> None:
        while core.queue and (core.born or core.failed is not None):
            op = core.queue[0]
            if core.failed is not None:
                self._refuse(core, op)
            else:
                try:
                    if not getattr(self, "op_" + op.kind)(core, op):
                        return
                except Exception as error:
                    _refuse_future(op.future, error)
                    self.fail(core, error)
                    continue
            if core.queue and core.queue[0] is op:
                core.queue.popleft()

    def fail(self, core: Core, error: Exception) -> None:
        """The branch has failed with this first cause, and everything that waits on it fails with the same."""
        core.failed = core.failed or _twin(error)
        for op in core.queue:
            self.stop(op)
        self.advance(core)

    def stop(self, op: Op) -> None:
        """End what an operation has under way, where a subclass has something to end."""

    def _refuse(self, core: Core, op: Op) -> None:
        assert core.failed is not None
        _refuse_future(op.future, _twin(core.failed))
        for child in op.args.get("children", ()):
            self.fail(child, core.failed)
        if op.kind == "reach":
            self.op_reach(core, op)
        for loser in op.args.get("drop", ()):
            self.do_close(loser)

    def resolve(self, op: Op, result: Any) -> bool:
        if op.future is not None:
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                op.future.set_result(result)
        return True

    def op_append(self, core: Core, op: Op) -> bool:
        core.content.append(op.args["segments"])
        return True

    def op_reach(self, core: Core, op: Op) -> bool:
        op.reached = True
        self.inbox.put(("advance", op.args["for"]))
        return True

    def op_mark(self, core: Core, op: Op) -> bool:
        core.marks[op.args["mark"]] = core.content.end()
        return True

    def op_rollback(self, core: Core, op: Op) -> bool:
        if (position := core.marks.get(op.args["mark"])) is None:
            raise ValueError(f"mark {op.args['mark']} is not on this branch")
        core.content.cut(position)
        core.inherited = min(core.inherited, position)
        core.marks = {mark: at for mark, at in core.marks.items() if at <= position}
        return True

    def op_fork(self, core: Core, op: Op) -> bool:
        here = core.content.end()
        for child in op.args["children"]:
            child.content, child.marks, child.inherited = core.content.copy(), dict(core.marks), here
            child.path, child.born = (*core.path, core.num_children), True
            core.num_children += 1
            self.advance(child)
        return True

    def op_join(self, core: Core, op: Op) -> bool:
        winner = op.args["winner"]
        if winner is not None:
            if not all(reach.reached for reach in op.args["reaches"]):
                return False
            if winner.failed is not None:
                raise winner.failed
            core.content, core.marks = winner.content, winner.marks
            core.path, core.num_children = winner.path, winner.num_children
            self.do_close(winner)
        for loser in op.args["drop"]:
            self.do_close(loser)
        return True

    def op_spans(self, core: Core, op: Op) -> bool:
        if not all(reach.reached for reach in op.args["reaches"]):
            return False
        for child, mark in op.args["spans"]:
            if child.failed is not None:
                raise child.failed
            core.content.extend(child.content.since(child.marks[mark]))
        return True

    def op_lease(self, core: Core, op: Op) -> bool:
        core.leased = op.args["seconds"]
        return True


def _refuse_future(future: "Future[Any] | None", error: Exception) -> None:
    if future is not None and not future.done():
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            future.set_exception(error)


def _twin(error: Exception) -> Exception:
    """A copy without a traceback. What is raised in a program holds its frames, and those hold its states; so a branch
    remembers, and gives to each further future, a copy of its own.
    """
    try:
        return copy.copy(error)
    except Exception:  # an exception class that cannot be copied
        return error
