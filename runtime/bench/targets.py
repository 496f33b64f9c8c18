"""What a workload runs against: the embedded engine, or any OpenAI-compatible server. Both take the same text."""

import http.client
import time
import urllib.parse
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from anabranch.runtime.engine import Engine
from anabranch.runtime.messages import GenerateParams, Text


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer and its times in seconds since it was asked for. `arrivals`: when each piece of text came."""

    text: str
    num_prompt: int
    num_output: int
    num_cached: int
    total: float
    arrivals: tuple[float, ...] = ()
    num_computed: int = 0

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

    def generate(self, max_tokens: int, *, temperature: float = 0.0) -> "Future[Reply]": ...

    def fork(self, n: int) -> "list[Node]": ...

    def select(self, choices: list[str]) -> "Future[Reply]": ...

    def close(self) -> None: ...


class Target(Protocol):
    name: str

    def open(self, seed: int = 0) -> Node: ...


class EmbeddedNode:
    def __init__(self, branch: Any) -> None:
        self._branch = branch

    def extend(self, text: str) -> None:
        self._branch.append([Text(text)])

    def generate(self, max_tokens: int, *, temperature: float = 0.0) -> "Future[Reply]":
        asked, arrivals = time.perf_counter(), []
        params = GenerateParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature)
        inner = self._branch.generate(params, on_text=lambda _: arrivals.append(time.perf_counter() - asked))
        return then(inner, lambda g: reply_of(g, time.perf_counter() - asked, tuple(arrivals)), self)

    def fork(self, n: int) -> "list[Node]":
        return [EmbeddedNode(child) for child in self._branch.fork(n)]

    def select(self, choices: list[str]) -> "Future[Reply]":
        asked = time.perf_counter()
        inner = self._branch.score(choices, "token_length_normalized", append=False)
        return then(inner, lambda s: Reply(choices[s.best], 0, 0, 0, time.perf_counter() - asked), self)

    def close(self) -> None:
        self._branch.close()


def usage_field(usage: Any, name: str) -> int:
    return int(usage[name] if isinstance(usage, dict) else getattr(usage, name))


def reply_of(generation: Any, total: float, arrivals: tuple[float, ...]) -> Reply:
    u = generation.usage
    return Reply(
        generation.text, usage_field(u, "prompt_tokens"), usage_field(u, "completion_tokens"), usage_field(u, "cached_tokens"),
        total, arrivals, usage_field(u, "computed_tokens"),
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

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def open(self, seed: int = 0) -> Node:
        return EmbeddedNode(self.engine.open(seed=seed))


@dataclass(slots=True)
class UrlNode:
    """A text context kept by the client, which sends all of it with each request."""

    target: "UrlTarget"
    text: str = ""
    answers: list["Future[Reply]"] = field(default_factory=list)

    def _settled(self) -> str:
        """The text so far, with the answers that were asked for filled in."""
        self.text += "".join(answer.result().text for answer in self.answers)
        self.answers.clear()
        return self.text

    def extend(self, text: str) -> None:
        self.text = self._settled() + text

    def generate(self, max_tokens: int, *, temperature: float = 0.0) -> "Future[Reply]":
        future = self.target.pool.submit(self.target.complete, self._settled(), max_tokens, temperature)
        self.answers.append(future)
        return future

    def fork(self, n: int) -> "list[Node]":
        return [UrlNode(self.target, self._settled()) for _ in range(n)]

    def select(self, choices: list[str]) -> "Future[Reply]":
        raise NotImplementedError("select has no counterpart in the OpenAI API")

    def close(self) -> None:
        self.answers.clear()


class UrlTarget:
    """An OpenAI-compatible server: /v1/completions, streamed. One connection per request in flight, at most `concurrency`."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str = "",
        concurrency: int = 32,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.url = urllib.parse.urlsplit(base_url)
        if self.url.scheme != "http" or not self.url.hostname:
            raise ValueError(f"base url must look like http://host:port, got {base_url!r}")
        self.name, self.model, self.key, self.extra = base_url, model, api_key, extra or {}
        self.pool = ThreadPoolExecutor(concurrency, thread_name_prefix="bench-url")

    def open(self, seed: int = 0) -> Node:
        return UrlNode(self)

    def complete(self, prompt: str, max_tokens: int, temperature: float) -> Reply:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}, **self.extra,
        }  # fmt: skip
        asked = time.perf_counter()
        connection = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=600)
        try:
            headers = {
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {self.key}"} if self.key else {}),
            }
            connection.request("POST", self.url.path.rstrip("/") + "/v1/completions", orjson.dumps(body), headers)
            return self._read(connection.getresponse(), asked)
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, asked: float) -> Reply:
        if response.status != 200:
            raise RuntimeError(f"{self.name} answered {response.status}: {response.read(2000)!r}")
        pieces: list[str] = []
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            event = orjson.loads(line[5:])
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                if choice.get("text"):
                    pieces.append(choice["text"])
                    arrivals.append(time.perf_counter() - asked)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt = usage.get("prompt_tokens", 0)
        total = time.perf_counter() - asked
        return Reply(
            "".join(pieces),
            prompt,
            usage.get("completion_tokens", len(pieces)),
            cached,
            total,
            tuple(arrivals),
            prompt - cached,
        )
