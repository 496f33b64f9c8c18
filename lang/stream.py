"""Text that arrives in pieces, and news of change: one writer, any number of readers, threads and event loops alike."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator


class News:
    """Wakes whoever waits for a change. No thread: waiting threads sleep on a condition, coroutines on their loop."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._version = 0
        self._wakers: list[Callable[[], None]] = []

    @property
    def version(self) -> int:
        return self._version

    def tell(self) -> None:
        with self._condition:
            self._version += 1
            wakers, self._wakers = self._wakers, []
            self._condition.notify_all()
        for wake in wakers:
            wake()

    def wait(self, version: int, deadline: float | None = None) -> bool:
        """Block until something is told after `version` was read. False if `deadline` (time.monotonic) passed first."""
        with self._condition:
            while self._version == version:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._condition.wait(left)
        return True

    async def wait_async(self, version: int, deadline: float | None = None) -> bool:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()
        wake = waker(loop, told)
        with self._condition:
            if self._version != version:
                return True
            self._wakers.append(wake)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await told
        except TimeoutError:
            return False
        finally:
            with self._condition:
                if wake in self._wakers:
                    self._wakers.remove(wake)
        return True


def waker(loop: asyncio.AbstractEventLoop, told: "asyncio.Future[None]") -> Callable[[], None]:
    """A function that any thread may call, once or more, to resolve `told` on its loop; nothing happens if the loop
    is gone.
    """

    def resolve() -> None:
        if not told.done():
            told.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(resolve)

    return wake


class Stream:
    """The pieces of one generation's text. `feed` is the backend's callback; `end` is told when its future is done."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ended = False
        self._news = News()

    def feed(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self._news.tell()

    def end(self, *_: object) -> None:
        self.ended = True
        self._news.tell()

    def read(self, deadline: float | None = None) -> Iterator[str]:
        """All pieces from the first, as they come. Raises TimeoutError at `deadline`."""
        seen = 0
        while True:
            version, ended = self._news.version, self.ended
            pieces = self.pieces[seen:]
            seen += len(pieces)
            yield from pieces
            if ended and seen == len(self.pieces):
                return
            if not pieces and not self._news.wait(version, deadline):
                raise TimeoutError("the stream was not finished in time")

    async def read_async(self, deadline: float | None = None) -> AsyncIterator[str]:
        seen = 0
        while True:
            version, ended = self._news.version, self.ended
            pieces = self.pieces[seen:]
            seen += len(pieces)
            for piece in pieces:
                yield piece
            if ended and seen == len(self.pieces):
                return
            if not pieces and not await self._news.wait_async(version, deadline):
                raise TimeoutError("the stream was not finished in time")
