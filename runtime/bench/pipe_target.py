"""A peer process that speaks `peer_openvino.py`'s JSON lines. Token ids in and out: both sides compute the same tokens."""

import subprocess
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

import orjson

from anabranch.runtime.bench.children import Child
from anabranch.runtime.bench.targets import Node, Reply, Schema
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

READY_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0


class PipeTarget:
    """Starts `command` and waits until it is ready. Raises RuntimeError if it ends before."""

    is_remote = True

    def __init__(self, name: str, command: list[str], vocabulary: Vocabulary, *, is_tied: bool = True) -> None:
        self.name, self.vocabulary = name, vocabulary
        self._ids = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Answer] = {}
        self.started = time.perf_counter()
        self.child = Child(command, is_tied=is_tied, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ready: Future[None] = Future()
        self._reader = threading.Thread(target=self._read, daemon=True, name="bench-peer")
        self._reader.start()
        try:
            self._ready.result(READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def open(self, seed: int = 0) -> Node:
        return _PipeNode(self)

    def pids(self) -> list[int]:
        return [self.child.pid]

    def computed_tokens(self) -> int | None:
        return None

    def ask(self, token_ids: list[int], max_tokens: int, temperature: float, schema: Schema | None) -> "Future[_Told]":
        number = next(self._ids)
        answer = self._waiting[number] = _Answer(len(token_ids))
        fields = {"id": number, "token_ids": token_ids, "max_tokens": max_tokens, "temperature": temperature, "json_schema": schema}
        line = orjson.dumps(fields)
        with self._lock:
            assert self.child.process.stdin is not None
            self.child.process.stdin.write(line + b"\n")
            self.child.process.stdin.flush()
        return answer.future

    def _read(self) -> None:
        assert self.child.process.stdout is not None
        for line in self.child.process.stdout:
            if not line.startswith(b"{"):
                continue
            event = orjson.loads(line)
            if "ready" in event:
                self._ready.set_result(None)
            elif "done" in event:
                self._waiting.pop(event["id"]).finish(self.vocabulary)
            else:
                self._waiting[event["id"]].add(event["token_ids"])
        lost = RuntimeError(f"{self.name} ended with exit code {self.child.process.wait()}")
        waiting: list[Future[Any]] = [self._ready, *(a.future for a in self._waiting.values())]
        for future in waiting:
            if not future.done():
                future.set_exception(lost)

    def close(self) -> None:
        """End of input ends it by itself; if it does not, it is ended."""
        self.child.resume()
        assert self.child.process.stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            self.child.process.stdin.close()
            self.child.process.wait(END_TIMEOUT_S)
        if self.child.is_alive:
            self.child.process.kill()
        self._reader.join()
        self.child.end()


_Told = tuple[Reply, list[int]]


class _Answer:
    def __init__(self, num_prompt: int) -> None:
        self.num_prompt, self.asked = num_prompt, time.perf_counter()
        self.ids: list[int] = []
        self.arrivals: list[float] = []
        self.future: Future[_Told] = Future()

    def add(self, ids: list[int]) -> None:
        self.ids += ids
        self.arrivals += [time.perf_counter() - self.asked] * len(ids)

    def finish(self, vocabulary: Vocabulary) -> None:
        text = b"".join(vocabulary.token_bytes(i) for i in self.ids).decode("utf-8", "replace")
        total = time.perf_counter() - self.asked
        reply = Reply(text, self.num_prompt, len(self.ids), 0, total, tuple(self.arrivals), self.num_prompt, self.asked)
        self.future.set_result((reply, self.ids))


class _PipeNode:
    def __init__(self, target: PipeTarget, ids: list[int] | None = None) -> None:
        self._target = target
        self._ids = list(ids or ())
        self._open: list[Future[_Told]] = []

    def _settle(self) -> list[int]:
        for future in self._open:
            self._ids += future.result()[1]
        self._open.clear()
        return self._ids

    def extend(self, text: str) -> None:
        self._ids = self._settle() + self._target.vocabulary.encode_plain(text, at_start=not self._ids)

    def generate(self, max_tokens: int, *, temperature: float = 0.0, json_schema: Schema | None = None) -> "Future[Reply]":
        inner = self._target.ask(self._settle(), max_tokens, temperature, json_schema)
        self._open.append(inner)
        outer: Future[Reply] = Future()
        inner.add_done_callback(
            lambda f: outer.set_exception(f.exception()) if f.exception() else outer.set_result(f.result()[0])
        )
        return outer

    def fork(self, n: int) -> list[Node]:
        return [_PipeNode(self._target, self._settle()) for _ in range(n)]

    def select(self, choices: list[str]) -> "Future[Reply]":
        raise NotImplementedError(f"{self._target.name} does not score choices")

    def token_ids(self) -> list[int] | None:
        return list(self._settle())

    def close(self) -> None:
        self._open.clear()
