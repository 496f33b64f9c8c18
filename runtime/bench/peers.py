"""Peers in virtual environments of their own, measured in turn with ours on the same weights and the same token ids."""

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from anabranch.runtime.bench.figures import Figure
from anabranch.runtime.bench.targets import Node, Reply, Target
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.workloads import WORKLOADS
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

EXPORT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


def run(*command: str | Path) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run([str(c) for c in command], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def venv(folder: Path) -> Path:
    """A virtual environment's python; made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    return python


def set_up_openvino(home: Path, gguf: Path) -> tuple[Path, Path]:
    """(python, model directory) of OpenVINO GenAI with int8 weights made from the same GGUF file. Minutes the first time.

    The exporter and the runtime need different versions of the same packages, hence two environments.
    """
    home.mkdir(parents=True, exist_ok=True)
    model, weights = home / "openvino-int8", home / "float"
    python = venv(home / "openvino-genai")
    if not (home / "openvino-genai" / ".ready").exists():
        run(python, "-m", "pip", "install", "--quiet", "openvino-genai==2026.4.1.0")
        (home / "openvino-genai" / ".ready").touch()
    if not (model / "openvino_model.bin").exists():
        exporter = venv(home / "openvino-export")
        run(exporter, "-m", "pip", "install", "--quiet", "torch==2.13.0")
        pin = home / "constraints.txt"
        pin.write_text("torch==2.13.0\n")
        run(exporter, "-m", "pip", "install", "--quiet", "-c", pin, "optimum-intel==2.2.0", "nncf", "openvino",
            "openvino-tokenizers", "gguf", "accelerate")  # fmt: skip
        run(exporter, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")  # it breaks the exporter
        run(exporter, "-c", EXPORT, gguf.parent, gguf.name, weights)
        run(exporter.with_name("optimum-cli"), "export", "openvino", "-m", weights, "--task", "text-generation-with-past",
            "--weight-format", "int8", model)  # fmt: skip
    return python, model


class PipeTarget:
    """A peer process that speaks `peer_openvino.py`'s JSON lines. Token ids in and out: both sides compute the same tokens."""

    def __init__(self, name: str, command: list[str], vocabulary: Vocabulary) -> None:
        self.name, self.vocabulary = name, vocabulary
        self._ids = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Answer] = {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._ready: Future[None] = Future()
        threading.Thread(target=self._read, daemon=True, name="bench-peer").start()
        self._ready.result(300)

    def open(self, seed: int = 0) -> Node:
        return _PipeNode(self)

    def ask(self, token_ids: list[int], max_tokens: int, temperature: float) -> "Future[tuple[Reply, list[int]]]":
        number = next(self._ids)
        answer = self._waiting[number] = _Answer(len(token_ids))
        line = orjson.dumps(
            {"id": number, "token_ids": token_ids, "max_tokens": max_tokens, "temperature": temperature}
        )
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        return answer.future

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith(b"{"):
                continue
            event = orjson.loads(line)
            if "ready" in event:
                self._ready.set_result(None)
            elif "done" in event:
                self._waiting.pop(event["id"]).finish(self.vocabulary)
            else:
                self._waiting[event["id"]].add(event["token_ids"])
        lost = RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")
        waiting: list[Future[Any]] = [self._ready, *(a.future for a in self._waiting.values())]
        for future in waiting:
            if not future.done():
                future.set_exception(lost)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class _Answer:
    def __init__(self, num_prompt: int) -> None:
        self.num_prompt, self.asked = num_prompt, time.perf_counter()
        self.ids: list[int] = []
        self.arrivals: list[float] = []
        self.future: Future[tuple[Reply, list[int]]] = Future()

    def add(self, ids: list[int]) -> None:
        self.ids += ids
        self.arrivals += [time.perf_counter() - self.asked] * len(ids)

    def finish(self, vocabulary: Vocabulary) -> None:
        text = b"".join(vocabulary.token_bytes(i) for i in self.ids).decode("utf-8", "replace")
        total = time.perf_counter() - self.asked
        self.future.set_result(
            (Reply(text, self.num_prompt, len(self.ids), 0, total, tuple(self.arrivals), self.num_prompt), self.ids)
        )


class _PipeNode:
    def __init__(self, target: PipeTarget, ids: list[int] | None = None) -> None:
        self._target = target
        self._ids = list(ids or ())
        self._open: list[Future[tuple[Reply, list[int]]]] = []

    def _settle(self) -> list[int]:
        for future in self._open:
            self._ids += future.result()[1]
        self._open.clear()
        return self._ids

    def extend(self, text: str) -> None:
        self._ids = self._settle() + self._target.vocabulary.encode_plain(text, at_start=not self._ids)

    def generate(self, max_tokens: int, *, temperature: float = 0.0) -> "Future[Reply]":
        inner = self._target.ask(self._settle(), max_tokens, temperature)
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

    def close(self) -> None:
        self._open.clear()


def compare(
    ours: Target, peer: Target, vocabulary: Vocabulary, names: list[str], *, repeats: int, scale: float
) -> dict[str, Any]:
    """Ours and the peer in turn, A B A B, each pair on the same text. `ratio` > 1 means that ours is ahead; one per pair."""
    report = {}
    for name in names:
        workload = WORKLOADS[name]
        mine, theirs, ratios = [], [], []
        for repeat in range(-1, repeats):  # the first pair warms up
            a = workload.run(ours, Texts(vocabulary, 100 + repeat), scale)[workload.headline]
            b = workload.run(peer, Texts(vocabulary, 100 + repeat), scale)[workload.headline]
            if repeat >= 0:
                mine.append(a)
                theirs.append(b)
                ratios.append(b / a if workload.better == "lower" else a / b)
        report[name] = {
            "headline": workload.headline, "ours": Figure(tuple(mine)).as_dict(), "peer": Figure(tuple(theirs)).as_dict(),
            "ratio": Figure(tuple(ratios), "x").as_dict(),
        }  # fmt: skip
        print(
            f"{name}: ours {Figure(tuple(mine))}  {peer.name} {Figure(tuple(theirs))}  ratio {Figure(tuple(ratios), 'x')}",
            file=sys.stderr,
        )
    return report
