"""Ours and peers in turn, A B A B, on the same weights and the same text. One peer after the other, never two at once.

The peer stands still (SIGSTOP) while ours runs: runtimes whose idle threads spin would take a core from it. Ours waits without spinning.
"""

import http.client
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.runtime.bench import measure as measuring
from anabranch.runtime.bench.children import Child
from anabranch.runtime.bench.figures import Figure
from anabranch.runtime.bench.host import Shares, Watch
from anabranch.runtime.bench.measure import Machine
from anabranch.runtime.bench.peer_setup import llama_server, set_up_llama_cpp, set_up_openvino
from anabranch.runtime.bench.pipe_target import PipeTarget
from anabranch.runtime.bench.targets import Target
from anabranch.runtime.bench.url_target import UrlTarget
from anabranch.runtime.bench.workloads import Figures, Workload
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

MAX_REDONE = 2  # pairs that are measured again because something else ran
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that runs: what to ask, its process, and when that was started."""

    target: Target
    child: Child
    started: float


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_server(port: int, child: Child, *, path: str = "/health", timeout_s: float = START_TIMEOUT_S, pause_s: float = 0.01) -> None:
    """Until it answers 200. Raises RuntimeError if it ends or takes longer."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if not child.is_alive:
            raise RuntimeError(f"the server ended with exit code {child.process.returncode} before it answered")
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", path)
                with connection.getresponse() as response:
                    if response.status == 200:
                        return
            finally:
                connection.close()
        time.sleep(pause_s)
    raise RuntimeError(f"the server did not answer within {timeout_s:g} s")


@contextmanager
def openvino(home: Path, model: Path, vocabulary: Vocabulary, *, is_tied: bool = True) -> Iterator[Peer]:
    python, weights = set_up_openvino(home, model)
    script = Path(__file__).with_name("peer_openvino.py")
    target = PipeTarget("openvino", [str(python), str(script), str(weights)], vocabulary, is_tied=is_tied)
    try:
        yield Peer(target, target.child, target.started)
    finally:
        target.close()


@contextmanager
def llama_cpp(home: Path, model: Path, vocabulary: Vocabulary, *, is_tied: bool = True) -> Iterator[Peer]:
    llama, port = set_up_llama_cpp(home, model), free_port()
    llama.weights("Q8_0")
    started = time.perf_counter()
    child = llama_server(llama, port, home / "llama-server.log", num_threads=len(os.sched_getaffinity(0)), is_tied=is_tied)
    try:
        wait_for_server(port, child)
        target = UrlTarget(f"http://127.0.0.1:{port}", name="llama.cpp", extra={"cache_prompt": True}, pids=lambda: [child.pid])
        yield Peer(target, child, started)
        target.close()
    finally:
        child.end()


PEERS: dict[str, Callable[..., Any]] = {"openvino": openvino, "llama.cpp": llama_cpp}


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each on the same text."""

    ours: Figures
    peer: Figures
    shares: tuple[Shares, Shares]

    def ratio(self, workload: Workload) -> float:
        """How many times better ours is by the headline."""
        a, b = self.ours[workload.headline], self.peer[workload.headline]
        return b / a if workload.better == "lower" else a / b


def compare(
    ours: Target, peer: Peer, vocabulary: Vocabulary, workloads: Iterable[Workload], *,
    repeats: int, scale: float, machine: Machine | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Per workload: `ours`, `peer` and `ratio` (one value per pair; above 1 ours is ahead), all figures of both, warnings."""
    report: dict[str, Any] = {}
    for workload in workloads:
        one_pair(ours, peer, vocabulary, workload, scale, "warm-up")
        pairs: list[Pair] = []
        redone = 0
        while len(pairs) < repeats:
            pair = one_pair(ours, peer, vocabulary, workload, scale, f"{len(pairs)}.{redone}")
            if any(shares.is_disturbed for shares in pair.shares) and redone < MAX_REDONE:
                redone += 1
                continue
            pairs.append(pair)
        report[workload.name] = entry = summary(ours, peer.target, workload, pairs, scale, machine) | {"redone": redone}
        print(_line(workload, peer.target.name, entry), file=sys.stderr, flush=True)
    return report


def one_pair(ours: Target, peer: Peer, vocabulary: Vocabulary, workload: Workload, scale: float, run: str) -> Pair:
    """Ours while the peer stands still, then the peer. The peer's name is part of the text's seed: ours never sees a text twice."""

    def go(target: Target) -> tuple[Figures, Shares]:
        with Watch(target.pids) as watch:
            figures = workload.run(target, measuring.texts(vocabulary, workload, peer.target.name, run), scale)
        return figures, watch.shares

    peer.child.pause()
    try:
        a, shares_a = go(ours)
    finally:
        peer.child.resume()
    b, shares_b = go(peer.target)
    return Pair(a, b, (shares_a, shares_b))


def summary(
    ours: Target, peer: Target, workload: Workload, pairs: Sequence[Pair], scale: float, machine: Machine | None
) -> dict[str, Any]:
    mine = [measuring.with_floor(pair.ours, workload, scale, machine) for pair in pairs]
    sides = {
        "ours": measuring.judged(mine, [p.shares[0] for p in pairs], workload, ours, repeats=len(pairs), warm_ups=1),
        "peer": measuring.judged([p.peer for p in pairs], [p.shares[1] for p in pairs], workload, peer, repeats=len(pairs), warm_ups=1),
    }
    return {
        "headline": workload.headline, "better": workload.better,
        **{side: measured.figures[workload.headline].as_dict() for side, measured in sides.items()},
        "ratio": Figure(tuple(pair.ratio(workload) for pair in pairs), "x").as_dict(),
        "details": {side: measured.as_dict() for side, measured in sides.items()},
        "warnings": [f"{side}: {w}" for side, measured in sides.items() for w in measured.warnings],
    }  # fmt: skip


def by_workload(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """From one report per peer to one per workload, with the best peer: the one that ours is least ahead of."""
    names = list(dict.fromkeys(name for report in reports.values() for name in report))
    found: dict[str, Any] = {}
    for name in names:
        entries = {peer: report[name] for peer, report in reports.items() if name in report}
        best = min(entries, key=lambda peer: entries[peer]["ratio"]["median"])
        found[name] = {"best_peer": best, **{k: entries[best][k] for k in ("headline", "ours", "peer", "ratio")}, "peers": entries}
    return found


def _line(workload: Workload, peer: str, entry: Mapping[str, Any]) -> str:
    figures = {key: Figure(tuple(entry[key]["values"]), entry[key]["unit"]) for key in ("ours", "peer", "ratio")}
    text = f"{workload.name}: ours {figures['ours']}  {peer} {figures['peer']}  ratio {figures['ratio']}"
    return "\n  warning: ".join([text, *entry["warnings"]])
