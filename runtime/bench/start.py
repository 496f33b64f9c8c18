"""From the start of a process to its first text: what somebody waits for who types `anabranch generate`. Warm: files are in memory already."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.runtime.bench.figures import Figure, collect, table
from anabranch.runtime.bench.host import Shares, Watch
from anabranch.runtime.bench.peers import PEERS
from anabranch.runtime.config import child_environment
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

PROMPT = "The capital of France is"
MAX_TOKENS = 16
TIMEOUT_S = 300.0
_STAGE = re.compile(r"^\s*(\S.*?)\s+([\d.,]+) ms\s*$")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the process. `stages`: what the process itself says of its time, in milliseconds."""

    first_text: float
    exit: float
    stages: dict[str, float]

    def as_figures(self) -> dict[str, float]:
        stages = {f"stage_{name.replace(' ', '_')}_ms": ms for name, ms in self.stages.items()}
        return {"first_text_s": self.first_text, "exit_s": self.exit, **stages}


def command(model: Path, options: Sequence[str] = ()) -> list[str]:
    return [
        sys.executable, "-m", "anabranch.runtime.cli", "generate", PROMPT, "--model", str(model), "--max-tokens", str(MAX_TOKENS),
        "--temperature", "0", "--trace", *options,
    ]  # fmt: skip


def time_process(words: Sequence[str]) -> Start:
    """Run it to its end. Its first byte of output is its first text. Raises RuntimeError with its last words if it fails."""
    began = time.perf_counter()
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment(None), bufsize=0
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.read(1)
            first_text = time.perf_counter() - began
            said = process.communicate(timeout=TIMEOUT_S)[1].decode(errors="replace")
            ended = time.perf_counter() - began
        except BaseException:
            process.kill()
            raise
    if process.returncode or not first:
        raise RuntimeError(f"{words[0]} ended with exit code {process.returncode}: {said[-500:]}")
    return Start(first_text, ended, stages_of(said))


def stages_of(trace: str) -> dict[str, float]:
    """The lines `name  12.3 ms` of a `--trace`, in their order."""
    matches = [m for line in trace.splitlines() if (m := _STAGE.match(line))]
    return {m.group(1): float(m.group(2).replace(",", "")) for m in matches}


def run(model: Path, *, repeats: int, options: Sequence[str] = ()) -> dict[str, Any]:
    """Figures of at least three starts after one that fills the caches."""
    time_process(command(model, options))
    starts: list[dict[str, float]] = []
    shares: list[Shares] = []
    for _ in range(max(repeats, 3)):
        with Watch() as watch:
            starts.append(time_process(command(model, options)).as_figures())
        shares.append(watch.shares)
    figures = collect(starts, {name: "ms" if name.endswith("_ms") else "s" for name in starts[0]})
    return {**{k: f.as_dict() for k, f in figures.items()}, "processor": [s.as_dict() for s in shares]}


def time_peer(name: str, home: Path, model: Path, vocabulary: Vocabulary) -> float:
    """Seconds from the start of the peer's process to the first token of an answer; its own interpreter and load are part of it."""
    with PEERS[name](home, model, vocabulary, is_tied=False) as peer:
        node = peer.target.open()
        node.extend(PROMPT)
        reply = node.generate(MAX_TOKENS).result(TIMEOUT_S)
        first: float = reply.asked + reply.ttft - peer.started
        return first


def compare(
    name: str, home: Path, model: Path, vocabulary: Vocabulary, *, repeats: int, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Ours and a peer in turn, in the form of `peers.compare`: seconds to the first text."""
    time_process(command(model, options))
    time_peer(name, home, model, vocabulary)
    pairs = [
        (time_process(command(model, options)).first_text, time_peer(name, home, model, vocabulary)) for _ in range(repeats)
    ]
    return {
        "headline": "first_text_s", "better": "lower",
        "ours": Figure(tuple(a for a, _ in pairs), "s").as_dict(), "peer": Figure(tuple(b for _, b in pairs), "s").as_dict(),
        "ratio": Figure(tuple(b / a for a, b in pairs), "x").as_dict(), "warnings": [],
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> str:
    rows = [(name, f"{f['median']:,.4g} {f['unit']}", f"{f['min']:,.4g}-{f['max']:,.4g}") for name, f in result.items() if isinstance(f, dict)]
    return table(rows, ("from the start of the process", "median", "range"))
