"""Many runs of one program: bounded concurrency, order kept, failures kept per item, progress, resumable.

A sync program needs a thread while it runs, and there are at most `num_threads` of them whatever the number of items
and branches; async programs share one event loop in one thread.
"""

import asyncio
import concurrent.futures
import contextvars
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.lang.errors import BatchErrors, Cancelled
from anabranch.lang.function import _settle, open_state
from anabranch.lang.program import Program, derive_seed
from anabranch.lang.record import Usage
from anabranch.lang.saved import SavedState, load, save
from anabranch.lang.workers import Workers

if TYPE_CHECKING:
    from anabranch.lang.function import Function
    from anabranch.lang.state import State

AUTO_THREADS = 32  # enough runs to keep the runtime's batch full; a run's branches come on top
LOOK_AHEAD = 4  # items begun beyond those not yet yielded, in multiples of the number of threads


class Failure:
    """What stands in a batch's results for an item that failed. False in an `if`; reading a value raises the error."""

    def __init__(self, index: int, arguments: dict[str, Any], exception: BaseException) -> None:
        self.index, self.arguments, self.exception = index, arguments, exception

    def __bool__(self) -> bool:
        return False

    def error(self) -> BaseException:
        return self.exception

    def __getitem__(self, name: str) -> Any:
        raise self.exception

    def text(self) -> str:
        raise self.exception

    def messages(self) -> list[dict[str, str]]:
        raise self.exception

    def __repr__(self) -> str:
        return f"<Failure of item {self.index}: {type(self.exception).__name__}: {self.exception}>"


Result = Any  # State | SavedState | Failure


def run_batch(
    function: "Function",
    batch_kwargs: Sequence[Any],
    *,
    num_threads: int | str,
    progress_bar: bool,
    generator_style: bool,
    backend: Any,
    resume: Any,
    on_error: str,
    keep_open: bool,
    options: dict[str, Any],
) -> Any:
    """A list of one result per item, in the order of the items; a generator of the same with `generator_style`.

    An item that fails does not stop the others: a `Failure` stands in its place. `on_error="raise"` raises
    BatchErrors at the end instead, with all results in its `results`. The states of a batch are readable, and closed
    unless `keep_open`. A `seed` gives every item a seed of its own, derived from it. With `resume="file.jsonl"` each
    finished item is written there, and items that the file has are taken from it (as SavedState) instead of being
    run; failures are tried again. Closing the generator early cancels what still runs.
    """
    if on_error not in ("keep", "raise"):
        raise ValueError(f'on_error must be "keep" or "raise", got {on_error!r}')
    items = [_arguments(function, item, i) for i, item in enumerate(batch_kwargs)]
    width = _width(num_threads, len(items))
    batch = _Batch(function, items, options, function._backend(backend), resume, keep_open)
    results = _results(batch, width, progress_bar)
    if generator_style:
        return results
    collected = list(results)
    failed = [r for r in collected if isinstance(r, Failure)]
    if failed and on_error == "raise":
        raise BatchErrors.of(failed, collected)
    return collected


class _Batch:
    """What the items of a batch share."""

    def __init__(
        self,
        function: "Function",
        items: list[dict[str, Any]],
        options: dict[str, Any],
        backend: Any,
        resume: Any,
        keep_open: bool,
    ) -> None:
        self.function, self.items, self.backend, self.keep_open = function, items, backend, keep_open
        self.seed = options.get("seed")
        self.options = {k: v for k, v in options.items() if k != "seed"}
        self.usage, self.lock, self.stopped = Usage(), threading.Lock(), False
        self.running: set[Program] = set()
        self.path = None if resume is None else Path(resume)
        self.keys = [] if self.path is None else _keys(function, items, options)
        self.saved = {} if self.path is None else load(self.path)

    def restored(self, index: int) -> SavedState | None:
        return self.saved.get(self.keys[index]) if self.path is not None else None

    def begin(self, index: int) -> "tuple[State, dict[str, Any]]":
        seed = {} if self.seed is None else {"seed": derive_seed(self.seed, index)}
        program, arguments = self.function._open(self.backend, {**self.options, **seed, **self.items[index]})
        with self.lock:
            if self.stopped:
                raise Cancelled("the batch was stopped")
            self.running.add(program)
        return open_state(program), arguments

    def forget(self, program: Program) -> None:
        with self.lock:
            self.running.discard(program)

    def run(self, index: int) -> Result:
        try:
            state, arguments = self.begin(index)
            try:
                self.function._work(state, (), arguments)
                _settle(state)
                return self.end(index, state)
            finally:
                self.forget(state._program)
        except Exception as error:
            return Failure(index, self.items[index], error)

    async def run_async(self, index: int) -> Result:
        try:
            state, arguments = self.begin(index)
            try:
                await self.function._work_async(state, (), arguments)
                return self.end(index, state)
            finally:
                self.forget(state._program)
        except Exception as error:
            return Failure(index, self.items[index], error)

    def end(self, index: int, state: "State") -> "State":
        program = state._program
        with self.lock:
            self.usage.merge(program.usage())
            if self.path is not None:
                save(self.path, self.keys[index], index, state)
        if not self.keep_open:
            for open_one in program.open_states():
                open_one.close()
        return state

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            running, self.running = list(self.running), set()
        for program in running:
            program.abort(Cancelled("the batch was stopped"))


