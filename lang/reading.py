"""Waiting for states and reading text as it comes; for threads and for coroutines.

A program run with `stream=True` works in a thread of its own while the caller reads: then a state's log still grows,
and reading waits for news of it. Otherwise the log is complete as far as the caller has written it.
"""

import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from anabranch.lang import log
from anabranch.lang.pending import Pending, failure, wait, wait_async

if TYPE_CHECKING:
    from anabranch.lang.program import Program
    from anabranch.lang.state import State


def is_background(program: "Program") -> bool:
    return program.thread is not None


def still_writing(state: "State") -> bool:
    """Whether another thread is running the program that writes this state."""
    program = state._program
    return is_background(program) and not program.finished and threading.current_thread() is not program.thread


def wait_for_program(state: "State", deadline: float | None = None) -> bool:
    """Wait until the program's thread has done something more. False if there is nothing to wait for."""
    news = state._program.news
    if news is None:
        return False
    version = news.version
    return still_writing(state) and news.wait(version, deadline)


def wait_for_end(state: "State", timeout: float | None) -> None:
    """Wait until the program's thread has finished and everything in the log is done. Raises TimeoutError."""
    deadline = _deadline(state, timeout)
    while still_writing(state):
        if not wait_for_program(state, deadline) and still_writing(state):
            raise TimeoutError("the program was not finished in time")
    for node in log.unsettled(state._tail):
        if node.future is None or node.future.done():
            continue
        state._program.check_may_block("the state")
        if not wait(node.future, deadline):
            raise TimeoutError(f"{node.what()} was not finished in time")


def _deadline(state: "State", timeout: float | None) -> float | None:
    limits = [
        t for t in (state._program.deadline, None if timeout is None else time.monotonic() + timeout) if t is not None
    ]
    return min(limits) if limits else None


class Value:
    """A variable to be awaited."""

    def __init__(self, state: "State", name: str) -> None:
        self._state, self._name = state, name

    def __await__(self) -> Generator[Any, None, Any]:
        return self._get().__await__()

    async def _get(self) -> Any:
        value = await _variable(self._state, self._name)
        return (await value) if isinstance(value, Pending) else value


async def _variable(state: "State", name: str) -> Any:
    """What the name stands for, once it stands for something; a value on its way is returned as it is."""
    while name not in state._variables:
        news = state._program.news
        version = news.version if news else 0
        if news is None or not still_writing(state):
            break
        await news.wait_async(version, state._program.deadline)
    return state._lookup(name)


class TextStream:
    """Text as it comes: of one variable, or of given nodes. `for` and `async for` alike."""

    def __init__(self, state: "State", name: str | None, nodes: list[log.Node] | None) -> None:
        self._state, self._name, self._nodes = state, name, nodes

    def __iter__(self) -> Iterator[str]:
        if self._nodes is None:
            yield from iterate(self._state, self._name)
            return
        for node in self._nodes:
            yield from _pieces(node, self._state._program.deadline)

    async def __aiter__(self) -> AsyncIterator[str]:
        if self._nodes is None:
            async for piece in iterate_async(self._state, self._name, False):
                yield piece
            return
        for node in self._nodes:
            async for piece in _pieces_async(node, self._state._program.deadline):
                yield piece


def iterate(state: "State", name: str | None) -> Iterator[str]:
    deadline = state._program.deadline
    if name is not None:
        node = _node_of(state, state._lookup(name))
        yield from _pieces(node, deadline) if node else iter([str(state.get_var(name))])
        return
    if not is_background(state._program):
        yield state.text()
        return
    seen = log.path(state._tail)[0]  # the root
    while True:
        version, writing = state._program.news.version, still_writing(state)  # type: ignore[union-attr]
        new = _new_nodes(seen, state)
        for node in new:
            yield from _pieces(node, deadline)
            seen = node
        if not new and not writing:
            break
        if not new:
            state._program.news.wait(version, deadline)  # type: ignore[union-attr]
    state.sync()


async def iterate_async(state: "State", name: str | None, with_meta: bool) -> AsyncIterator[Any]:
    deadline = state._program.deadline
    if name is not None:
        node = _node_of(state, await _variable(state, name))
        async for piece in _pieces_async(node, deadline) if node else _one(str(await state.value(name))):
            yield (piece, {"finish_reason": None}) if with_meta else piece
        if with_meta:
            yield "", state.get_meta_info(name) if node else {}
        return
    if not is_background(state._program):
        await state
        yield (state.text(), {}) if with_meta else state.text()
        return
    seen = log.path(state._tail)[0]
    while True:
        version, writing = state._program.news.version, still_writing(state)  # type: ignore[union-attr]
        new = _new_nodes(seen, state)
        for node in new:
            async for piece in _pieces_async(node, deadline):
                yield (piece, {}) if with_meta else piece
            seen = node
        if not new and not writing:
            break
        if not new:
            await state._program.news.wait_async(version, deadline)  # type: ignore[union-attr]
    state.sync()


async def _one(text: str) -> AsyncIterator[str]:
    yield text


def _new_nodes(seen: log.Node, state: "State") -> list[log.Node]:
    """What was added after `seen`; where the state was rolled back, from the last node that both have."""
    tail = state._tail
    return log.path(tail, log.common_ancestor(seen, tail))


def _node_of(state: "State", value: Any) -> log.Node | None:
    """The log node that a variable's value comes from; None for values that were not generated."""
    if not isinstance(value, Pending) or len(value.futures) != 1:
        return None
    return next((n for n in log.path(state._tail) if n.future is value.futures[0]), None)


def _pieces(node: log.Node, deadline: float | None) -> Iterator[str]:
    if node.future is None:
        if node.text:
            yield node.text
        return
    if node.stream is not None:
        yield from node.stream.read(deadline)
    if not wait(node.future, deadline):
        raise TimeoutError(f"{node.what()} was not finished in time")
    _raise_failure(node)
    if node.stream is None and node.final_text():
        yield node.text


async def _pieces_async(node: log.Node, deadline: float | None) -> AsyncIterator[str]:
    if node.future is None:
        if node.text:
            yield node.text
        return
    if node.stream is not None:
        async for piece in node.stream.read_async(deadline):
            yield piece
    if not await wait_async(node.future, deadline):
        raise TimeoutError(f"{node.what()} was not finished in time")
    _raise_failure(node)
    if node.stream is None and node.final_text():
        yield node.text


def _raise_failure(node: log.Node) -> None:
    assert node.future is not None
    if (error := failure(node.future, node.what())) is not None:
        raise error
