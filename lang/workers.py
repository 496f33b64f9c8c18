"""A bounded number of daemon threads for blocking work. They start as they are needed, and never hold up interpreter
exit.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any


class Workers:
    """Runs jobs in at most `max_threads` threads, first come first served. Dropped or closed, its threads end after
    their job.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        if max_threads < 1:
            raise ValueError(f"the number of threads must be >= 1, got {max_threads}")
        self._max_threads, self._name = max_threads, name
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, _stop, self._jobs, max_threads)

    def submit(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._jobs.qsize() >= self._idle and len(self._threads) < self._max_threads:
                name = f"{self._name}-{len(self._threads) + 1}"
                thread = threading.Thread(target=_serve, args=(self._jobs, weakref.ref(self)), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put((future, work, args))
        return future

    def close(self) -> None:
        """End the threads once they have done what was submitted, and wait for that."""
        self._closer()
        for thread in self._threads:
            thread.join()

    def _count_idle(self, change: int) -> None:
        with self._lock:
            self._idle += change


def _serve(jobs: "queue.SimpleQueue[Any]", workers: "weakref.ref[Workers]") -> None:
    while True:
        _count(workers, 1)
        job = jobs.get()
        _count(workers, -1)
        if job is None:
            return
        _work(*job)
        del job  # hold nothing while waiting


def _work(future: "Future[Any]", work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(*args)
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
    else:
        future.set_result(result)


def _count(workers: "weakref.ref[Workers]", change: int) -> None:
    if (alive := workers()) is not None:
        alive._count_idle(change)


def _stop(jobs: "queue.SimpleQueue[Any]", count: int) -> None:
    for _ in range(count):
        jobs.put(None)
