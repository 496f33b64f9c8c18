"""Random weights in every file format, and what products with them must give."""

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.formats import FORMATS, RawTensor, dequantize

Floats = NDArray[np.float32]
# Where each block keeps half-precision numbers: random bytes there would be infinities.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# About the root mean square of (scale of the sub-block times) a random code: what makes formats alike.
CODE_SIZE = {"Q8_0": 74, "Q4_0": 4.6, "Q4_1": 8.8, "Q5_0": 9.2, "Q5_1": 18, "Q4_K": 317, "Q5_K": 650, "Q6_K": 1369}
EXACT_IN_PANELS = tuple(HALVES)  # formats whose codes are kept; the others are rounded to 8 bits


def from_floats(name: str, values: Floats, form: str = "F32") -> RawTensor:
    """A float tensor; BF16 drops the low bits."""
    values = np.ascontiguousarray(values, np.float32)
    if form == "F32":
        data = values.view(np.uint8)
    elif form == "F16":
        data = values.astype(np.float16).view(np.uint8)
    else:
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return RawTensor(name, form, values.shape, data.reshape(values.shape[0] if values.ndim == 2 else 1, -1))


def random_raw(form: str, rows: int, columns: int, seed: int = 0, spread: float = 0.02) -> RawTensor:
    """Weights of about four times `spread`, any bytes being valid codes."""
    rng = np.random.default_rng(seed)
    if form in ("F32", "F16", "BF16"):
        return from_floats("w", rng.normal(0, 4 * spread, (rows, columns)).astype(np.float32), form)
    block = FORMATS[form]
    data = rng.integers(0, 256, (rows, columns // block.block * block.num_bytes), dtype=np.uint8)
    blocks = data.reshape(-1, block.num_bytes)
    for start in HALVES[form]:
        scales = rng.normal(0, 4 * spread / CODE_SIZE[form], (len(blocks), 1))
        blocks[:, start : start + 2] = scales.astype(np.float16).view(np.uint8)
    return RawTensor("w", form, (rows, columns), data)


def random_rows(rows: int, columns: int, seed: int = 0) -> Floats:
    """Activations with what real ones have: outliers, zeros, very small and large rows."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (rows, columns)) * np.exp(rng.normal(0, 2, (rows, 1)))
    x[rng.random(x.shape) < 0.01] *= 100
    x[rng.random(x.shape) < 0.1] = 0
    return x.astype(np.float32)


def in_groups(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[rows, columns] to [rows, groups, 32], zeros at the end."""
    rows, columns = values.shape
    padded = np.zeros((rows, -(-columns // 32) * 32))
    padded[:, :columns] = values
    return padded.reshape(rows, -1, 32)


def true_product(raw: RawTensor, x: Floats) -> NDArray[np.float64]:
    return x.astype(np.float64) @ dequantize(raw).astype(np.float64).T


def rounding_bound(raw: RawTensor, x: Floats) -> NDArray[np.float64]:
    """How far a fast product may be from the true one, [rows, matrix rows].

    Each activation is off by half a step of its group, each float weight by half a step of its own; f32 sums add a little.
    """
    weights, rows = in_groups(dequantize(raw).astype(np.float64)), in_groups(x.astype(np.float64))
    step = np.abs(rows).max(axis=2) / 127
    bound = 0.5 * np.einsum("rg,ngk->rn", step, np.abs(weights))
    if raw.format not in EXACT_IN_PANELS:
        weight_step = np.abs(weights).max(axis=2) / 127
        bound += 0.5 * np.einsum("rgk,ng->rn", np.abs(rows) + step[..., None], weight_step)
    magnitude = np.einsum("rgk,ngk->rn", np.abs(rows), np.abs(weights))
    return bound * 1.002 + magnitude * 4e-6 + 1e-30
