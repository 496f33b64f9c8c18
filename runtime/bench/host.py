"""What else the machine does while something is measured, and memory that it has to find first. Reads /proc; elsewhere it knows nothing."""

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
BUSY_CORES = 0.1  # of a core that others may take before figures count as disturbed


@dataclass(frozen=True, slots=True)
class Shares:
    """Cores in use on average over a measurement. None: this system does not say."""

    seconds: float
    ours: float  # this process
    theirs: float  # processes named to `Watch`: the engine's own, or a server's
    others: float | None  # everybody else; what the host took from a virtual machine counts, too

    @property
    def is_disturbed(self) -> bool:
        return self.others is not None and self.others > BUSY_CORES

    def as_dict(self) -> dict[str, float | None]:
        return {"seconds": self.seconds, "ours": self.ours, "theirs": self.theirs, "others": self.others}


class Watch:
    """`with Watch(pids) as watch: ...`, then `watch.shares`. Cost: two small reads; resolution: a clock tick (10 ms) per core.

    pids   further processes that take part; their children count for them once they have been waited for
    """

    shares: Shares

    def __init__(self, pids: Callable[[], Iterable[int]] = lambda: ()) -> None:
        self._pids = pids

    def __enter__(self) -> "Watch":
        self._began = time.perf_counter(), own_seconds(), others_seconds(self._pids()), busy_seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        began, ours, theirs, busy = self._began
        elapsed = max(time.perf_counter() - began, 1e-9)
        ours, theirs = own_seconds() - ours, max(0.0, others_seconds(self._pids()) - theirs)
        now = busy_seconds()
        others = None if busy is None or now is None else max(0.0, now - busy - ours - theirs)
        if others is not None and others <= 4 / _TICK:  # below what the ticks of two counters can tell
            others = 0.0
        self.shares = Shares(elapsed, ours / elapsed, theirs / elapsed, None if others is None else others / elapsed)


def own_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def others_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes; those that are gone have none."""
    return sum(process_seconds(pid) for pid in pids)


def process_seconds(pid: int) -> float:
    """User and system time, with that of children that it has waited for. Source: proc(5), fields 14 to 17."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0.0
    return sum(int(value) for value in fields[11:15]) / _TICK


def busy_seconds(path: str = "/proc/stat") -> float | None:
    """Time that all cores together were not idle since the machine started, stolen time included; None where nobody says."""
    try:
        with open(path) as stat:
            name, *ticks = stat.readline().split()
    except (OSError, ValueError):
        return None
    if name != "cpu" or len(ticks) < 8:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(t) for t in ticks[:8])
    return (user + nice + system + irq + softirq + steal) / _TICK


def touch_memory(num_bytes: int) -> float:
    """Write to so much fresh memory and give it back; returns the seconds that it took.

    Virtual machines hand free memory back to their host, and pay up to 10 ms per MB when they touch it again. Whoever allocates
    first in a comparison would pay for both.
    """
    began = time.perf_counter()
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        page = mmap.PAGESIZE
        for start in range(0, num_bytes, page):
            memory[start] = 1
    return time.perf_counter() - began


def prepare_memory(wanted: int, free: int, *, say: Callable[[str], None] | None = None) -> float:
    """Touch what a run will need, at most half of what is free; says so. Returns the seconds that it took."""
    num_bytes = max(mmap.PAGESIZE, min(wanted, free // 2))
    took = touch_memory(num_bytes)
    line = f"touched {num_bytes / 2**30:.2f} GiB of memory in {took:.1f} s, so that nobody pays for its first use"
    (say or _to_stderr)(line)
    return took


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
