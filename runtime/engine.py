"""The engine as people use it: embedded in this process, in processes of its own, or somebody else's by address."""

from __future__ import annotations

import asyncio
import json
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

from anabranch.runtime import config as settings
from anabranch.runtime.client import BranchHandle, Carrier, Client, Explanation, Generation, Method, Scores, to_params
from anabranch.runtime.config import (
    CacheConfig,
    DebugConfig,
    EngineConfig,
    LimitsConfig,
    SchedulerConfig,
    WorkerConfig,
)
from anabranch.runtime.errors import ConfigError, InvalidRequest
from anabranch.runtime.inprocess import EmbeddedCarrier, EngineThread
from anabranch.runtime.messages import (
    ControlText,
    Error,
    GenerateParams,
    Grammar,
    Hello,
    RoleBegin,
    RoleEnd,
    Text,
    Tokens,
)
from anabranch.runtime.remote import Door, RemoteCarrier
from anabranch.runtime.supervisor import Supervisor
from anabranch.runtime.tokenizer.chat_messages import normalize_messages
from anabranch.runtime.tokenizer.validation import check_ids, milliseconds, refuse

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
START_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `usage` has the fields of `messages.Usage`; `choices` holds all answers when n > 1, this one first."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched: str | int | None
    usage: dict[str, Any]
    logprobs: Any = None
    prompt_logprobs: Any = None
    choices: tuple[Completion, ...] = ()


def _completion(g: Generation) -> Completion:
    return Completion(g.text, g.token_ids, g.finish_reason, g.matched, g.usage, g.logprobs, g.prompt_logprobs)


