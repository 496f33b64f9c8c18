"""Rotary frequencies for each published scaling of context length.

Source: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); Peng et al. 2023 (YaRN); Llama 3.1 (llama3), as transformers
computes them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. Fields that a kind does not use keep their defaults.

    "dynamic" (NTK by length) changes nothing up to `original_context`, and nothing longer is served: it equals "none".
    "factors" divides each base frequency by a number of its own (`rope_freqs` of a GGUF file).
    """

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "factors"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Floats, float]:
    """Angles per position of each half-split pair, [head_dim / 2] float64, and what multiplies cos and sin."""
    base = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling.kind:
        case "none" | "dynamic":
            return base, 1.0
        case "linear":
            return base / scaling.factor, 1.0
        case "factors":
            return base / np.asarray(scaling.factors, np.float64), 1.0
        case "llama3":
            return _llama3(base, scaling), 1.0
        case "yarn":
            return _yarn(base, head_dim, theta, scaling), _yarn_magnitude(scaling)


def _llama3(base: Floats, s: RopeScaling) -> Floats:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = s.original_context * base / (2 * math.pi)  # over the original context
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return (1 - keep) * base / s.factor + keep * base


def _yarn(base: Floats, head_dim: int, theta: float, s: RopeScaling) -> Floats:
    """As llama3, but blended linearly in the index of the pair, from what turns beta_fast times to beta_slow."""

    def index_of(turns: float) -> float:
        return head_dim * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(s.beta_fast), index_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return base / s.factor * stretch + base * (1 - stretch)


def _yarn_magnitude(s: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)
