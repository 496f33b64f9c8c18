"""What this machine can do at most, measured: the floors that speed is judged against.

A step can be no faster than the bytes that it must read at the rate of the memory they fit in, nor than its multiply-adds at the peak of
their kind.
"""

from dataclasses import dataclass

import numpy as np

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.quantize import Arena

ISA_NAMES = ("plain", "avx2", "avx512-vnni")
SIZES = tuple(mib << 20 for mib in (32, 64, 128, 256, 1024))  # from within a third level cache to beyond almost any


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of `num_threads` threads together. A multiply-add counts as two operations."""

    isa: str
    num_threads: int
    float_ops_per_s: float
    byte_ops_per_s: float
    read_bytes_per_s: dict[int, float]  # by the size of what is read over and over

    def read_rate(self, num_bytes: int) -> float:
        """Bytes per second for that much data, between the sizes measured."""
        sizes = sorted(self.read_bytes_per_s)
        rates = [self.read_bytes_per_s[size] for size in sizes]
        return float(np.interp(np.log2(max(num_bytes, 1)), np.log2(sizes), rates))


def measured_read_rate(num_bytes: int) -> float:
    """Bytes per second that the pool's threads read from `num_bytes` of memory, over and over."""
    memory = Arena().take(num_bytes)
    memory[::4096] = 1  # every page is there
    return float(native.library().anb_read_rate(memory.ctypes.data, num_bytes))


def measure(num_threads: int | None = None, sizes: tuple[int, ...] = SIZES) -> Limits:
    """Cost: one or two seconds, with every thread busy. Leaves the pool with `num_threads`. Raises build.BuildError."""
    library = native.library()
    if num_threads is not None:
        library.anb_set_num_threads(num_threads)
    return Limits(
        isa=ISA_NAMES[library.anb_isa()],
        num_threads=library.anb_num_threads(),
        float_ops_per_s=2 * library.anb_float_peak(),
        byte_ops_per_s=2 * library.anb_byte_peak(),
        read_bytes_per_s={size: measured_read_rate(size) for size in sizes},
    )
