"""Any OpenAI-compatible server as a target. Text goes in and out, so that the server's tokenizer and its HTTP are part of what is measured."""

import http.client
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import orjson

from anabranch.runtime.bench.targets import Node, Reply, Schema

MAX_IN_FLIGHT = 1024  # threads are made as they are needed: an open loop must never wait for one


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

    def generate(self, max_tokens: int, *, temperature: float = 0.0, json_schema: Schema | None = None) -> "Future[Reply]":
        body = {"prompt": self._settled(), "max_tokens": max_tokens, "temperature": temperature}
        if json_schema is not None:
            body |= constraint(json_schema)
        future = self.target.pool.submit(self.target.complete, body, time.perf_counter())
        self.answers.append(future)
        return future

    def fork(self, n: int) -> "list[Node]":
        return [UrlNode(self.target, self._settled()) for _ in range(n)]

    def select(self, choices: list[str]) -> "Future[Reply]":
        raise NotImplementedError("select has no counterpart in the OpenAI API")

    def token_ids(self) -> list[int] | None:
        return None

    def close(self) -> None:
        self.answers.clear()


def constraint(schema: Schema) -> dict[str, Any]:
    """A JSON schema as servers understand it: vLLM and SGLang read `response_format`, llama.cpp's completions `json_schema`."""
    return {
        "ignore_eos": False, "json_schema": schema,
        "response_format": {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}},
    }  # fmt: skip


class UrlTarget:
    """An OpenAI-compatible server: /v1/completions, streamed. One connection per request in flight."""

    is_remote = True

    def __init__(
        self,
        base_url: str,
        *,
        name: str = "",
        model: str = "",
        api_key: str = "",
        extra: dict[str, Any] | None = None,
        pids: Callable[[], list[int]] = list,
    ) -> None:
        self.url = urllib.parse.urlsplit(base_url)
        if self.url.scheme != "http" or not self.url.hostname:
            raise ValueError(f"base url must look like http://host:port, got {base_url!r}")
        self.name, self.model, self.key, self.extra = name or base_url, model, api_key, extra or {}
        self.pids = pids
        self.pool = ThreadPoolExecutor(MAX_IN_FLIGHT, thread_name_prefix="bench-url")

    def open(self, seed: int = 0) -> Node:
        return UrlNode(self)

    def computed_tokens(self) -> int | None:
        return None

    def complete(self, fields: dict[str, Any], asked: float) -> Reply:
        """One request. Times count from `asked`, so that waiting for a thread or a connection is part of them."""
        body = {
            "model": self.model, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}, **self.extra, **fields,
        }  # fmt: skip
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        connection = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=600)
        try:
            connection.request("POST", self.url.path.rstrip("/") + "/v1/completions", orjson.dumps(body), headers)
            with connection.getresponse() as response:
                return self._read(response, asked)
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
            if "error" in event:
                raise RuntimeError(f"{self.name} answered {event['error']!r}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                if choice.get("text"):
                    pieces.append(choice["text"])
                    arrivals.append(time.perf_counter() - asked)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt, total = usage.get("prompt_tokens", 0), time.perf_counter() - asked
        num_output = usage.get("completion_tokens", len(pieces))
        return Reply("".join(pieces), prompt, num_output, cached, total, tuple(arrivals), prompt - cached, asked)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
