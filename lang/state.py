"""`State`: a handle on a branch in the runtime, and what a program does with it.

`s += expr` sends its operations at once and does not wait; reading a value waits. The branch's tokens and KV stay in
the runtime: what is here is a log of what was added (`log.py`), futures of what is being generated, and variables.
"""

import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.lang import backend as wire
from anabranch.lang import events, ir, log, meta, operations, reading
from anabranch.lang.deferred import Undecided
from anabranch.lang.errors import ProgramError, StateClosed, TurnError, TypedValueError, UndefinedVariable
from anabranch.lang.pending import Owned, Pending, failure, outcome, wait, wait_async
from anabranch.lang.program import Program
from anabranch.lang.record import BranchRecord, Usage

if TYPE_CHECKING:
    from anabranch.lang.explain import StateExplanation
    from anabranch.lang.group import Group


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a state to roll back to. Also valid in states forked after it was made."""

    id: int
    node: log.Node
    variables: dict[str, Any]
    generated: dict[str, Pending]


class State:
    """One branch of a program. Made by `function.run`, `fork` and `ab.state`; dropping it releases its branch."""

    __slots__ = (
        "__weakref__",
        "_branch",
        "_failure",
        "_fork_mark",
        "_fork_node",
        "_generated",
        "_held",
        "_index",
        "_program",
        "_record",
        "_tail",
        "_undecided",
        "_variables",
        "_why_closed",
        "on_failure",
        "ret_value",
    )  # fmt: skip

    def __init__(
        self, program: Program, branch: wire.BackendBranch, record: BranchRecord, parent: "State | None" = None
    ) -> None:
        self._program = program
        self._branch: wire.BackendBranch | None = branch
        self._record = record
        self._tail: log.Node = log.root() if parent is None else parent._tail
        self._fork_node = self._tail
        self._fork_mark = 0
        self._index = 0
        self._variables: dict[str, Any] = {} if parent is None else dict(parent._variables)
        self._generated: dict[str, Pending] = {} if parent is None else dict(parent._generated)
        self._failure: Exception | None = None if parent is None else parent._failure
        self._why_closed = ""
        self._undecided: Undecided | None = None  # a select whose rule is Python's, until it has decided
        self._held: list[Pending] = []  # other branches that must live until what they are needed for is done
        self.on_failure: Callable[[], None] | None = None
        self.ret_value: Any = None  # what the program's function returned
        record.state = weakref.ref(self)
        program.add_state(self)
        if events.watched():
            events.emit(
                events.Event(
                    "open", program.label, record.id, record.label or str(record.path), data={"path": record.path}
                )
            )

    # ---------------------------------------------------------------- adding

    def __iadd__(self, expr: Any) -> "State":
        if expr is None:
            raise ValueError("None was added to a state; a function that builds text must return it")
        self._execute(ir.as_expr(expr))
        return self

    def gen(self, name: str | None = None, *args: Any, **kwargs: Any) -> Owned:
        """`s += gen(...)`, returning the value on its way: `await` it, or call `.result()`."""
        from anabranch.lang.primitives import gen

        return self._last_value(gen(name, *args, **kwargs))

    def select(self, name: str | None = None, *args: Any, **kwargs: Any) -> Owned:
        """`s += select(...)`, returning the choice on its way."""
        from anabranch.lang.primitives import select

        return self._last_value(select(name, *args, **kwargs))

    def _last_value(self, expr: ir.Expr) -> Owned:
        value = self._execute(expr)
        assert value is not None
        return Owned(value)

    def _execute(self, expr: ir.Expr, *, streaming: bool = False) -> Pending | None:
        """Send every operation of `expr`, in order. Returns the value of the last gen or select."""
        branch = self._sender()
        segments: list[wire.Segment] = []
        value: Pending | None = None
        for part in ir.flatten(expr):
            match part:
                case ir.Text():
                    if part.text:
                        segments.append(wire.Text(part.text))
                        self._append("text", text=part.text)
                case ir.RoleBegin() | ir.RoleEnd():
                    segments.append(self._turn(part))
                case _:
                    if segments:
                        branch.append(segments)
                        segments = []
                    value = self._run(part, streaming)
                    branch = self._sender()
        if segments:
            branch.append(segments)
        if self._program.news:
            self._program.news.tell()
        return value

    def _run(self, part: ir.Expr, streaming: bool) -> Pending | None:
        match part:
            case ir.Gen():
                return operations.generate(self, part, streaming or self._program.stream)
            case ir.Select():
                return operations.select(self, part)
            case ir.Reasoning():
                value = self._execute(part.expr, streaming=streaming)
                for name in {p.name for p in ir.flatten(part.expr) if isinstance(p, ir.Gen) and p.name}:
                    operations.split_reasoning_of(self, name, part.model_type)
                return value
        raise AssertionError(part)

    def _turn(self, part: ir.RoleBegin | ir.RoleEnd) -> wire.Segment:
        open_role = self._tail.role
        if isinstance(part, ir.RoleBegin):
            if open_role is not None:
                raise TurnError(f"a {part.role} turn cannot begin inside the {open_role} turn; close that one first")
            self._append("begin", text=log.begin_text(part.role), role=part.role)
            return wire.RoleBegin(part.role)
        if open_role != part.role:
            raise TurnError(f"no {part.role} turn is open" + (f", but a {open_role} turn is" if open_role else ""))
        self._append("end", text=log.END_TEXT, role=None)
        return wire.RoleEnd()

    def _append(self, kind: log.Kind, **what: Any) -> None:
        what.setdefault("role", self._tail.role)
        self._tail = log.Node(self._tail, kind, **what)

    def _keep(self) -> Any:
        """What must live while this state's operations run, should the state itself be dropped meanwhile."""
        return self._branch, tuple(self._held)

    def _running(self) -> list[Future[Any]]:
        return [n.future for n in log.unsettled(self._tail) if n.future is not None and not n.future.done()]

    def _hold(self, branches: Any, futures: Sequence[Future[Any]]) -> None:
        """Keep other branches alive until `futures` are done: an operation that was sent still needs them."""
        self._held = [h for h in self._held if not h.done()]
        if futures:
            self._held.append(Pending(futures, lambda _: None, what="join", keep=branches))

    def _bind(self, name: str | None, value: Pending) -> None:
        if name is not None:
            self._variables[name] = value
            self._generated[name] = value

    def _track(self, name: str, future: Future[Any]) -> None:
        self._program.track(self._record, name, future, self.on_failure)

    # ---------------------------------------------------------------- turns and scopes

    def system(self, expr: Any = None) -> Any:
        return self._role("system", expr)

    def user(self, expr: Any = None) -> Any:
        return self._role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        return self._role("assistant", expr)

    def _role(self, role: str, expr: Any) -> Any:
        if expr is None:
            return self._role_scope(role)
        self._execute(ir.role_turn(role, expr))
        return self

    @contextlib.contextmanager
    def _role_scope(self, role: str) -> Iterator["State"]:
        self._execute(ir.RoleBegin(role))
        yield self
        self._execute(ir.RoleEnd(role))

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator["State"]:
        """Everything added inside becomes the text of variable `name`."""
        begin = self._tail
        yield self
        if not log.is_ancestor(begin, self._tail):
            raise ProgramError(f"the state was rolled back past the beginning of var_scope({name!r})")
        nodes = log.path(self._tail, begin)
        futures = [n.future for n in nodes if n.future is not None]
        self._variables[name] = Pending(
            futures, lambda _: log.text_of(nodes), what=f"variable {name!r}", keep=self._branch
        )

    # ---------------------------------------------------------------- reading

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """The variable's value; waits for it. Raises the first cause if it failed, UndefinedVariable if there is
        none.
        """
        value = self._lookup(name)
        if not isinstance(value, Pending):
            return value
        if not value.done():
            self._program.check_may_block(f"variable {name!r}")
        try:
            return value.result(timeout)
        except TypedValueError:
            raise
        except Exception as error:
            self._program.met(error)
            raise

    def set_var(self, name: str, value: Any) -> None:
        self._variables[name] = value
        if self._program.news:
            self._program.news.tell()

    def value(self, name: str) -> "reading.Value":
        """`await s.value("x")`: as s["x"], for async programs. Cancelling the wait leaves the generation alone."""
        return reading.Value(self, name)

    def variables(self) -> dict[str, Any]:
        """All variables by name; waits for each."""
        return {name: self.get_var(name) for name in list(self._variables)}

    def _lookup(self, name: str) -> Any:
        while name not in self._variables:
            if not reading.wait_for_program(self):
                if self._program.error is not None:
                    raise self._program.error
                raise UndefinedVariable(name, list(self._variables))
        return self._variables[name]

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What is known of a generated or selected variable: tokens, logprobs, finish reason, usage (SGLang's
        shape).
        """
        return meta.meta_info(self._results(name, timeout), many=len(self._generated[name].futures) > 1)

    def _results(self, name: str, timeout: float | None = None) -> list[Any]:
        if name not in self._generated:
            self._lookup(name)
            raise UndefinedVariable(name, [f"generated {n}" for n in self._generated])
        value = self._generated[name]
        if not value.done():
            self._program.check_may_block(f"variable {name!r}")
        for future in value.futures:
            limit, own = value._limit(timeout)
            if not wait(future, limit):
                value._give_up(own)
        return [outcome(f, value.what) for f in value.futures]

    def logprob(self, name: str, *, mean: bool = False) -> float:
        """Log-probability of a generated or selected variable's tokens, summed; with `mean`, per token."""
        return meta.logprob(self._results(name)[0], name, mean=mean)

    def tokens(self, name: str) -> tuple[int, ...]:
        """The token ids of a generated or selected variable."""
        return meta.token_ids(self._results(name)[0])

    def finish_reason(self, name: str) -> str:
        """ "stop", "length" or "abort"."""
        return str(meta.meta_info(self._results(name)[:1], many=False)["finish_reason"]["type"])

    def text(self) -> str:
        """All text of the state; waits for it. Turns read `role: content`; `explain().text` has the model's own
        template.
        """
        self.sync()
        return log.text_of(log.path(self._tail))

    def messages(self) -> list[dict[str, str]]:
        """The closed turns, in the OpenAI chat format; waits for them."""
        self.sync()
        return log.messages(log.path(self._tail))

    def sync(self, timeout: float | None = None) -> "State":
        """Wait until everything added is done. Raises the first cause of failure."""
        reading.wait_for_end(self, timeout)
        if (error := self._first_failure()) is not None:
            self._program.met(error)
            raise error
        return self

    def error(self, timeout: float | None = None) -> BaseException | None:
        """As `sync`, but returns the first cause of failure instead of raising it."""
        reading.wait_for_end(self, timeout)
        if (error := self._first_failure()) is not None:
            self._program.met(error)
        return error

    def __await__(self) -> Generator[Any, None, "State"]:
        """`await s`: as `sync`, for async programs."""
        for node in log.unsettled(self._tail):
            if node.future is not None and not (yield from wait_async(node.future, self._program.deadline).__await__()):
                raise TimeoutError(f"{node.what()} was not finished in time")
        return self.sync()

    def done(self) -> bool:
        """Whether everything added is done, well or badly."""
        return all(n.future is None or n.future.done() for n in log.unsettled(self._tail))

    def _first_failure(self) -> BaseException | None:
        """The first cause, once everything is done. Forgets nothing: a failed state stays failed."""
        if self._failure is not None:
            return self._failure
        for node in log.unsettled(self._tail):
            if node.future is not None and (error := failure(node.future, node.what())) is not None:
                return error
            node.settled = True
        return self._program.error if reading.is_background(self._program) else None

    def fail(self, error: Exception) -> None:
        """Mark this branch as failed by code outside the model; what it generates is cancelled. Raises where it is
        read.
        """
        if self._failure is None:
            self._failure = error
            self._record.status, self._record.error = "failed", f"{type(error).__name__}: {error}"
            self._program.keep_failure(self, self._index, error)
            self.cancel()
            if self.on_failure is not None:
                self.on_failure()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text (of one variable) as it comes; all at once unless the program runs with stream=True."""
        return reading.iterate(self, var_name)

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        return reading.iterate_async(self, var_name, return_meta_data)

    def stream(self, what: "str | ir.Expr") -> "reading.TextStream":
        """Iterate (`for` or `async for`) over text as it comes: of a variable, or of an expression that is added
        now.
        """
        if isinstance(what, str):
            return reading.TextStream(self, what, None)
        before = self._tail
        self._execute(what, streaming=True)
        return reading.TextStream(self, None, log.path(self._tail, before))

    # ---------------------------------------------------------------- branching

    def fork(self, size: int = 1, position_ids_offset: Any = None, *, cancel_siblings: bool = False) -> "Group":
        """`size` children that share every token of this state; O(1), nothing is copied or sent again.

        Children see the variables of this moment, also those still being generated, and keep their own from here on.
        When a child fails its siblings go on, unless `cancel_siblings`.
        """
        from anabranch.lang.group import Group

        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"fork needs a whole number of children >= 0, got {size!r:.80}")
        branch = self._require_open()
        mark = branch.mark()
        children = branch.fork(size) if size else []  # first: it refuses what is too many
        states = [State(self._program, b, r, self) for b, r in zip(children, self._record.fork(size), strict=True)]
        for i, state in enumerate(states):
            state._fork_mark, state._index = mark, i
        if running := self._running():
            held = Pending(running, lambda _: None, what="fork", keep=self._keep())
            for state in states:
                state._held.append(held)
        if events.watched():
            events.emit(
                events.Event("fork", self._program.label, self._record.id, data={"children": [state._record.id for state in states]})
            )
        return Group(states, self, cancel_siblings=cancel_siblings)

    @contextlib.contextmanager
    def copy(self, position_ids_offset: Any = None) -> Iterator["State"]:
        """A child to try something on; its new variables come back as lists of one (SGLang's form)."""
        group = self.fork(1)
        try:
            yield group[0]
        finally:
            group.join()

    def join(self, winner: "State | None" = None) -> "State":
        """The winner's tokens, KV and variables become this state's; every other open child is dropped from the
        cache at once.

        `winner` is a child of this state, or a descendant of one. None: only drop the children. Does not wait.
        """
        branch = self._require_open()
        losers = [s for s in self._open_descendants() if s is not winner and not (winner and winner.is_ancestor_of(s))]
        if winner is None:
            taken = None
        else:
            if not self.is_ancestor_of(winner):
                raise ProgramError("join takes a state that was forked from this one")
            taken = winner._require_open()
        dropped = [b for s in losers if (b := s._branch) is not None]
        branch.join(taken, dropped)
        if winner is not None:
            self._hold(taken, self._running() + winner._running())
        for loser in losers:
            loser._forget("lost", "it was dropped at a join: another branch won")
        if winner is not None:
            self._become(winner)
        if events.watched():
            data = {"winner": winner._record.id if winner else None, "dropped": [s._record.id for s in losers]}
            events.emit(events.Event("join", self._program.label, self._record.id, data=data))
        return self

    def _become(self, winner: "State") -> None:
        self._tail, self._failure = winner._tail, winner._failure
        self._variables, self._generated = dict(winner._variables), dict(winner._generated)
        self._held += winner._held
        self._record.take_over(winner._record)
        winner._forget("won", "it won a join: its parent has its tokens now")

    def is_ancestor_of(self, other: "State") -> bool:
        """Whether `other` was forked from this state, directly or not."""
        mine, theirs = self._record.path, other._record.path
        return self._program is other._program and len(theirs) > len(mine) and theirs[: len(mine)] == mine

    def _open_descendants(self) -> "list[State]":
        return [s for s in self._program.open_states() if self.is_ancestor_of(s)]

    def mark(self) -> Mark:
        """Name this place, to roll back to."""
        return Mark(self._require_open().mark(), self._tail, dict(self._variables), dict(self._generated))

    def rollback(self, mark: Mark) -> "State":
        """Undo what was added since `mark`: tokens, KV, grammar state and variables. Nothing is computed again."""
        branch = self._require_open()
        if not isinstance(mark, Mark):
            raise TypeError(f"rollback takes what mark() gave, got {mark!r:.80}")
        if not log.is_ancestor(mark.node, self._tail):
            raise ProgramError(
                "this mark is not on the state's path: it was made in another branch, or already rolled back past"
            )
        branch.rollback(mark.id)
        self._tail = mark.node
        self._variables, self._generated = dict(mark.variables), dict(mark.generated)
        if events.watched():
            events.emit(events.Event("rollback", self._program.label, self._record.id))
        return self

    def lease(self, seconds: float) -> "State":
        """Keep this branch's KV for `seconds`, as across a tool call; 0 ends the lease. The lease budget bounds it."""
        if not seconds >= 0:
            raise ValueError(f"lease takes a number of seconds >= 0, got {seconds!r}")
        self._require_open().lease(seconds)
        return self

    # ---------------------------------------------------------------- ending

    def cancel(self) -> None:
        """End what runs or waits on this state and on its open descendants. Idempotent; readers get the cause."""
        for state in [self, *self._open_descendants()]:
            if state._branch is not None:
                state._branch.cancel()

    def close(self) -> None:
        """Release the branch. What was generated stays readable. Idempotent; dropping the last reference does the
        same.
        """
        branch = self._branch
        self._forget("closed", "it was closed")
        if branch is not None:
            branch.close()

    def drop(self) -> None:
        """As `close`, and the cache gives up first what only this state used."""
        branch = self._branch
        self._forget("lost", "it was dropped")
        if branch is not None:
            branch.close(superseded=True)

    def _forget(self, status: Any, why: str) -> None:
        if self._branch is not None:
            self._branch, self._why_closed = None, why
            if self._record.status == "open":
                self._record.status = status
            if events.watched():
                events.emit(events.Event("close", self._program.label, self._record.id, data={"status": status}))

    def _sender(self) -> "wire.BackendBranch | Undecided":
        """What takes the next text or generation: the branch, or what holds it back until a select has decided. Never waits."""
        branch = self._require_alive()
        undecided = self._undecided
        if undecided is None or not undecided.decided.done():
            return undecided or branch
        outcome(undecided.decided, "select")
        self._undecided = None
        return branch

    def _require_open(self) -> wire.BackendBranch:
        """The branch, for what needs it as it will be: waits for a select whose rule is Python's."""
        branch = self._require_alive()
        if self._undecided is not None:
            decided = self._undecided.decided
            if not decided.done():
                self._program.check_may_block("a select by a rule of your own")
            if not wait(decided, self._program.deadline):
                raise TimeoutError("a select by a rule of your own was not decided in time")
            self._sender()
        return branch

    def _require_alive(self) -> wire.BackendBranch:
        if self._branch is None:
            raise StateClosed(f"this state can take no more operations: {self._why_closed}")
        if self._failure is not None:
            raise self._failure
        return self._branch

    def __enter__(self) -> "State":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- looking

    @property
    def closed(self) -> bool:
        return self._branch is None

    @property
    def index(self) -> int:
        """Which child of its fork this is."""
        return self._index

    def annotate(self, note: str) -> "State":
        """A short note that `tree()` shows beside this branch: a score, a name."""
        self._record.label = note
        return self

    def usage(self) -> Usage:
        """What this run has cost until now, all its branches together; `print(s.usage())` says what sharing saved."""
        return self._program.usage()

    def explain(self) -> "StateExplanation":
        """Which tokens were cached, computed or generated, what that saved, and why a prefix missed."""
        from anabranch.lang.explain import explain_state

        return explain_state(self)

    def tree(self) -> str:
        """This run's branches, drawn for a terminal."""
        from anabranch.lang.display import tree_text

        return tree_text(self)

    def watch(self) -> Any:
        """`with s.watch(): ...` shows the branches while they work, in a notebook or a terminal."""
        from anabranch.lang.display import Watch

        return Watch(self)

    def __repr__(self) -> str:
        name = f"{self._program.name or 'state'}{list(self._record.path) or ''}"
        arrived = "".join(n.arrived_text() for n in log.path(self._tail))
        shown = arrived if len(arrived) <= 400 else f"{arrived[:200]} ... {arrived[-180:]}"
        return f"<State {name} {self._record.shown_status()}: {shown!r}>"

    def _repr_html_(self) -> str:
        from anabranch.lang.display import state_html

        return state_html(self)
