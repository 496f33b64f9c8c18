"""The children of one fork, handled together: add to all, wait for all, join."""

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from anabranch.lang import ir, log
from anabranch.lang.errors import BranchErrors, StateClosed
from anabranch.lang.pending import Pending, wait_async

if TYPE_CHECKING:
    from anabranch.lang.state import State

JoinMode = Literal["gather_variable", "concate_and_append"]


class Group:
    """Children of a fork, in order. Indexable, iterable, with a length.

    `group += x` adds an expression to every child, a list item by item, or a function's result for each index; what
    such a function raises fails that child only, and surfaces where the child is read or joined, at the latest at
    the program's end.
    """

    def __init__(self, states: "Sequence[State]", parent: "State", *, cancel_siblings: bool = False) -> None:
        self.states = list(states)
        self.parent = parent
        self._known = frozenset(parent._variables)
        if cancel_siblings:
            for state in self.states:
                state.on_failure = _sibling_canceller(state, self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> "Iterator[State]":
        return iter(self.states)

    @overload
    def __getitem__(self, index: int) -> "State": ...
    @overload
    def __getitem__(self, index: slice) -> "list[State]": ...
    def __getitem__(self, index: int | slice) -> "State | list[State]":
        return self.states[index]

    def __setitem__(self, index: int, value: "State") -> None:
        # `group[i] += x` ends here, with the very state that it got.
        if self.states[index] is not value:
            raise TypeError("a branch of a group cannot be replaced by another state")

    def __iadd__(self, other: Any) -> "Group":
        if isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise ValueError(
                    f"a list added to {len(self.states)} branches must have as many items, got {len(other)}"
                )
            for state, item in zip(self.states, other, strict=True):
                if state._failure is None:
                    state += item
        elif callable(other) and not isinstance(other, ir.Expr):
            for i, state in enumerate(self.states):
                if state._failure is None:
                    _guarded(state, lambda s, i=i: s.__iadd__(other(i)))  # type: ignore[misc]
        else:
            expr = ir.as_expr(other)
            for state in self.states:
                if state._failure is None:
                    state += expr
        return self

    def map(self, work: "Callable[[State], Any]") -> Any:
        """Call `work(child)` for every child and return the results; an `async def` work gives something to await.

        An error in one child leaves None in its place, goes on with the others, and surfaces at the join.
        """
        if inspect.iscoroutinefunction(work) or inspect.iscoroutinefunction(getattr(work, "__call__", None)):  # noqa: B004
            return self._map_async(work)
        return [_guarded(state, work) for state in self.states]

    async def _map_async(self, work: "Callable[[State], Any]") -> list[Any]:
        async def one(state: "State") -> Any:
            try:
                return await work(state)
            except Exception as error:
                state.fail(error)
                return None

        return list(await asyncio.gather(*(one(s) for s in self.states)))

    def values(self, name: str) -> list[Any]:
        """The variable of every child, in order; waits for them. None where a child does not have it."""
        self.sync()
        return [s.get_var(name) if name in s else None for s in self.states]

    # ---------------------------------------------------------------- waiting and joining

    def sync(self, timeout: float | None = None) -> "Group":
        """Wait for every child. Raises BranchErrors if some failed; the others are as they are."""
        for state in self.states:
            state.error(timeout)
        self._raise_failures()
        return self

    def __await__(self) -> "Generator[Any, None, Group]":
        yield from self._wait_async().__await__()
        self._raise_failures()
        return self

    async def _wait_async(self) -> None:
        for state in self.states:
            for node in log.unsettled(state._tail):
                if node.future is not None and not await wait_async(node.future, state._program.deadline):
                    raise TimeoutError(f"{node.what()} of branch {state.index} was not finished in time")
            for value in state._generated.values():
                with contextlib.suppress(Exception):
                    await Pending(value.futures, lambda _: None, what=value.what, deadline=value.deadline)

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Wait for the children and end them.

        "gather_variable"     each variable that children have and the parent had not at the fork becomes a list on
                              the parent, aligned by branch: None where a branch does not have it
        "concate_and_append"  the children's tokens since the fork are appended to the parent, in order, token by token
        Raises BranchErrors if children failed, naming each; what the others gave is kept. Variables and text of
        ended children stay readable.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f'join mode must be "gather_variable" or "concate_and_append", got {mode!r}')
        for state in self.states:
            state.error()
        self._finish(mode)

    async def ajoin(self, mode: JoinMode = "gather_variable") -> None:
        """`join` for async programs."""
        await self._wait_async()
        self.join(mode)

    def _finish(self, mode: JoinMode) -> None:
        failures = self._failures()
        if mode == "gather_variable":
            self._gather()
        elif not failures:
            self._append_spans()
        self._drop()
        self._raise(failures)

    def _gather(self) -> None:
        names = dict.fromkeys(n for s in self.states for n in s._variables if n not in self._known)
        for name in names:
            if name not in self.parent._variables:
                self.parent.set_var(name, [_value_or_none(s, name) for s in self.states])

    def _append_spans(self) -> None:
        parent = self.parent
        branch = parent._require_open()
        spans = []
        for state in self.states:
            if state._branch is None:
                raise StateClosed(f"branch {state.index} cannot be appended: {state._why_closed}")
            spans.append((state._branch, state._fork_mark))
        branch.append_spans(spans)
        parent._hold(spans, parent._running())
        for state in self.states:
            for node in log.path(state._tail, state._fork_node):
                parent._append(
                    node.kind,
                    text=node.text,
                    name=node.name,
                    role=node.role,
                    future=node.future,
                    read=node.read,
                    stream=node.stream,
                )

    def drop(self) -> None:
        """End the children without keeping anything; their KV is evicted first."""
        self._drop()

    def _drop(self) -> None:
        # An operation of the parent, so that it comes after spans that the parent takes over; without a parent, of
        # each child.
        parent = self.parent._branch
        children = [s._branch for s in self.states if s._branch is not None]
        if parent is not None:
            parent.join(None, children)
        for state in self.states:
            branch = state._branch
            state._forget("joined", "its group was joined")
            if parent is None and branch is not None:
                branch.close(superseded=True)

    def _failures(self) -> list[tuple[int, Exception]]:
        found = ((i, s._first_failure()) for i, s in enumerate(self.states))
        return [(i, e) for i, e in found if isinstance(e, Exception)]

    def _raise_failures(self) -> None:
        self._raise(self._failures())

    def _raise(self, failures: list[tuple[int, Exception]]) -> None:
        if failures:
            for _, error in failures:
                self.parent._program.met(error)
            raise BranchErrors.of(failures, len(self.states))

    def _repr_html_(self) -> str:
        from anabranch.lang.display import group_html

        return group_html(self)

    def __repr__(self) -> str:
        return f"<Group of {len(self.states)}: {self.states!r}>"


def _value_or_none(state: "State", name: str) -> Any:
    if name not in state or state._first_failure() is not None:
        value = state._variables.get(name)
        if not isinstance(value, Pending):
            return value
        try:
            return value.result()
        except Exception:
            return None
    return state.get_var(name)


def _guarded(state: "State", work: "Callable[[State], Any]") -> Any:
    try:
        return work(state)
    except Exception as error:
        state.fail(error)
        return None


def _sibling_canceller(state: "State", states: "Sequence[State]") -> Callable[[], None]:
    # Weak: a sibling that the program dropped is released, not kept for its brothers.
    others = [weakref.ref(s) for s in states if s is not state]

    def cancel_others() -> None:
        for ref in others:
            sibling = ref()
            if sibling is not None:
                sibling.cancel()

    return cancel_others
