"""A value on its way: what a generation will give, to be waited for or awaited."""

import asyncio
import concurrent.futures
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

from anabranch.lang.errors import Cancelled
from anabranch.lang.stream import waker

# How much longer than its own limit a wait goes on, so that the backend's error (which says more) can arrive.
GRACE = 0.5


class Pending:
    """One variable's value, or its failure. Readable any number of times, from threads and coroutines; giving up the
    wait leaves the operation alone.

    `finish` makes the value from the futures' results and runs once, in the first reader. `keep` is what must stay
    alive while the futures are not done: the branch that works for them.
    """

    __slots__ = ("__weakref__", "_cache", "_finish", "_keep", "deadline", "futures", "what")

    def __init__(
        self,
        futures: Sequence[Future[Any]],
        finish: Callable[[list[Any]], Any],
        *,
        what: str,
        deadline: float | None = None,
        keep: Any = None,
    ) -> None:
        self.futures = tuple(futures)
        self.what = what
        self.deadline = deadline
        self._finish = finish
        self._cache: tuple[bool, Any] | None = None
        self._keep = keep
        if keep is not None:
            release = _releaser(weakref.ref(self))
            for future in self.futures:
                future.add_done_callback(release)

    def done(self) -> bool:
        return self._cache is not None or all(f.done() for f in self.futures)

    def cancel(self) -> None:
        """End the operation in the runtime. Readers get `Cancelled`."""
        for future in self.futures:
            future.cancel()

    def result(self, timeout: float | None = None) -> Any:
        """The value. Raises the first cause of failure, or TimeoutError after `timeout` (or the operation's own
        limit).
        """
        if self._cache is None:
            limit, own = self._limit(timeout)
            for future in self.futures:
                if not wait(future, limit):
                    self._give_up(own)
            self._settle()
        return self._read()

    def __await__(self) -> Generator[Any, None, Any]:
        """As `result()`."""
        if self._cache is None:
            limit, own = self._limit(None)
            for future in self.futures:
                if not (yield from wait_async(future, limit).__await__()):
                    self._give_up(own)
            self._settle()
        return self._read()

    def _limit(self, timeout: float | None) -> tuple[float | None, bool]:
        """The moment to stop waiting, and whether that is the operation's own limit."""
        own = None if self.deadline is None else self.deadline + GRACE
        asked = None if timeout is None else time.monotonic() + timeout
        if asked is None or (own is not None and own <= asked):
            return own, True
        return asked, False

    def _give_up(self, own: bool) -> None:
        if own:
            self.cancel()
        raise TimeoutError(f"{self.what} was not finished in time")

    def _settle(self) -> None:
        if self._cache is None:
            try:
                self._cache = (True, self._finish([outcome(f, self.what) for f in self.futures]))
            except Exception as error:
                self._cache = (False, error)

    def _read(self) -> Any:
        assert self._cache is not None
        good, value = self._cache
        if good:
            return value
        raise value


class Owned:
    """What `s.gen(...)` returns: a Pending to whoever asked for it. Cancelling a task that awaits it also ends the
    generation in the runtime; cancelling one that awaits the variable does not.
    """

    __slots__ = ("pending",)

    def __init__(self, pending: Pending) -> None:
        self.pending = pending

    def done(self) -> bool:
        return self.pending.done()

    def cancel(self) -> None:
        self.pending.cancel()

    def result(self, timeout: float | None = None) -> Any:
        return self.pending.result(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self.pending.__await__())
        except asyncio.CancelledError:
            self.pending.cancel()
            raise


def _releaser(pending: "weakref.ref[Pending]") -> Callable[[object], None]:
    # The future must not hold the pending value: a dropped state would then keep its branch until the future is done.
    def release(_: object) -> None:
        held = pending()
        if held is not None and all(f.done() for f in held.futures):
            held._keep = None

    return release


def outcome(future: Future[Any], what: str) -> Any:
    """The result of a future that is done. A cancelled one raises our `Cancelled`, which no event loop mistakes for
    its own.
    """
    if (error := failure(future, what)) is not None:
        raise error
    return future.result(0)


def failure(future: Future[Any], what: str) -> BaseException | None:
    """Why a future that is done has no result; None if it has one."""
    if future.cancelled():
        return Cancelled(f"{what} was cancelled")
    error = future.exception(0)
    if getattr(error, "type", "") == "cancelled":  # the runtime's own class, which this layer does not know
        cancelled = Cancelled(f"{what} was cancelled: {error}")
        cancelled.__cause__ = error
        return cancelled
    return error


def wait(future: Future[Any], deadline: float | None) -> bool:
    """Block until the future is done, in any way. False if `deadline` (time.monotonic) passed first."""
    if future.done():
        return True
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    done, _ = concurrent.futures.wait([future], left)
    return bool(done)


async def wait_async(future: Future[Any], deadline: float | None) -> bool:
    """As `wait`, for a coroutine. No thread; a cancelled task stops waiting and leaves the future alone."""
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()
    wake = waker(loop, told)
    future.add_done_callback(lambda _: wake())
    try:
        async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
            await told
    except TimeoutError:
        return future.done()
    return True
