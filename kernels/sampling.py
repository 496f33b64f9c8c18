"""Choosing tokens, by the book: the reference that every backend's sampler must agree with.

The order of precedence stands at `SamplingBatch`. Edits are float32, elementwise and vectorised over the batch; what reduces over the
vocabulary (softmax, cumulated sums) runs per row in float64, so that a row's draw cannot depend on its neighbours.
"""

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.layout import Ints, LayoutError, Sampled, SamplingBatch
from anabranch.kernels.random import uniform

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]


def sample(logits: F32, batch: SamplingBatch) -> Sampled:
    """Choose one token per row of `logits` [rows, vocab], which is not changed.

    Raises   LayoutError if the columns do not have one entry per row
    Cost     a copy of the logits only if something edits them; sorts only what top-k and top-p leave to be sorted
    """
    check_columns(logits, batch)
    healthy = np.isfinite(logits).all(axis=1)
    edited = edit_logits(logits, batch)
    draws = uniform(batch.seeds, batch.paths, batch.positions)
    token_ids = np.full(len(logits), -1, np.int32)
    for row in np.flatnonzero(healthy):
        token_ids[row] = choose(
            edited[row], float(batch.temperature[row]), int(batch.top_k[row]), float(batch.top_p[row]),
            float(batch.min_p[row]), float(draws[row]),
        )  # fmt: skip
    return Sampled(token_ids, *describe(logits, token_ids, batch.num_top_logprobs))


def choose(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float, draw: float) -> int:
    """One token of one row of edited logits; -1 if nothing is allowed.

    top-k keeps the k largest; top-p, of those, the shortest run by descending probability that reaches `top_p`; min-p, of those, what
    has at least `min_p` times the largest probability. Equal logits rank by id. `draw` in [0, 1) inverts the CDF over ascending ids.
    """
    best = int(np.argmax(logits))
    if not logits[best] > -np.inf:
        return -1
    if temperature == 0:
        return best
    ids = np.flatnonzero(logits > -np.inf)
    if 0 < top_k < len(ids):
        ids = ids[keep_largest(logits[ids], top_k)]
    weights = np.exp((logits[ids].astype(np.float64) - float(logits[best])) / temperature)
    if top_p < 1:
        kept = nucleus(weights, top_p)
        ids, weights = ids[kept], weights[kept]
    if min_p > 0:
        kept = weights >= min_p  # the largest weight is exactly 1
        ids, weights = ids[kept], weights[kept]
    cumulated = np.cumsum(weights)
    index = np.searchsorted(cumulated, draw * cumulated[-1], side="right")
    return int(ids[min(int(index), len(ids) - 1)])


def keep_largest(values: NDArray[np.floating], k: int) -> Bools:
    """The k largest of `values`, equal ones by position, as a mask."""
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    kept = values > threshold
    ties = np.flatnonzero(values == threshold)
    kept[ties[: k - np.count_nonzero(kept)]] = True
    return kept


def nucleus(weights: F64, top_p: float) -> Bools:
    """The shortest run of `weights`, in descending order, that reaches the share `top_p` of their sum; at least one."""
    order = np.argsort(-weights, kind="stable")
    cumulated = np.cumsum(weights[order])
    count = int(np.searchsorted(cumulated, top_p * cumulated[-1], side="left")) + 1
    kept = np.zeros(len(weights), np.bool_)
    kept[order[:count]] = True
    return kept


def edit_logits(logits: F32, batch: SamplingBatch) -> F32:
    """Penalties, bias, bans, mask and vocabulary limit; `logits` itself if there is nothing to edit."""
    vocab = logits.shape[1]
    limited = 0 < batch.vocab_limit < vocab
    if not (limited or batch.mask is not None or len(batch.bias_rows) or len(batch.penalty_rows)):
        return logits
    edited = logits.copy()
    if len(batch.penalty_rows):
        apply_penalties(edited, batch)
    if len(batch.bias_rows):
        np.add.at(edited, (batch.bias_rows, batch.bias_ids), batch.bias_values)
    if batch.mask is not None:
        edited[~unpack_mask(batch.mask, vocab)] = -np.inf
    if limited:
        edited[:, batch.vocab_limit :] = -np.inf
    return edited


