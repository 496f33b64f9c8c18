"""What this machine has: the first thing to look at when something is slow or does not start."""

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

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
    yield "kernels", _tried(lambda: registry.backend("auto", cache_dir=cache_dir() / "native").name)
    yield "cache directory", str(cache_dir())
    model = cache_dir() / "models" / DEFAULT.file_name
    yield "default model", str(model) if model.exists() else "not fetched yet: the first use does it (93 MB)"


def limits() -> Iterator[tuple[str, str]]:
    """Measured ceilings of this machine, all threads: what a step can hope for. Raises BuildError without a compiler."""
    from anabranch.kernels.limits import measure

    found = measure()
    yield "kernels", f"{found.isa}, {found.num_threads} threads"
    yield "8-bit products", f"{found.byte_ops_per_s / 1e9:,.0f} G operations/s"
    yield "f32 products", f"{found.float_ops_per_s / 1e9:,.0f} GFLOP/s"
    for num_bytes, rate in found.read_bytes_per_s.items():
        yield f"read {num_bytes >> 20} MiB", f"{rate / 1e9:.1f} GB/s"


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
