"""`anabranch bench`: run workloads on the embedded engine, on a server, or in turn with a peer, and say how far from the floor they are."""

import sys
from pathlib import Path
from typing import Any

from anabranch.runtime.bench import fork, radix, step
from anabranch.runtime.bench.figures import Figure, collect, table
from anabranch.runtime.bench.peers import PipeTarget, compare, set_up_openvino
from anabranch.runtime.bench.targets import EmbeddedTarget, Target, UrlTarget
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.workloads import UNITS, WORKLOADS, Workload
from anabranch.runtime.config import cache_dir
from anabranch.runtime.engine import Engine
from anabranch.runtime.models_cache import resolve_model
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

MODEL_FREE = {"radix": radix, "step": step}  # no model, no target: `run(small=) -> figures`, `table(figures)`
NAMES = (*WORKLOADS, "fork", *MODEL_FREE, "peers")
WARM_UP_SEED = 99


def measure(
    target: Target, workload: Workload, vocabulary: Vocabulary, *, repeats: int, scale: float
) -> dict[str, Figure]:
    """Figures of `repeats` runs after one that does not count. Each run has texts of its own."""
    workload.run(target, Texts(vocabulary, WARM_UP_SEED), scale)
    return collect([workload.run(target, Texts(vocabulary, 100 + i), scale) for i in range(repeats)], UNITS)


def mistakes(figures: dict[str, Figure], repeats: int) -> list[str]:
    """The classic ways to fool oneself, where these figures show one."""
    found = []
    if repeats < 3:
        found.append(f"{repeats} repeats say nothing about the spread: use at least 3")
    for name, figure in figures.items():
        if figure.unit and figure.median and (max(figure.values) - min(figure.values)) / figure.median > 0.5:
            found.append(f"{name} varies by more than half: the machine is busy, or clocks were cold")
    cached, prompt = figures.get("cached_tokens"), figures.get("prompt_tokens")
    if cached and prompt and cached.median > 0.98 * prompt.median:
        found.append("nearly all prompt tokens were cached: is this the workload, or an earlier run's text?")
    return found


def run(
    name: str,
    *,
    model: str = "default",
    base_url: str | None = None,
    repeats: int = 3,
    small: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One workload's figures as JSON-ready data. `small` shrinks it to a smoke test."""
    if name in MODEL_FREE:
        return dict(MODEL_FREE[name].run(small=small))
    path = resolve_model(model)
    vocabulary = open_model_text(path).vocabulary
    scale = 0.125 if small else 1.0
    if name == "peers":
        return run_peers(path, vocabulary, repeats=repeats, scale=scale, options=options or {})
    if name == "fork":
        with Engine(str(path), **(options or {})) as engine:
            return dict(fork.run(engine, vocabulary, small=small))
    workload = WORKLOADS[name]
    if base_url is not None:
        figures = measure(UrlTarget(base_url), workload, vocabulary, repeats=repeats, scale=scale)
    else:
        with Engine(str(path), **(options or {})) as engine:
            figures = measure(EmbeddedTarget(engine), workload, vocabulary, repeats=repeats, scale=scale)
    for warning in mistakes(figures, repeats):
        print(f"warning: {warning}", file=sys.stderr)
    return {
        "workload": name,
        "about": workload.about,
        "headline": workload.headline,
        **{k: f.as_dict() for k, f in figures.items()},
    }


def run_peers(
    path: Path, vocabulary: Vocabulary, *, repeats: int, scale: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Ours and OpenVINO GenAI in turn. The engine idles while the peer runs, and the other way round."""
    python, model_dir = set_up_openvino(cache_dir() / "peers", path)
    script = Path(__file__).with_name("peer_openvino.py")
    peer = PipeTarget("openvino-genai", [str(python), str(script), str(model_dir)], vocabulary)
    try:
        with Engine(str(path), **options) as engine:
            names = [name for name in WORKLOADS if name != "select"]
            return compare(EmbeddedTarget(engine), peer, vocabulary, names, repeats=repeats, scale=scale)
    finally:
        peer.close()


def show(name: str, result: dict[str, Any]) -> str:
    """The result as a table for people."""
    if name in MODEL_FREE:
        return MODEL_FREE[name].table(result)
    if name == "fork":
        return fork.table(result)
    if name == "peers":
        rows = [
            (w, r["headline"], _median(r["ours"]), _median(r["peer"]), _median(r["ratio"])) for w, r in result.items()
        ]
        return table(rows, ("workload", "figure", "ours", "peer", "ratio"))
    figures = [(k, _median(v)) for k, v in result.items() if isinstance(v, dict)]
    return f"{name}: {result['about']}\n" + table(figures, ("figure", "median (min-max)"))


def _median(figure: dict[str, Any]) -> str:
    return f"{figure['median']:,.4g} {figure['unit']} ({figure['min']:,.4g}-{figure['max']:,.4g})"
