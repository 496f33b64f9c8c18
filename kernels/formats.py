"""Tensors as they lie in a file, and what their bytes mean.

Block layouts follow the GGUF specification (ggml `ggml-common.h`). `dequantize` is the plain reference: float32, by the book.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block` consecutive values of a row take `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("F32", 1, 4),
        BlockFormat("F16", 1, 2),
        BlockFormat("BF16", 1, 2),
        BlockFormat("Q8_0", 32, 34),
        BlockFormat("Q4_0", 32, 18),
        BlockFormat("Q4_1", 32, 20),
        BlockFormat("Q5_0", 32, 22),
        BlockFormat("Q5_1", 32, 24),
        BlockFormat("Q4_K", 256, 144),
        BlockFormat("Q5_K", 256, 176),
        BlockFormat("Q6_K", 256, 210),
    )
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in its file form. `data` is a uint8 view [rows, bytes per row] (vectors: one row), often mapped, never written.

    shape is (rows, columns) or (columns,), row-major, outermost first.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
