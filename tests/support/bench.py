"""A target that computes nothing but counts as an engine with a perfect cache would, and a vocabulary of bytes."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from anabranch.runtime.bench.targets import Node, Reply, Schema

RECORD = {
    "name": "Ada", "age": 36, "occupation": "mathematician", "city": "London", "native_language": "English", "is_member": True,
}  # fmt: skip


class ByteVocabulary:
    """One token per byte."""

    def encode_plain(self, text: str, *, at_start: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class FakeTarget:
    """Answers at once, or when `release` is called if `is_held`. `caches`: whether it finds prefixes again.

    `seconds_per_token` is what it says of its time, not what it takes.
    """

    name = "fake"

    def __init__(
        self, *, caches: bool = True, is_remote: bool = False, is_held: bool = False, seconds_per_token: float = 0.001, record: Any = RECORD,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.caches, self.is_remote, self.is_held, self.seconds_per_token = caches, is_remote, is_held, seconds_per_token
        self.record, self.clock = record, clock
        self.prompts: list[bytes] = []
        self.open_nodes = 0
        self._seen: dict[int, Any] = {}
        self._num_computed = 0
        self._held: list[tuple[Future[Reply], Reply]] = []
        self._lock = threading.Lock()

    def open(self, seed: int = 0) -> Node:
        return FakeNode(self, [])

    def pids(self) -> list[int]:
        return []

    def computed_tokens(self) -> int | None:
        return self._num_computed

    def answer(self, ids: list[int], max_tokens: int, schema: Schema | None) -> tuple["Future[Reply]", list[int]]:
        with self._lock:
            cached = min(self._insert(ids, count=False), len(ids) - 1) if self.caches else 0
            text = json.dumps(self.record) if schema else "".join(chr(97 + (len(self.prompts) * 7 + i) % 26) for i in range(max_tokens))
            made = list(text.encode())
            whole = [*ids, *made]
            self._num_computed += len(whole) - 1 - (self._insert(whole[:-1], count=True) if self.caches else 0)
            self.prompts.append(bytes(ids))
        times = tuple(self.seconds_per_token * (i + 1) for i in range(len(made)))
        steps = max(len(made) // 2, 1) if schema else len(made)
        reply = Reply(
            text, len(ids), len(made), cached, times[-1], times, len(ids) - cached, self.clock(), steps, len(made) - steps, 0.001
        )
        future: Future[Reply] = Future()
        if self.is_held:
            self._held.append((future, reply))
        else:
            future.set_result(reply)
        return future, made

    def release(self) -> None:
        for future, reply in self._held:
            future.set_result(reply)
        self._held.clear()

    def _insert(self, ids: list[int], *, count: bool) -> int:
        """How many of the first tokens were seen before; with `count`, all of them are from now on."""
        node, known = self._seen, 0
        for i, token in enumerate(ids):
            if token in node:
                known += known == i
            elif count:
                node[token] = {}
            else:
                break
            node = node[token]
        return known


class FakeNode:
    def __init__(self, target: FakeTarget, ids: list[int]) -> None:
        self._target, self._ids = target, ids
        target.open_nodes += 1

    def extend(self, text: str) -> None:
        self._ids += text.encode()

    def generate(self, max_tokens: int, *, temperature: float = 0.0, json_schema: Schema | None = None) -> "Future[Reply]":
        future, made = self._target.answer(list(self._ids), max_tokens, json_schema)
        self._ids += made
        return future

    def fork(self, n: int) -> list[Node]:
        return [FakeNode(self._target, list(self._ids)) for _ in range(n)]

    def select(self, choices: list[str]) -> "Future[Reply]":
        future: Future[Reply] = Future()
        future.set_result(Reply(choices[0], 0, 0, 0, 0.002))
        return future

    def token_ids(self) -> list[int] | None:
        return list(self._ids)

    def close(self) -> None:
        self._target.open_nodes -= 1
