"""Repeats of a workload on a target, each with text of its own, watched for what else the machine did."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabranch.runtime.bench import floor, least, mistakes
from anabranch.runtime.bench.figures import Figure, collect
from anabranch.runtime.bench.host import Shares, Watch
from anabranch.runtime.bench.targets import Target
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.workloads import UNITS, Figures, Workload
from anabranch.runtime.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Measured:
    """What repeats of one workload gave. `shares`: one for each repeat."""

    figures: dict[str, Figure]
    shares: list[Shares]
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: figure.as_dict() for name, figure in self.figures.items()},
            "processor": [shares.as_dict() for shares in self.shares],
            "warnings": self.warnings,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """What a floor is computed from."""

    sizes: floor.Sizes
    rates: floor.Rates
    products: floor.Products = floor.Products()  # noqa: RUF009  # frozen

    def floor_of(self, workload: Workload, scale: float, figures: Figures) -> Figures:
        """`floor` in the unit of the headline and `x_floor`, how many times worse the run was; nothing where no floor is defined."""
        if workload.least is None:
            return {}
        plan = workload.least(scale, figures)
        total_s = floor.seconds(plan, self.sizes, self.rates, self.products)
        best = least.headline_floor(workload.headline, plan, total_s, figures)
        measured = figures[workload.headline]
        return {"floor": best, "x_floor": measured / best if workload.better == "lower" else best / measured}


def measure(
    target: Target,
    workload: Workload,
    vocabulary: Vocabulary,
    *,
    repeats: int,
    scale: float,
    warm_ups: int = 1,
    machine: Machine | None = None,
    label: str = "",
) -> Measured:
    """`repeats` runs after those that do not count. `label` tells apart what runs on the same engine: its text differs, too."""
    for i in range(warm_ups):
        workload.run(target, texts(vocabulary, workload, label, f"warm-up {i}"), scale)
    runs, shares = [], []
    for i in range(repeats):
        with Watch(target.pids) as watch:
            run = workload.run(target, texts(vocabulary, workload, label, i), scale)
        runs.append(with_floor(run, workload, scale, machine))
        shares.append(watch.shares)
    return judged(runs, shares, workload, target, repeats=repeats, warm_ups=warm_ups)


def texts(vocabulary: Vocabulary, workload: Workload, label: str, run: int | str) -> Texts:
    """Text that no other workload, label or run has."""
    return Texts(vocabulary, f"{workload.name}/{label}/{run}")


def with_floor(figures: Figures, workload: Workload, scale: float, machine: Machine | None) -> Figures:
    return figures if machine is None else {**figures, **machine.floor_of(workload, scale, figures)}


def judged(
    runs: list[Figures], shares: list[Shares], workload: Workload, target: Target, *, repeats: int, warm_ups: int
) -> Measured:
    """The figures of all runs, with the mistakes that they show."""
    figures = collect(runs, {**UNITS, "floor": UNITS.get(workload.headline, "")})
    warnings = [
        *mistakes.of_repeats(repeats, warm_ups),
        *mistakes.of_spread(figures),
        *mistakes.of_caching(figures, shares_prefixes=workload.shares_prefixes),
        *mistakes.of_machine(shares),
        *mistakes.of_client(shares, is_remote=target.is_remote),
    ]
    if "valid_share" in figures and min(figures["valid_share"].values) < 1:
        warnings.append(f"only {min(figures['valid_share'].values):.0%} of the records fit their schema")
    return Measured(figures, shares, warnings)


Say = Callable[[str], None]
