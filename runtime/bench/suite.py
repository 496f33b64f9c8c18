"""`anabranch bench`: run workloads on the embedded engine, on a server, or in turn with peers, and say how far from the floor they are."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anabranch.runtime.bench import (
    accuracy,
    arrivals,
    cache_cost,
    floor,
    fork,
    mistakes,
    peers,
    radix,
    serve,
    start,
    step,
)
from anabranch.runtime.bench.figures import Figure, collect, table
from anabranch.runtime.bench.host import Watch, prepare_memory
from anabranch.runtime.bench.measure import Machine, measure
from anabranch.runtime.bench.peer_setup import set_up_llama_cpp
from anabranch.runtime.bench.targets import EmbeddedTarget, Target
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.url_target import UrlTarget
from anabranch.runtime.bench.workloads import UNITS, WORKLOADS
from anabranch.runtime.config import cache_dir
from anabranch.runtime.engine import Engine
from anabranch.runtime.models_cache import resolve_model
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.tokenizer.vocabulary import Vocabulary
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.memory import free_memory

MODEL_FREE = {"radix": radix, "step": step}  # no model, no target: `run(small=) -> figures`, `table(figures)`
NAMES = (*WORKLOADS, "serve", "fork", "start", "cache-cost", "accuracy", *MODEL_FREE, "peers")
COMPARED = (*(name for name in WORKLOADS if name != "select"), "start")
MEMORY_BYTES = {False: 4 << 30, True: 256 << 20}  # what a run and its buffers touch, by `small`


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `anabranch bench` was asked for.

    small       a smoke test: an eighth of the size
    options     keyword arguments of the engine; `flags`: the same as words of the command line
    rate        requests per second of an open loop; None with no `trace`: a closed loop of `concurrency`
    num_requests, seed   of `serve`
    peers, only          which peers and workloads `peers` runs; empty: all
    touch       whether memory is touched first, see `host.touch_memory`
    """

    model: str = "default"
    base_url: str | None = None
    repeats: int = 3
    warm_ups: int = 1
    small: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    rate: float | None = None
    trace: Path | None = None
    num_requests: int = 64
    concurrency: int = 8
    seed: int = 0
    peers: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    touch: bool = True

    def __post_init__(self) -> None:
        for name, low in (("repeats", 1), ("warm_ups", 0), ("num_requests", 1), ("concurrency", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for given, known, what in ((self.peers, peers.PEERS, "peer"), (self.only, COMPARED, "workload")):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"unknown {what} {unknown[0]!r}; known are {', '.join(known)}")

    @property
    def scale(self) -> float:
        return 0.125 if self.small else 1.0


@dataclass(frozen=True, slots=True)
class Model:
    path: Path
    vocabulary: Vocabulary


def run(name: str, settings: Settings) -> dict[str, Any]:
    """One workload's figures as JSON-ready data. Raises ValueError for a name that is not in NAMES."""
    if name not in NAMES:
        raise ValueError(f"unknown workload {name!r}; known are {', '.join(NAMES)}")
    if name in MODEL_FREE:
        return dict(MODEL_FREE[name].run(small=settings.small))
    path = resolve_model(settings.model)
    model = Model(path, open_model_text(path).vocabulary)
    if settings.touch and settings.base_url is None:
        prepare_memory(MEMORY_BYTES[settings.small], free_memory())
    special: dict[str, Callable[[Model, Settings], dict[str, Any]]] = {
        "peers": run_peers, "fork": run_fork, "start": run_start, "cache-cost": run_cache_cost, "accuracy": run_accuracy, "serve": run_serve,
    }  # fmt: skip
    result = special[name](model, settings) if name in special else run_workload(name, model, settings)
    for warning in result.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    return result


def run_workload(name: str, model: Model, settings: Settings) -> dict[str, Any]:
    workload = WORKLOADS[name]
    with ExitStack() as stack:
        machine = None if settings.base_url else machine_of(model, settings)
        target = open_target(stack, model, settings)
        measured = measure(
            target, workload, model.vocabulary, repeats=settings.repeats, warm_ups=settings.warm_ups, scale=settings.scale, machine=machine
        )
    return {"workload": name, "about": workload.about, "headline": workload.headline, **measured.as_dict()}


def open_target(stack: ExitStack, model: Model, settings: Settings) -> Target:
    if settings.base_url is not None:
        return UrlTarget(settings.base_url)
    return EmbeddedTarget(stack.enter_context(Engine(str(model.path), **settings.options)))


def machine_of(model: Model, settings: Settings) -> Machine | None:
    """The floor's ingredients: sizes from the file, rates measured now (a second or two). None without native kernels to measure with."""
    from anabranch.kernels.build import BuildError
    from anabranch.kernels.limits import SIZES, measure
    from anabranch.runtime.worker.memory import kv_bytes_per_token

    checkpoint = open_checkpoint(model.path)
    c, dtype = checkpoint.config, settings.options.get("kv_dtype", "auto")
    dtype = "int16" if dtype == "auto" else dtype
    kv_bytes = kv_bytes_per_token(num_layers=c.num_layers, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=dtype)
    try:
        rates = measure(settings.options.get("num_threads"), SIZES[:3] if settings.small else SIZES)
    except BuildError as fault:
        print(f"no floor: {fault}", file=sys.stderr)
        return None
    sizes = floor.sizes_of(
        checkpoint.tensors, num_layers=c.num_layers, num_heads=c.num_heads, head_dim=c.head_dim, kv_bytes_per_token=kv_bytes
    )
    precision = settings.options.get("precision", "fast")
    return Machine(sizes, rates, floor.Products.of(precision=precision, kv_dtype=dtype))


# ---------------------------------------------------------------- more than one workload function


def run_serve(model: Model, settings: Settings) -> dict[str, Any]:
    stream, notes, is_open = stream_of(model, settings)
    runs, shares = [], []
    with ExitStack() as stack:
        target = open_target(stack, model, settings)
        for i in range(-settings.warm_ups, settings.repeats):
            texts = Texts(model.vocabulary, f"serve/{settings.seed}/{i}")
            with Watch(target.pids) as watch:
                if not is_open:
                    answered = serve.closed_loop(target, texts, stream, settings.concurrency)
                elif i < 0:  # the stream would take as long again: a few requests warm up as well
                    answered = serve.open_loop(target, texts, [replace(a, at=0.0) for a in stream[:8]])
                else:
                    answered = serve.open_loop(target, texts, stream)
            if i >= 0:
                runs.append(serve.figures_of(answered, is_open=is_open))
                shares.append(watch.shares)
    figures = collect(runs, UNITS)
    warnings = [*notes, *mistakes.of_repeats(settings.repeats, settings.warm_ups), *mistakes.of_machine(shares),
                *mistakes.of_client(shares, is_remote=target.is_remote)]  # fmt: skip
    has_blocks = any(a.blocks for a in stream)
    warnings += mistakes.of_caching(figures, shares_prefixes=has_blocks)
    if is_open:
        warnings += mistakes.of_stream(
            prompt_lengths=[a.num_prompt for a in stream], lag_p99_s=figures["lag_p99_ms"].median / 1000,
            ttft_p50_s=figures["ttft_p50_ms"].median / 1000, offered=figures["offered_per_s"].median,
            achieved=figures["achieved_per_s"].median,
        )  # fmt: skip
    loop = "open loop" if is_open else f"closed loop, {settings.concurrency} at a time"
    return {
        "workload": "serve", "about": f"{len(stream)} requests of mixed lengths, {loop}", "headline": "ttft_p50_ms",
        "loop": "open" if is_open else "closed", **{k: f.as_dict() for k, f in figures.items()},
        "processor": [s.as_dict() for s in shares], "warnings": warnings,
    }  # fmt: skip


def stream_of(model: Model, settings: Settings) -> tuple[list[arrivals.Arrival], list[str], bool]:
    """The requests, what should be said about them, and whether their times count."""
    is_open = settings.rate is not None or settings.trace is not None
    if settings.trace is not None:
        stream = arrivals.read_trace(settings.trace, settings.num_requests)
        stream = arrivals.at_rate(stream, settings.rate) if settings.rate is not None else stream
    else:
        rate = settings.rate if settings.rate is not None else 1.0
        stream = arrivals.poisson(rate, settings.num_requests, settings.seed, scale=settings.scale)
    context = settings.options.get("context_length") or open_model_text(model.path).config.context_length
    stream, num_cut = arrivals.fitting(stream, context)
    notes = [f"{num_cut} of {len(stream)} requests were cut to the model's context of {context} tokens"] if num_cut else []
    return stream, notes, is_open


def run_fork(model: Model, settings: Settings) -> dict[str, Any]:
    with Engine(str(model.path), **settings.options) as engine:
        return dict(fork.run(engine, model.vocabulary, small=settings.small))


def run_start(model: Model, settings: Settings) -> dict[str, Any]:
    return start.run(model.path, repeats=settings.repeats, options=settings.flags)


def run_cache_cost(model: Model, settings: Settings) -> dict[str, Any]:
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(str(model.path), **settings.options, cache=cache)) for cache in (True, False)]

        def planning_of(engine: Engine) -> cache_cost.Planning:
            def read() -> tuple[float, int]:
                seen = engine.stats().result()["planning_us"]
                return seen["mean_us"] * seen["count"], seen["count"]

            return read

        targets = EmbeddedTarget(engines[0]), EmbeddedTarget(engines[1])
        planning = planning_of(engines[0]), planning_of(engines[1])
        return cache_cost.run(targets, model.vocabulary, repeats=settings.repeats, small=settings.small, planning=planning)