def apply_penalties(edited: F32, batch: SamplingBatch) -> None:
    """Repetition over the whole context, presence and frequency over what was generated. In place."""
    rows, ids, counts = batch.penalty_rows, batch.penalty_ids, batch.penalty_counts
    values = edited[rows, ids]
    if batch.repetition_penalty is not None:
        penalty = batch.repetition_penalty[rows]
        values = np.where(values > 0, values / penalty, values * penalty)
    if batch.presence_penalty is not None:
        values = values - batch.presence_penalty[rows] * (counts > 0)
    if batch.frequency_penalty is not None:
        values = values - batch.frequency_penalty[rows] * counts.astype(np.float32)
    edited[rows, ids] = values


def unpack_mask(mask: NDArray[np.uint32], vocab: int) -> Bools:
    """Bit i of a row, counted from the lowest of word 0, says whether token i is allowed. Returns [rows, vocab]."""
    octets = np.ascontiguousarray(mask).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=vocab, bitorder="little").view(np.bool_)


def describe(logits: F32, token_ids: Ints, num_top: Ints) -> tuple[F32, tuple[tuple[Ints, F32] | None, ...]]:
    """Raw logprobs of the chosen tokens, and the most likely ones, where `num_top` asks for them."""
    logprobs = np.full(len(logits), np.nan, np.float32)
    tops: list[tuple[Ints, F32] | None] = [None] * len(logits)
    for row in np.flatnonzero((num_top >= 0) & (token_ids >= 0)):
        norm = log_sum_exp(logits[row])
        logprobs[row] = float(logits[row, token_ids[row]]) - norm
        if num_top[row] > 0:
            ids = most_likely(logits[row], int(num_top[row]))
            tops[row] = ids, (logits[row, ids].astype(np.float64) - norm).astype(np.float32)
    return logprobs, tuple(tops)


def logprobs_of(logits: F32, rows: Ints, ids: Ints) -> tuple[F32, Bools]:
    """Raw log-softmax of logits[rows[j], ids[j]], and whether ids[j] is that row's argmax (ties: the lowest id)."""
    used, place = np.unique(rows, return_inverse=True)
    norms = np.array([log_sum_exp(logits[row]) for row in used], np.float64)[place]
    best = np.array([np.argmax(logits[row]) for row in used], np.int64)[place]
    return (logits[rows, ids] - norms).astype(np.float32), best == ids


def top_logprobs(logits: F32, rows: Ints, k: int) -> tuple[Ints, F32]:
    """Ids and raw logprobs of the k most likely tokens of each row, descending, ties by id: [len(rows), k] each."""
    if not 0 <= k <= logits.shape[1]:
        raise LayoutError(f"k must be in 0..{logits.shape[1]} (the vocabulary), got {k}")
    ids = np.stack([most_likely(logits[row], k) for row in rows]) if len(rows) else np.empty((0, k), np.int32)
    norms = np.array([log_sum_exp(logits[row]) for row in rows], np.float64)
    return ids, (logits[np.asarray(rows)[:, None], ids] - norms[:, None]).astype(np.float32)


def most_likely(logits: F32, k: int) -> Ints:
    if k == 0:
        return np.empty(0, np.int32)
    ids = np.flatnonzero(keep_largest(logits, k)) if k < len(logits) else np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")].astype(np.int32)


def log_sum_exp(logits: F32) -> float:
    """In float64; NaN if a logit is NaN."""
    values = logits.astype(np.float64)
    highest = values.max()
    if not np.isfinite(highest):
        return float("nan")
    return float(highest + np.log(np.exp(values - highest).sum()))


def check_columns(logits: F32, batch: SamplingBatch) -> None:
    rows = len(logits)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "paths", "positions", "num_top_logprobs"):
        if len(getattr(batch, name)) != rows:
            raise LayoutError(f"{name} has {len(getattr(batch, name))} entries for {rows} rows of logits")
    words = -(-logits.shape[1] // 32)
    if batch.mask is not None and batch.mask.shape != (rows, words):
        raise LayoutError(f"mask has shape {batch.mask.shape}, needs {(rows, words)}")
