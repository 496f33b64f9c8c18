"""What the scheduler tells about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from anabranch.radix import invariants

if TYPE_CHECKING:
    from anabranch.runtime.scheduler.state import SchedulerState

Stats = dict[str, float | int | str | dict[str, float | int | str]]

_TOTALS = (
    "prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens", "generated_tokens", "preemptions",
)  # fmt: skip
_BOUNDS_US = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)


class Durations:
    """Histogram of times in microseconds, with bounds that double."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_US) + 1)
        self.count = 0
        self.total_us = 0.0
        self.max_us = 0.0

    def observe(self, us: float) -> None:
        self._counts[int(np.searchsorted(_BOUNDS_US, us))] += 1
        self.count += 1
        self.total_us += us
        self.max_us = max(self.max_us, us)

    def as_dict(self) -> dict[str, float | int | str]:
        found: dict[str, float | int | str] = {
            f"le_{bound}": count for bound, count in zip((*map(str, _BOUNDS_US), "inf"), self._counts)
        }
        found |= {"count": self.count, "mean_us": self.total_us / self.count if self.count else 0.0, "max_us": self.max_us}
        return found


def collect(s: SchedulerState, *, check: bool) -> Stats:
    """Sizes now and counters since the start. `check` also runs the invariant checker and says what it found."""
    stats: Stats = {
        "pages_total": s.manager.pool.num_pages,
        "pages_free": s.manager.num_free(),
        "pages_cached": s.manager.num_cached(),
        "pages_locked": s.manager.num_locked(),
        "pages_in_use": s.manager.num_in_use(),
        "page_size": s.page_size,
        "slots_total": s.max_running,
        "slots_in_use": len(s.slots.used),
        "running": int(np.count_nonzero(s.slots.live)),
        "waiting": len(s.line),
        "queued_operations": s.branches.num_queued,
        "requests": len(s.requests) + len(s.queued),
        "branches": len(s.branches),
        "programs": len(s.programs),
        "steps": s.num_steps,
        "steps_in_flight": len(s.flights),
        "tokens_per_step_limit": s.config.tokens_per_step,
        "head_room_outputs_seen": s.headroom.num_observed,
        "planning_us": s.durations.as_dict(),
        "events": dict(sorted(s.counters.items())),
        "cache": dict(s.manager.stats()),
    }
    for name in _TOTALS:
        stats[name] = s.counters[name]
    if check:
        stats["check"] = check_cache(s)
    return stats


def check_cache(s: SchedulerState) -> str:
    """"ok", or what is wrong: a broken rule is reported, it does not stop anybody."""
    try:
        invariants.check(s.manager)
    except AssertionError as broken:
        s.counters["broken_invariants"] += 1
        return str(broken)
    return "ok"
