"""Medians with their spread, and how they are shown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A repeated measurement. Shared machines drift: quote the median and show the range."""

    values: tuple[float, ...]
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median; 0 where the median is."""
        return (max(self.values) - min(self.values)) / abs(self.median) if self.median else 0.0

    def as_dict(self) -> dict[str, float | str | list[float]]:
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "spread": self.spread,
            "unit": self.unit,
            "values": list(self.values),
        }

    def __str__(self) -> str:
        return f"{self.median:,.4g} {self.unit} ({min(self.values):,.4g}-{max(self.values):,.4g})"


def collect(runs: Sequence[Mapping[str, float]], units: Mapping[str, str]) -> dict[str, Figure]:
    """One Figure per key that every run has."""
    keys = [k for k in runs[0] if all(k in run for run in runs)]
    return {k: Figure(tuple(float(run[k]) for run in runs), units.get(k, "")) for k in keys}


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """Plain aligned columns."""
    cells = [list(header), *[[str(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
