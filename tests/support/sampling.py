"""Sampling by the rules of `SamplingBatch`, one row at a time, in float64, with no cleverness at all."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.layout import SamplingBatch
from anabranch.kernels.random import uniform

SLACK = 1e-5  # of a probability: what float32 weights may shift a step of the CDF, or an edge of the nucleus


def batch_of(rows: int, rng: np.random.Generator | None = None, **columns: Any) -> SamplingBatch:
    """A batch of plain draws; scalars among `columns` apply to every row. Seeds, paths and positions are drawn from `rng`."""
    rng = rng or np.random.default_rng(0)
    plain: dict[str, tuple[Any, type]] = {
        "temperature": (1.0, np.float32), "top_k": (0, np.int32), "top_p": (1.0, np.float32), "min_p": (0.0, np.float32),
        "num_top_logprobs": (-1, np.int32),
    }  # fmt: skip
    per_row = {name: np.array(np.broadcast_to(columns.pop(name, value), rows), dtype) for name, (value, dtype) in plain.items()}
    keys = {name: rng.integers(0, 2**64, rows, dtype=np.uint64) for name in ("seeds", "paths", "positions")}
    return SamplingBatch(**per_row, **keys, **columns)


def mask_of(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    rows, vocab = allowed.shape
    padded = np.zeros((rows, -(-vocab // 32) * 32), np.bool_)
    padded[:, :vocab] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def raw_logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    return x - (x.max() + np.log(np.exp(x - x.max()).sum()))


def edited_row(logits: NDArray[np.float32], batch: SamplingBatch, row: int) -> NDArray[np.float32]:
    x = logits[row].copy()
    for j in np.flatnonzero(batch.penalty_rows == row):
        i, count = batch.penalty_ids[j], batch.penalty_counts[j]
        if batch.repetition_penalty is not None:
            x[i] = x[i] / batch.repetition_penalty[row] if x[i] > 0 else x[i] * batch.repetition_penalty[row]
        if batch.presence_penalty is not None and count > 0:
            x[i] -= batch.presence_penalty[row]
        if batch.frequency_penalty is not None:
            x[i] -= batch.frequency_penalty[row] * np.float32(count)
    for j in np.flatnonzero(batch.bias_rows == row):
        x[batch.bias_ids[j]] += batch.bias_values[j]
    if batch.mask is not None:
        allowed = np.unpackbits(batch.mask[row].view(np.uint8), bitorder="little")[: len(x)].astype(np.bool_)
        x[~allowed] = -np.inf
    if batch.vocab_limit:
        x[batch.vocab_limit :] = -np.inf
    return x


def oracle_token(logits: NDArray[np.float32], batch: SamplingBatch, row: int) -> set[int]:
    """The token of one row; several where a draw or the nucleus lies within SLACK of an edge."""
    x = edited_row(logits, batch, row)
    ranked = sorted(np.flatnonzero(x > -np.inf).tolist(), key=lambda i: (-x[i], i))
    if not ranked:
        return {-1}
    temperature = float(batch.temperature[row])
    if temperature == 0:
        return {ranked[0]}
    if batch.top_k[row] > 0:
        ranked = ranked[: batch.top_k[row]]
    weight = {i: float(np.exp((float(x[i]) - float(x[ranked[0]])) / temperature)) for i in ranked}
    draw = float(uniform(batch.seeds[row], batch.paths[row], batch.positions[row])[0])
    least = float(batch.min_p[row])
    found = set()
    for top_p in {float(batch.top_p[row]), float(batch.top_p[row]) - SLACK, float(batch.top_p[row]) + SLACK}:
        for floor in {least, least * (1 - SLACK), least * (1 + SLACK)} if least < 1 else {1.0}:
            kept = [i for i in nucleus(ranked, weight, top_p if batch.top_p[row] < 1 else 2.0) if weight[i] >= floor or i == ranked[0]]
            found |= {invert(sorted(kept), weight, draw + shift) for shift in (-SLACK, 0.0, SLACK)}
    return found


def nucleus(ranked: list[int], weight: dict[int, float], top_p: float) -> list[int]:
    total, mass = sum(weight.values()), 0.0
    for count, i in enumerate(ranked, 1):
        mass += weight[i]
        if mass >= top_p * total:
            return ranked[:count]
    return ranked


def invert(ids: list[int], weight: dict[int, float], draw: float) -> int:
    target = draw * sum(weight[i] for i in ids)
    mass = 0.0
    for i in ids:
        mass += weight[i]
        if mass > target:
            return i
    return ids[-1]
