"""What the cache costs where it cannot help: the same distinct prompts with and without it, in turn. The target is below 1 %.

Runs drift by more than that, so the ratio comes from many short pairs, each in the other order than the one before (A B, B A, ...), with an
interval from resampling the pairs. The scheduler's own work per step, which is all that differs, is shown besides: it does not drift with
the forward.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from anabranch.runtime.bench.figures import Figure, table
from anabranch.runtime.bench.host import Shares, Watch
from anabranch.runtime.bench.targets import Node, Reply, Target
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.workloads import TIMEOUT
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

PAIRS_PER_REPEAT = 5
Planning = Callable[[], tuple[float, int]]  # microseconds of planning, and how many times it was done, since the start


def round_of(target: Target, texts: Texts, *, num_requests: int, num_prompt: int, num_output: int) -> tuple[float, list[Reply]]:
    """Seconds for all requests at once, each with text of its own."""
    prompts = [texts.passage(num_prompt) for _ in range(num_requests)]
    began = time.perf_counter()
    nodes: list[Node] = [target.open() for _ in prompts]
    for node, prompt in zip(nodes, prompts):
        node.extend(prompt)
    replies = [future.result(TIMEOUT) for future in [node.generate(num_output) for node in nodes]]
    elapsed = time.perf_counter() - began
    for node in nodes:
        node.close()
    return elapsed, replies


def run(
    targets: tuple[Target, Target], vocabulary: Vocabulary, *, repeats: int, small: bool, planning: tuple[Planning, Planning] | None = None
) -> dict[str, Any]:
    """`targets`: with the cache, without it. `ratio`: time with it over time without, one per pair."""
    shape = {"num_requests": 4 if small else 16, "num_prompt": 32 if small else 128, "num_output": 8 if small else 32}
    pairs: list[tuple[float, float]] = []
    shares: list[Shares] = []
    cached = 0
    for i in range(-1, max(repeats, 1) * (1 if small else PAIRS_PER_REPEAT)):
        order = (0, 1) if i % 2 else (1, 0)
        times = [0.0, 0.0]
        with Watch() as watch:
            for side in order:
                times[side], replies = round_of(targets[side], Texts(vocabulary, f"cache-cost/{i}"), **shape)
                cached += sum(r.num_cached for r in replies)
        if i >= 0:  # the first pair warms up
            pairs.append((times[0], times[1]))
            shares.append(watch.shares)
    ratios = [a / b for a, b in pairs]
    low, high = interval(ratios)
    result: dict[str, Any] = {
        "with_s": Figure(tuple(a for a, _ in pairs), "s").as_dict(), "without_s": Figure(tuple(b for _, b in pairs), "s").as_dict(),
        "ratio": Figure(tuple(ratios), "x").as_dict(), "cost": median(ratios) - 1, "cost_low": low - 1, "cost_high": high - 1,
        "cached_tokens": cached, "processor": [s.as_dict() for s in shares],
    }  # fmt: skip
    if planning is not None:
        result |= planning_cost(planning)
    return result


def interval(ratios: Sequence[float], *, share: float = 0.9, draws: int = 2000) -> tuple[float, float]:
    """Between which the median lies with that confidence: percentiles of medians of resampled pairs (Efron 1979). Seeded."""
    rng = random.Random(7)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    outside = (1 - share) / 2
    return medians[int(outside * draws)], medians[int((1 - outside) * draws) - 1]


def planning_cost(planning: tuple[Planning, Planning]) -> dict[str, float]:
    """Mean microseconds of scheduler work per step on either side."""
    sides = [total / max(count, 1) for total, count in (side() for side in planning)]
    return {"planning_with_us": sides[0], "planning_without_us": sides[1]}


def show(result: Mapping[str, Any]) -> str:
    rows = [(name, Figure(tuple(result[name]["values"]), result[name]["unit"])) for name in ("with_s", "without_s", "ratio")]
    rest = [(name, f"{result[name]:.1f}") for name in ("planning_with_us", "planning_without_us") if name in result]
    cost = f"{100 * result['cost']:+.2f} % (90 % of the time between {100 * result['cost_low']:+.2f} and {100 * result['cost_high']:+.2f} %)"
    return table([*rows, *rest, ("cost of the cache", cost)], ("at 0 % hits", "measured"))
