"""What this machine has: the first thing to look at when something is slow or does not start."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from anabranch.kernels import build, registry
from anabranch.runtime.config import cache_dir
from anabranch.runtime.models_cache import DEFAULT

PACKAGES = (
    "anabranch",
    "torch",
    "numpy",
    "tokenizers",
    "transformers",
    "llguidance",
    "pyzmq",
    "msgspec",
    "flashinfer-python",
)
FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8")


def report() -> Iterator[tuple[str, str]]:
    """(what, finding), each on a line."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in PACKAGES:
        yield name, _version(name)
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES') / 2**30:.1f} GiB free"
    yield "processor", _processor()
    yield "instruction sets", " ".join(f for f in FEATURES if f in _cpu_flags()) or "none of those that the kernels use"
    yield "compiler", _tried(build.find_compiler)
    yield "kernels", _tried(lambda: registry.backend("auto").name)
    yield "cache directory", str(cache_dir())
    model = cache_dir() / "models" / DEFAULT.file_name
    yield "default model", str(model) if model.exists() else "not fetched yet: the first use does it (93 MB)"


def limits() -> Iterator[tuple[str, str]]:
    """Measured ceilings of this machine, medians of several runs: what a step can hope for."""
    for name, num_bytes in (("read 64 MiB (cache)", 64 << 20), ("read 1 GiB (memory)", 1 << 30)):
        data = np.ones(num_bytes // 4, np.float32)
        yield name, f"{num_bytes / _median_seconds(lambda d=data: d.sum()) / 1e9:.1f} GB/s, one thread"  # type: ignore[misc]
    a = np.ones((1536, 1536), np.float32)
    yield "f32 matrix product", f"{2 * 1536**3 / _median_seconds(lambda: a @ a) / 1e9:.0f} GFLOP/s, all threads"


def _median_seconds(action: Callable[[], object], repeats: int = 7) -> float:
    action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _tried(action: Callable[[], object]) -> str:
    try:
        return str(action())
    except Exception as fault:
        return f"none: {fault}"


def _cpu_info() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _cpu_flags() -> set[str]:
    line = next((line for line in _cpu_info().splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _processor() -> str:
    line = next((line for line in _cpu_info().splitlines() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.machine()
