"""`@function`: a Python function over a state, runnable alone, in batches, streaming, inside others, sync or async."""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, overload

from anabranch.lang.backend import Backend
from anabranch.lang.options import take_options
from anabranch.lang.program import Program, as_backend, current_program, default_backend
from anabranch.lang.state import State

RUN_OPTIONS = ("seed", "timeout", "salt", "priority")


class Function:
    """A program. Its first parameter is the state; `run` gives the others, and options such as temperature or seed.

    A parameter of the program's own wins over an option of the same name.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters or parameters[0].kind not in (
            parameters[0].POSITIONAL_ONLY,
            parameters[0].POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"a program's first parameter is its state; {func.__name__} has none")
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens  # SGLang's, accepted: drafting belongs to the runtime here
        self.bind_arguments = dict(bound or {})
        self.is_async = inspect.iscoroutinefunction(func)
        self.arg_names = [p.name for p in parameters[1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._required = [p.name for p in parameters[1:] if p.default is p.empty and p.name in self.arg_names]
        self._open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        functools.update_wrapper(self, func)

    # ---------------------------------------------------------------- running

    def bind(self, **kwargs: Any) -> "Function":
        """The same program with some arguments given."""
        if unknown := [k for k in kwargs if k not in self.arg_names and not self._open_ended]:
            raise TypeError(
                f"{self.__name__} has no parameter {unknown[0]!r}; it has: {', '.join(self.arg_names) or 'none'}"
            )
        bound = {**self.bind_arguments, **kwargs}
        return Function(self.func, num_api_spec_tokens=self.num_api_spec_tokens, bound=bound)

    def run(
        self, *args: Any, backend: Any = None, stream: bool = False, use_thread: bool = True, **kwargs: Any
    ) -> State:
        """Run the program and wait until everything it generated is done. Raises the first cause of failure.

        Options: every one of `gen`'s sampling options as a default for the whole program (`max_new_tokens` or
        `max_tokens` 128, `temperature` 1.0 ...), `seed` (fixes every branch), `timeout` (seconds for the whole run),
        `salt`, `priority`. With `stream=True` it returns at once: the program goes on in a thread, and `text_iter`
        follows it. An `async def` program runs on an event loop of its own, also where another one is running already.
        """
        program, kwargs = self._open(backend, kwargs, stream=stream)
        state = open_state(program)
        if stream:
            self._in_background(state, args, kwargs)
            return state
        if self.is_async:
            run_coroutine(self._work_async(state, args, kwargs), program)
            return state
        self._work(state, args, kwargs)
        _settle(state)
        return state

    async def arun(self, *args: Any, backend: Any = None, **kwargs: Any) -> State:
        """`run` for async code; a sync program works in a thread meanwhile. Cancelling the task ends the program in
        the runtime.
        """
        program, kwargs = self._open(backend, kwargs)
        state = open_state(program)
        try:
            if self.is_async:
                await self._work_async(state, args, kwargs)
            else:
                await asyncio.to_thread(self._work, state, args, kwargs)
                await asyncio.to_thread(_settle, state)
        except BaseException as error:
            program.abort(error)
            raise
        return state

    @overload
    def __call__(self, state: State, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Given a state: run inline on it and return what the function returns. Otherwise: start a run and return
        its state.

        A started run is not waited for: reading a value waits, and raises if it failed; a program waits at its own
        end for those it started. An async program gives something to await, in both cases.
        """
        if args and isinstance(args[0], State):
            return self.func(*args, **{**self.bind_arguments, **kwargs})
        backend, stream = kwargs.pop("backend", None), kwargs.pop("stream", False)
        if self.is_async:
            return self.arun(*args, backend=backend, **kwargs)
        if stream:
            return self.run(*args, backend=backend, stream=True, **kwargs)
        program, kwargs = self._open(backend, kwargs)
        state = open_state(program)
        self._work(state, args, kwargs)
        if (outer := current_program.get()) is not None:
            outer.started.append(state)
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Any = None,
        resume: Any = None,
        on_error: str = "keep",
        keep_open: bool = False,
        **options: Any,
    ) -> Any:
        """Run the program once per item (a dict, or a list of arguments), at most `num_threads` at a time. See
        `batch.py`.
        """
        from anabranch.lang.batch import run_batch

        return run_batch(
            self, batch_kwargs, num_threads=num_threads, progress_bar=progress_bar, generator_style=generator_style,
            backend=backend, resume=resume, on_error=on_error, keep_open=keep_open, options=options,
        )  # fmt: skip

    def trace(self, *, backend: Any = None, **kwargs: Any) -> Any:
        """What the program does, without a model: its operations in order, arguments standing for themselves. See
        `dryrun.py`.
        """
        from anabranch.lang.dryrun import trace_function

        return trace_function(self, kwargs)

    def cache(self, backend: Any = None, *, seconds: float = 0.0) -> Any:
        """Compute the program's constant prefix now, so that every run finds it cached. See `dryrun.py`."""
        from anabranch.lang.dryrun import cache_function

        return cache_function(self, self._backend(backend), seconds=seconds)

    # ---------------------------------------------------------------- inside

    def _backend(self, backend: Any) -> Backend:
        if backend is not None:
            return as_backend(backend)
        outer = current_program.get()
        return outer.backend if outer is not None else default_backend()

    def _open(self, backend: Any, kwargs: dict[str, Any], *, stream: bool = False) -> tuple[Program, dict[str, Any]]:
        """The run's program, and the arguments that are the function's own."""
        kwargs = {**self.bind_arguments, **kwargs}
        run_options = {k: kwargs.pop(k) for k in RUN_OPTIONS if k in kwargs and k not in self.arg_names}
        options = take_options(kwargs, self.arg_names)
        outer = current_program.get()
        if outer is not None and run_options.get("seed") is None:
            run_options["seed"] = outer.next_seed()
        program = Program(
            self._backend(backend), options, name=self.__name__, stream=stream, is_async=self.is_async, **run_options
        )
        if outer is not None and outer.deadline is not None:
            program.deadline = min(outer.deadline, program.deadline or outer.deadline)
        return program, kwargs

    def _work(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the function. What it raises ends the run: its branches are released, and the error goes on."""
        program = state._program
        token = current_program.set(program)
        try:
            state.ret_value = self.func(state, *args, **kwargs)
            if program.thread is None:
                for started in program.started:
                    started.sync()
                program.started = []
        except BaseException as error:
            program.abort(error)
            raise
        finally:
            current_program.reset(token)

    async def _work_async(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        program = state._program
        token = current_program.set(program)
        limit = asyncio.timeout(program.timeout)
        try:
            async with limit:
                state.ret_value = await self.func(state, *args, **kwargs)
                for started in program.started:
                    await started
                program.started = []
                await state
            program.raise_unmet()
            program.finish()
        except BaseException as error:
            program.abort(error)
            if isinstance(error, TimeoutError) and limit.expired():
                raise TimeoutError(f"{self.__name__} did not finish within {program.timeout} s") from None
            raise
        finally:
            current_program.reset(token)

    def _in_background(self, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        program = state._program

        def work() -> None:
            try:
                if self.is_async:
                    asyncio.run(self._work_async(state, args, kwargs))
                else:
                    self._work(state, args, kwargs)
                    for started in program.started:
                        started.sync()
                    program.raise_unmet()
            except BaseException as error:
                program.abort(error)  # met by the reader: text_iter, sync and every value raise it
            finally:
                program.finish()

        context = contextvars.copy_context()
        program.thread = threading.Thread(
            target=context.run, args=(work,), name=f"anabranch-{self.__name__}", daemon=True
        )
        program.thread.start()

    def __repr__(self) -> str:
        return f"<anabranch function {self.__name__}({', '.join(self.arg_names)})>"


def _settle(state: State) -> None:
    program = state._program
    try:
        state.sync()
        program.raise_unmet()
    except BaseException as error:
        program.abort(error)
        raise
    program.finish()


def open_state(program: Program) -> State:
    branch = program.backend.open(
        seed=program.seed, salt=program.salt, program=program.label, priority=program.priority
    )
    return State(program, branch, program.root)


def new_state(*, backend: Any = None, name: str = "", stream: bool = False, **options: Any) -> State:
    """A state outside of any function, as in a notebook: `s = ab.state(); s += "..."`. Takes the options of `run`."""
    run_options = {k: options.pop(k) for k in RUN_OPTIONS if k in options}
    sampling = take_options(options)
    if options:
        raise TypeError(f"state() has no option {next(iter(options))!r}")
    chosen = default_backend() if backend is None else as_backend(backend)
    return open_state(Program(chosen, sampling, name=name or "state", **run_options))


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is a state. Used bare or with arguments."""
    if func is not None:
        return Function(func, num_api_spec_tokens=num_api_spec_tokens)
    return lambda f: Function(f, num_api_spec_tokens=num_api_spec_tokens)


def run_coroutine(work: Coroutine[Any, Any, Any], program: Program) -> Any:
    """Run to the end from sync code: on a loop of its own here, or in a thread where a loop is running (a notebook)."""
    if asyncio._get_running_loop() is None:
        return asyncio.run(work)
    results: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target,), name="anabranch-async", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException as error:  # an interrupt: end the program, and let it say so
        program.abort(error)
        thread.join(5)
        raise
    if errors:
        raise errors[0]
    return results[0]
