"""Tensors as they lie in a file, and what their bytes mean.

Block layouts follow the GGUF specification (ggml `ggml-common.h`). `dequantize` is the plain reference: float32, by the book.
"""

from collections.abc import Callable
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


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(raw: RawTensor) -> Floats:
    """The tensor's values, of its shape, by the format's definition: products of scales and codes are exact, one sum rounds.

    Raises   ValueError for an unknown format, or rows that are not whole blocks
    Cost     several passes over 4 bytes per value: for tests and the reference, not for speed
    """
    if raw.format not in FORMATS:
        raise ValueError(f"{raw.name}: unknown format {raw.format!r}, expected one of {', '.join(FORMATS)}")
    form, columns = FORMATS[raw.format], raw.shape[-1]
    if columns % form.block:
        raise ValueError(f"{raw.name}: rows of {columns} values are not whole blocks of {form.block} ({form.name})")
    blocks = np.ascontiguousarray(raw.data).reshape(-1, form.num_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # a broken scale gives infinities, as it does everywhere else
        return _DECODERS[form.name](blocks).reshape(raw.shape)


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles of each block's bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32).copy()


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _halves(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _halves(blocks, 0) * codes + _halves(blocks, 2)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and mins of the 8 sub-blocks of Q4_K and Q5_K, [blocks, 8, 1] each, from 12 bytes of 6-bit numbers."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    mins = np.concatenate([mid & 63, high >> 4 | (mid >> 6) << 4], axis=-1)
    return scales.astype(np.float32)[..., None], mins.astype(np.float32)[..., None]


def _k_blocks(blocks: Bytes, codes: Bytes) -> Floats:
    scales, mins = _k_scales(blocks[:, 4:16])
    return _halves(blocks, 0)[..., None] * scales * codes - _halves(blocks, 2)[..., None] * mins


def _q4_k(blocks: Bytes) -> Floats:
    return _k_blocks(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).astype(np.uint8)
    return _k_blocks(blocks, (low | fifth << 4).astype(np.uint8))


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    return _halves(blocks, 208)[..., None] * blocks[:, 192:208].view(np.int8)[..., None] * codes


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1,
    "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
