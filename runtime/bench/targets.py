"""What a workload runs against. Here the embedded engine; servers are in `url_target.py`, peer processes in `pipe_target.py`."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from anabranch.runtime.engine import Engine
from anabranch.runtime.messages import GenerateParams, Grammar, Text

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer and its times in seconds since it was asked for. `arrivals`: when each piece of text came.

    asked      when that was, on the clock of `time.perf_counter`
    num_steps  forward steps that it took part in, and num_forced, output tokens that a grammar dictated; 0 where nobody says
    queue_s    from its arrival to when it was first scheduled; 0 where nobody says
    """

    text: str
    num_prompt: int
    num_output: int
    num_cached: int
    total: float
    arrivals: tuple[float, ...] = ()
    num_computed: int = 0
    asked: float = 0.0
    num_steps: int = 0
    num_forced: int = 0
    queue_s: float = 0.0

    @property
    def ttft(self) -> float:
        return self.arrivals[0] if self.arrivals else self.total

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds."""
        return (self.total - self.ttft) / max(self.num_output - 1, 1)


class Node(Protocol):
    """A context that can be extended, continued and forked."""

    def extend(self, text: str) -> None: ...

    def generate(self, max_tokens: int, *, temperature: float = 0.0, json_schema: Schema | None = None) -> "Future[Reply]":
        """Exactly `max_tokens` tokens; with a schema, a JSON text that fits it, of at most so many."""

    def fork(self, n: int) -> "list[Node]": ...

    def select(self, choices: list[str]) -> "Future[Reply]": ...

    def token_ids(self) -> list[int] | None:
        """All tokens so far; None where they cannot be had."""

    def close(self) -> None: ...


class Target(Protocol):
    """`is_remote`: another process computes, so that ours is only the client."""

    name: str
    is_remote: bool

    def open(self, seed: int = 0) -> Node: ...

    def pids(self) -> list[int]:
        """The processes that compute, apart from this one."""

    def computed_tokens(self) -> int | None:
        """Tokens that went through the model since it started; None where nobody counts them."""


class EmbeddedNode:
    def __init__(self, branch: Any) -> None:
        self._branch = branch

    def extend(self, text: str) -> None:
        self._branch.append([Text(text)])

    def generate(self, max_tokens: int, *, temperature: float = 0.0, json_schema: Schema | None = None) -> "Future[Reply]":
        asked, arrivals = time.perf_counter(), []
        params = GenerateParams(
            max_tokens=max_tokens, ignore_eos=json_schema is None, temperature=temperature,
            grammar=None if json_schema is None else Grammar("json_schema", orjson.dumps(json_schema).decode()),
        )  # fmt: skip
        inner = self._branch.generate(params, on_text=lambda _: arrivals.append(time.perf_counter() - asked))
        return then(inner, lambda g: reply_of(g, asked, tuple(arrivals)), self)

    def fork(self, n: int) -> "list[Node]":
        return [EmbeddedNode(child) for child in self._branch.fork(n)]

    def select(self, choices: list[str]) -> "Future[Reply]":
        asked = time.perf_counter()
        inner = self._branch.score(choices, "token_length_normalized", append=False)
        return then(inner, lambda s: Reply(choices[s.best], 0, 0, 0, time.perf_counter() - asked), self)

    def token_ids(self) -> list[int] | None:
        return list(self._branch.token_ids().result())

    def close(self) -> None:
        self._branch.close()


def usage_field(usage: Any, name: str) -> Any:
    return usage[name] if isinstance(usage, dict) else getattr(usage, name)


def reply_of(generation: Any, asked: float, arrivals: tuple[float, ...]) -> Reply:
    u = generation.usage
    return Reply(
        generation.text, usage_field(u, "prompt_tokens"), usage_field(u, "completion_tokens"), usage_field(u, "cached_tokens"),
        time.perf_counter() - asked, arrivals, usage_field(u, "computed_tokens"), asked, usage_field(u, "num_steps"),
        usage_field(u, "forced_tokens"), usage_field(u, "queue_ms") / 1000,
    )  # fmt: skip


def then(inner: "Future[Any]", convert: Any, node: Any) -> "Future[Reply]":
    """A future of `convert(result)`; converted on the thread that completes `inner`, so that times are not the reader's.

    `node` is held until then: a branch that nobody holds is released, and what runs on it ends.
    """
    outer: Future[Reply] = Future()

    def finish(done: "Future[Any]", _held: Any = node) -> None:
        try:
            outer.set_result(convert(done.result()))
        except BaseException as error:
            outer.set_exception(error)

    inner.add_done_callback(finish)
    return outer


class EmbeddedTarget:
    """An engine in this process."""

    name = "anabranch"
    is_remote = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def open(self, seed: int = 0) -> Node:
        return EmbeddedNode(self.engine.open(seed=seed))

    def pids(self) -> list[int]:
        return list(self.engine.pids().values())

    def computed_tokens(self) -> int | None:
        return int(self.engine.stats().result()["events"].get("planned_tokens", 0))