class Engine:
    """A model, its KV cache, and branches on it. Close it, or let the process end: both release everything.

    model        "default" (SmolLM2-135M-Instruct), a directory with safetensors, or a .gguf file; SGLang's name for it: model_path
    mode         "inprocess": one thread of this process; "processes": three processes over private sockets; "auto": see
                 docs/decisions
    tokenizer    another model's directory or file to take the tokenizer and chat template from
    chat_template  a Jinja file, instead of the model's own template
    page_size    tokens per KV page;  num_pages  None: what memory allows
    max_slots    requests that run at once;  tokens_per_step  budget of one forward
    backend      "auto", "cpu", "reference";  precision  "fast" or "exact" (activations are not rounded)
    kv_dtype     "auto" (int16 on the CPU), "f32", "f16", "bf16", "int16", "int8"
    Raises       ConfigError, EngineStartError with the cause
    """

    _supervisor: Supervisor | None = None

    def __init__(
        self,
        model: str | None = None,
        *,
        model_path: str | None = None,
        mode: settings.Mode | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        cache: bool = True,
        eviction: str = "lru",
        max_slots: int = 32,
        tokens_per_step: int = 512,
        backend: settings.BackendName = "auto",
        kv_dtype: settings.KVDtype = "auto",
        precision: settings.Precision = "fast",
        num_threads: int | None = None,
        context_length: int | None = None,
        listen: bool = False,
        limits: LimitsConfig | None = None,
        debug: DebugConfig | int | None = None,
        start_timeout: float = START_TIMEOUT_S,
    ) -> None:
        if model is not None and model_path is not None:
            raise ConfigError(f"model and model_path are one setting: give one of {model!r} and {model_path!r}")
        model = model if model is not None else model_path
        level = settings.debug_level()
        if not isinstance(debug, DebugConfig):
            debug = DebugConfig(level=level if debug is None else debug)
        config = EngineConfig(
            model=str(model) if model is not None else settings.default_model(),
            tokenizer=tokenizer,
            chat_template=str(chat_template) if chat_template is not None else None,
            mode=mode or settings.default_mode(),
            cache=CacheConfig(page_size=page_size, num_pages=num_pages, enabled=cache, policy=eviction),
            scheduler=SchedulerConfig(max_slots=max_slots, tokens_per_step=max(tokens_per_step, max_slots)),
            worker=WorkerConfig(
                backend=backend, kv_dtype=kv_dtype, precision=precision, context_length=context_length,
                num_threads=num_threads if num_threads is not None else settings.default_num_threads(),
            ),
            limits=limits or LimitsConfig(),
            debug=debug,
            listen=listen,
            start_timeout_s=start_timeout,
        )  # fmt: skip
        self._start(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An engine from a whole configuration."""
        engine = cls.__new__(cls)
        engine._start(config)
        return engine

    @classmethod
    def connect(cls, address: str) -> Self:
        """A further client of an engine that another process of this user runs with `listen=True`: its `address`."""
        engine = cls.__new__(cls)
        engine.config, engine.address = None, address
        client = Client()
        engine._adopt(client, RemoteCarrier(address, client), None)
        return engine

    def _start(self, config: EngineConfig) -> None:
        mode = "inprocess" if config.mode == "auto" else config.mode
        config = replace(config, mode=mode)
        client = Client()
        self.config: EngineConfig | None = config
        if mode == "inprocess":
            thread = EngineThread(config)
            thread.start()
            door = Door(thread, config.limits) if config.listen else None
            self.address = door.address if door is not None else ""
            carrier: Carrier = EmbeddedCarrier(thread, client)
            self._adopt(client, carrier, lambda timeout_s: _end(thread, door, timeout_s))
        else:
            self._supervisor = supervisor = Supervisor(config)
            self.address = supervisor.start()
            carrier = RemoteCarrier(self.address, client, lost=lambda: _why(supervisor))
            self._adopt(client, carrier, supervisor.stop)

    def _adopt(self, client: Client, carrier: Carrier, stop: Callable[[float], Any] | None) -> None:
        """Say hello. `stop` ends what this engine started, within so many seconds."""
        self._client = client
        client.connect(carrier)
        self._finalizer = weakref.finalize(self, _shut, client, stop)
        client.send(Hello())
        try:
            client.welcome.result(START_TIMEOUT_S)
        except BaseException:  # an interrupt, too: nothing may stay behind
            self.close()
            raise

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Fail what is open, release everything, end what this engine started. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def pids(self) -> dict[str, int]:
        """The processes of this engine by stage; none if it runs in this process, or is somebody else's."""
        return self._supervisor.pids() if self._supervisor is not None else {}

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive or self._client.is_lost

    # ------------------------------------------------------------ the Backend protocol of the language

    def open(self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0) -> BranchHandle:
        return self._client.open(seed=seed, salt=salt, program=program, priority=priority, owner=self)

    def new_program(self) -> int:
        return self._client.new_program()

    def cancel_program(self, program: int) -> None:
        self._client.cancel_program(program)

    def stats(self, *, check: bool = False) -> Future[dict[str, Any]]:
        """Pages free, cached, locked and in use; slots, queues, records, hits, preemptions, step times."""
        return self._client.stats(check=check)

    def flush_cache(self) -> Future[None]:
        return self._client.flush_cache()

    def info(self) -> dict[str, Any]:
        return self._client.info()

    # ------------------------------------------------------------ calls

    def tokenize(self, text: str) -> list[int]:
        return _wait(self._client.tokenize([Text(text)]))

    def generate(self, prompt: Prompt | Sequence[Prompt], *, n: int = 1, seed: int | None = None, **params: Any) -> Any:
        """Complete a prompt (text, or token ids), or each of a list of prompts, all at once.

        `params` are the fields of `GenerateParams`, with `regex`, `json_schema`, `choices` or `grammar` as constraint and `timeout` in
        seconds. With n > 1 the prompt is computed once and forked.

        Returns  Completion, or a list in the order of the prompts
        Raises   InvalidRequest and other RequestErrors, EngineLost
        """
        if _is_many(prompt):
            started = [self._start_generation(p, n, seed, params) for p in prompt]  # type: ignore[arg-type]
            return [_gather(branches, futures) for branches, futures in started]
        return _gather(*self._start_generation(prompt, n, seed, params))  # type: ignore[arg-type]

    async def agenerate(self, prompt: Prompt, *, n: int = 1, seed: int | None = None, **params: Any) -> Completion:
        """`generate` for asyncio; cancelling the task cancels the request."""
        held, futures = self._start_generation(prompt, n, seed, params)
        try:
            return _first_of(await asyncio.gather(*(asyncio.wrap_future(f) for f in futures)))
        finally:
            for branch in held:
                branch.close()

    def stream(self, prompt: Prompt, *, seed: int | None = None, **params: Any) -> Iterator[str]:
        """Pieces of text as they settle. Closing the iterator cancels the request."""
        request = to_request(params)
        return _pieces(self._prompted(prompt, seed), request, close=True)

    def stream_chat(self, messages: Messages, *, seed: int | None = None, **params: Any) -> Iterator[str]:
        """The answer to a conversation, in pieces."""
        request = to_request(params)
        return _pieces(self._conversed(messages, seed), request, close=True)

    def conversation(self, *, system: str | None = None, seed: int | None = None) -> Conversation:
        """A chat that grows: each turn computes only what is new."""
        return Conversation(self.open(seed=seed), system)

    async def astream(self, prompt: Prompt, *, seed: int | None = None, **params: Any) -> AsyncIterator[str]:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def put(piece: str | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        branch = self._prompted(prompt, seed)
        future = branch.generate(to_request(params), put)
        future.add_done_callback(lambda _: put(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            future.result()
        finally:
            future.cancel()
            branch.close()

    def chat(self, messages: Messages, *, n: int = 1, seed: int | None = None, **params: Any) -> Completion:
        """Answer a conversation of {"role", "content"} messages, in the model's own chat template. Content is text, or a list of text parts."""
        return _gather(*_generations(self._conversed(messages, seed), n, params))

    def _conversed(self, messages: Messages, seed: int | None) -> BranchHandle:
        segments: list[Any] = []
        for i, message in enumerate(normalize_messages(messages)):
            for name in ("tool_calls", "tool_call_id", "function_call"):
                if name in message:
                    where = f"messages[{i}].{name}"
                    raise InvalidRequest(f"{where} is not supported here: write the call and its result as text", param=where)
            segments += [RoleBegin(message["role"]), Text(message["content"]), RoleEnd()]
        branch = self.open(seed=seed)
        branch.append([*segments, RoleBegin("assistant")])
        return branch

    def score(self, prompt: Prompt, choices: Sequence[str], method: Method = "token_length_normalized") -> Scores:
        """Log-likelihood of each choice after the prompt, in one forward."""
        branch = self._prompted(prompt, 0)
        try:
            return _wait(branch.score(choices, method, append=False))
        finally:
            branch.close()

    def explain(self, prompt: Prompt) -> Explanation:
        """What of this prompt is cached now."""
        branch = self._prompted(prompt, 0)
        try:
            return _wait(branch.explain())
        finally:
            branch.close()

    def _prompted(self, prompt: Prompt, seed: int | None) -> BranchHandle:
        segment = ControlText(prompt) if isinstance(prompt, str) else Tokens(check_ids(prompt, "prompt"))
        branch = self.open(seed=seed)
        branch.append([segment])
        return branch

    def _start_generation(
        self, prompt: Prompt, n: int, seed: int | None, params: dict[str, Any]
    ) -> tuple[list[BranchHandle], list[Future[Generation]]]:
        return _generations(self._prompted(prompt, seed), n, params)


class Conversation:
    """A chat on one branch of the engine."""

    def __init__(self, branch: BranchHandle, system: str | None) -> None:
        self._branch = branch
        if system:
            branch.append([RoleBegin("system"), Text(system), RoleEnd()])

    def say(self, text: str, **params: Any) -> Iterator[str]:
        """A user's turn; yields the assistant's answer in pieces, and closes its turn, also where the answer is broken off."""
        request = to_request(params)
        self._branch.append([RoleBegin("user"), Text(text), RoleEnd(), RoleBegin("assistant")])
        try:
            yield from _pieces(self._branch, request, close=False)
        finally:
            self._branch.append([RoleEnd()])


def _pieces(branch: BranchHandle, request: GenerateParams, *, close: bool) -> Iterator[str]:
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    future = branch.generate(request, pieces.put)
    future.add_done_callback(lambda _: pieces.put(None))
    try:
        while (piece := pieces.get()) is not None:
            yield piece
        future.result()
    finally:
        future.cancel()
        if close:
            branch.close()


def _generations(
    branch: BranchHandle, n: int, params: dict[str, Any]
) -> tuple[list[BranchHandle], list[Future[Generation]]]:
    request = to_request(params)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 256:
        raise refuse("n", n, "an integer in 1..256")
    branches = [branch] if n == 1 else [branch, *branch.fork(n)]
    return branches, [b.generate(request) for b in branches[-n:]]


def to_request(params: dict[str, Any]) -> GenerateParams:
    """GenerateParams from keyword arguments; unknown names are refused by name."""
    fields = {name: value for name, value in params.items() if value is not None}
    constraints: list[Grammar] = []
    for kind in ("regex", "json_schema", "ebnf", "lark", "choices"):
        if (source := fields.pop(kind, None)) is not None:
            constraints.append(Grammar(kind, _source(kind, source)))
    if (grammar := fields.pop("grammar", None)) is not None:
        constraints.append(grammar)
    if len(constraints) > 1:
        raise ConfigError("give one constraint (regex, json_schema, ebnf, lark, choices or grammar), not several")
    if (timeout := fields.pop("timeout", None)) is not None:
        fields["timeout_ms"] = milliseconds(timeout)
    known = [name for name in GenerateParams.__struct_fields__ if name != "stream"]  # `stream` is a call of its own
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(f"unknown parameter {unknown[0]!r}; known are {', '.join(known)}")
    for name in ("stop", "stop_regex", "stop_token_ids"):
        if isinstance(fields.get(name), str | int):
            fields[name] = (fields[name],)
    return to_params(GenerateParams(**fields, grammar=next(iter(constraints), None)), stream=False)


def _source(kind: str, source: Any) -> str:
    """The text of a constraint; a schema, or a list of choices, may come as Python data."""
    if isinstance(source, str):
        return source
    if kind not in ("json_schema", "choices"):
        raise refuse(kind, source, "a string")
    try:
        return json.dumps(source, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as fault:
        raise InvalidRequest(f"{kind} cannot be written as JSON: {fault}", param=kind) from None


def _is_many(prompt: Prompt | Sequence[Prompt]) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    return is_list and len(prompt) > 0 and not isinstance(prompt[0], int | float)


def _gather(branches: list[BranchHandle], futures: list[Future[Generation]]) -> Completion:
    try:
        return _first_of([_wait(future) for future in futures])
    finally:
        for branch in branches:
            branch.close()


def _first_of(answers: Sequence[Generation]) -> Completion:
    completions = tuple(map(_completion, answers))
    return completions[0] if len(completions) == 1 else replace(completions[0], choices=completions)


def _wait(future: Future[Any]) -> Any:
    """The result; an interrupt cancels the operation."""
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


def _end(thread: EngineThread, door: Door | None, timeout_s: float) -> None:
    if door is not None:
        door.close()
    thread.stop(timeout_s)


def _why(supervisor: Supervisor) -> Error | None:
    """The supervisor learns of a death about when its clients do: give it a moment."""
    supervisor.died.wait(2.0)
    return supervisor.error


def _shut(client: Client, stop: Callable[[float], Any] | None) -> None:
    client.close()
    if stop is not None:
        stop(CLOSE_TIMEOUT_S)


__all__ = ["Completion", "Engine"]