def run_accuracy(model: Model, settings: Settings) -> dict[str, Any]:
    """With `--peer llama.cpp` that one's own path, too, on the same file and text."""
    if wrong := [name for name in settings.peers if name != "llama.cpp"]:
        raise ValueError(f"{wrong[0]} cannot say what its path costs; --peer llama.cpp can")
    if settings.peers and model.path.suffix != ".gguf":
        raise ValueError(f"llama.cpp reads .gguf files; {model.path} is not one")
    llama = set_up_llama_cpp(cache_dir() / "peers", model.path) if settings.peers else None
    return accuracy.run(
        model.path, lambda text: model.vocabulary.encode_plain(text, at_start=True), small=settings.small, llama=llama,
        num_threads=settings.options.get("num_threads"),
    )  # fmt: skip


def run_peers(model: Model, settings: Settings) -> dict[str, Any]:
    """Ours and each peer in turn."""
    home, chosen = cache_dir() / "peers", settings.only or COMPARED
    workloads = [WORKLOADS[name] for name in chosen if name in WORKLOADS]
    reports: dict[str, dict[str, Any]] = {}
    for name in settings.peers or tuple(peers.PEERS):
        report = reports[name] = {}
        if workloads:
            with ExitStack() as stack:
                machine = machine_of(model, settings)
                target = open_target(stack, model, replace(settings, base_url=None))
                peer = stack.enter_context(peers.PEERS[name](home, model.path, model.vocabulary))
                report |= peers.compare(
                    target, peer, model.vocabulary, workloads, repeats=settings.repeats, scale=settings.scale, machine=machine
                )
        if "start" in chosen:
            report["start"] = start.compare(name, home, model.path, model.vocabulary, repeats=settings.repeats, options=settings.flags)
    return peers.by_workload(reports)


# ---------------------------------------------------------------- for people


def show(name: str, result: dict[str, Any]) -> str:
    """The result as a table for people."""
    shows = {"fork": fork.table, "start": start.show, "cache-cost": cache_cost.show, "accuracy": accuracy.show, "peers": show_peers}
    if name in MODEL_FREE:
        return MODEL_FREE[name].table(result)
    if name in shows:
        return str(shows[name](result))
    figures = [(k, _median(v)) for k, v in result.items() if isinstance(v, dict)]
    return f"{name}: {result['about']}\n" + table(figures, ("figure", "median (min-max)"))


def show_peers(result: dict[str, Any]) -> str:
    rows = [
        (workload, peer, entry["headline"], _median(entry["ours"]), _median(entry["peer"]), _median(entry["ratio"]),
         f"{entry['ratio']['spread']:.0%}", "best" if peer == report["best_peer"] else "")
        for workload, report in result.items() for peer, entry in report["peers"].items()
    ]  # fmt: skip
    return table(rows, ("workload", "peer", "figure", "ours", "theirs", "ratio", "spread", ""))


def _median(figure: dict[str, Any]) -> str:
    return str(Figure(tuple(figure["values"]), figure["unit"]))