def _results(batch: _Batch, width: int, progress_bar: bool) -> Iterator[Result]:
    pool = _Loop(batch, width) if batch.function.is_async else _Threads(batch, width)
    progress = _Progress(batch, len(batch.items)) if progress_bar else None
    window: deque[tuple[int, Future[Result]]] = deque()
    todo = iter(range(len(batch.items)))
    complete = False
    try:
        while True:
            while len(window) < width * LOOK_AHEAD and (index := next(todo, None)) is not None:
                window.append((index, _submit(batch, pool, index, progress)))
            if not window:
                complete = True
                return
            if window[0][1].done():
                yield window.popleft()[1].result()
            else:
                concurrent.futures.wait([window[0][1]])
    finally:
        if not complete:
            batch.stop()
        pool.close()
        if progress is not None:
            progress.close()


def _submit(batch: _Batch, pool: "_Threads | _Loop", index: int, progress: "_Progress | None") -> "Future[Result]":
    if (restored := batch.restored(index)) is not None:
        future: Future[Result] = Future()
        future.set_result(restored)
    else:
        future = pool.submit(index)
    if progress is not None:
        future.add_done_callback(progress.step)
    return future


class _Threads:
    def __init__(self, batch: _Batch, width: int) -> None:
        self._batch = batch
        self._pool = Workers(max(1, width), "anabranch-batch")

    def submit(self, index: int) -> "Future[Result]":
        return self._pool.submit(contextvars.copy_context().run, self._batch.run, index)

    def close(self) -> None:
        self._pool.close()


class _Loop:
    """An event loop in a thread, running at most `width` programs at once."""

    def __init__(self, batch: _Batch, width: int) -> None:
        self._batch = batch
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(max(1, width))
        self._thread = threading.Thread(target=self._loop.run_forever, name="anabranch-batch", daemon=True)
        self._thread.start()

    def submit(self, index: int) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(self._one(index), self._loop)

    async def _one(self, index: int) -> Result:
        async with self._room:
            return await self._batch.run_async(index)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Progress:
    """A tqdm bar (also in notebooks) with the live hit rate and tokens per second."""

    def __init__(self, batch: _Batch, total: int) -> None:
        from tqdm.auto import tqdm

        self._batch, self._bar, self._began = batch, tqdm(total=total), time.monotonic()

    def step(self, _: object) -> None:
        with self._batch.lock:
            usage, seconds = self._batch.usage, max(1e-9, time.monotonic() - self._began)
            self._bar.set_postfix_str(f"{usage.hit_rate:.0%} cached, {usage.completion_tokens / seconds:.0f} tok/s")
            self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _width(num_threads: int | str, num_items: int) -> int:
    if num_threads == "auto":
        return max(1, min(AUTO_THREADS, num_items))
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f'num_threads must be "auto" or an integer >= 1, got {num_threads!r}')
    return num_threads


def _arguments(function: "Function", item: Any, index: int) -> dict[str, Any]:
    if isinstance(item, dict):
        return dict(item)
    names, required = function.arg_names, function._required
    if not isinstance(item, list | tuple):
        raise TypeError(f"item {index} of the batch must be a dict or a list of arguments, got {item!r}")
    if not len(required) <= len(item) <= len(names):
        takes = f"{function.__name__} takes {len(required)} to {len(names)}"
        raise TypeError(f"item {index} of the batch has {len(item)} arguments; {takes}")
    return dict(zip(names, item, strict=False))


def _keys(function: "Function", items: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[str]:
    """One key per item: what was run, with what, and the how-many-eth of equal items it is."""
    code = function.func.__code__
    program = [function.__qualname__, _code_digest(code)]
    seen: dict[str, int] = {}
    keys = []
    for i, item in enumerate(items):
        try:
            said = json.dumps([program, options, function.bind_arguments, item], sort_keys=True, ensure_ascii=False)
        except TypeError as error:
            raise TypeError(
                f"resume= needs arguments and options that JSON can hold; item {i} has others: {error}"
            ) from None
        digest = hashlib.sha256(said.encode()).hexdigest()[:32]
        keys.append(f"{digest}-{seen.setdefault(digest, 0)}")
        seen[digest] += 1
    return keys


def _code_digest(code: Any) -> str:
    """Changes when the function's body does."""
    constants = [_code_digest(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, constants, code.co_names)).encode()).hexdigest()
