"""The classic ways to fool oneself with a benchmark, where a run's figures show one. Pure: figures in, sentences out."""

from collections.abc import Mapping, Sequence

from anabranch.runtime.bench.figures import Figure
from anabranch.runtime.bench.host import BUSY_CORES, Shares

MIN_REPEATS = 3
MAX_SPREAD = 0.5  # (max - min) / median
MAX_CLIENT_CORES = 0.25  # of a core for a client that only sends and reads
MAX_LAG_SHARE = 0.1  # how late requests leave, against the time to the first token


def of_repeats(repeats: int, warm_ups: int) -> list[str]:
    found = []
    if repeats < MIN_REPEATS:
        found.append(f"{repeats} repeats say nothing about the spread: use at least {MIN_REPEATS}")
    if warm_ups < 1:
        found.append("no warm-up: the first run pays for cold caches, clocks and buffers")
    return found


def of_spread(figures: Mapping[str, Figure]) -> list[str]:
    """Times and rates that vary by more than half of their median."""
    names = [name for name, f in figures.items() if f.unit and f.spread > MAX_SPREAD and not name.endswith(("_p90_ms", "_p99_ms"))]
    return [f"{name} varies by more than half: the machine is busy, or clocks were cold" for name in names]


def of_caching(figures: Mapping[str, Figure], *, shares_prefixes: bool) -> list[str]:
    """Hits where each text is new, or nothing but hits where some of it is."""
    cached, prompt = figures.get("cached_tokens"), figures.get("prompt_tokens")
    if cached is None or prompt is None or not prompt.median:
        return []
    share = cached.median / prompt.median
    if not shares_prefixes and share > 0.05:
        return [f"{share:.0%} of the prompt tokens were cached although every text is new: accidental cache hits"]
    if shares_prefixes and share > 0.98:
        return ["nearly all prompt tokens were cached: is this the workload, or an earlier run's text?"]
    return []


def of_machine(runs: Sequence[Shares]) -> list[str]:
    """Other processes ran at the same time."""
    busy = [s.others for s in runs if s.others is not None and s.is_disturbed]
    if not busy:
        return []
    return [
        f"others used {max(busy):.2f} cores during {len(busy)} of {len(runs)} runs (more than {BUSY_CORES:g} disturbs): "
        "end them and measure again"
    ]


def of_client(runs: Sequence[Shares], *, is_remote: bool) -> list[str]:
    """A client that computes much on the machine of its server takes the processor from what it measures."""
    most = max((s.ours for s in runs), default=0.0)
    if is_remote and most > MAX_CLIENT_CORES:
        return [f"the client itself used {most:.2f} cores: figures may be the client's, not the server's"]
    return []


def of_stream(*, prompt_lengths: Sequence[int], lag_p99_s: float, ttft_p50_s: float, offered: float, achieved: float) -> list[str]:
    """What goes wrong with open loops: one length for all, a client that sends late, a rate that the server cannot keep up with."""
    found = []
    if len(prompt_lengths) > 1 and len(set(prompt_lengths)) == 1:
        found.append(f"fixed lengths: every prompt has {prompt_lengths[0]} tokens, so that queues never form as they do in use")
    if lag_p99_s > MAX_LAG_SHARE * ttft_p50_s and lag_p99_s > 0.005:
        found.append(f"client-bound: requests left up to {1000 * lag_p99_s:.0f} ms after they were due")
    if achieved < 0.9 * offered:
        found.append(
            f"overloaded: {offered:.3g} requests/s were offered and {achieved:.3g} served; latencies grow with the length of the run"
        )
    return found
