"""Sampling and log-probabilities over native calls: `sample`, `logprobs_of` and `top_logprobs` of `kernels/interface.py` on float32 arrays.

The rules are those of `SamplingBatch`; where it leaves something open (ties, the shortest nucleus), `csrc/cpu/sampling.h` says what holds.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.layout import Ints, LayoutError, Sampled, SamplingBatch

F32 = NDArray[np.float32]
NO_EDITS: list[NDArray[Any]] = [np.empty(0, np.int32)] * 3
_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class SamplingView(ctypes.Structure):
    _fields_ = (
        ("logits", _PTR),
        ("stride", _I64),
        *((name, _I32) for name in ("num_rows", "vocab", "vocab_limit", "mask_words")),
        *((name, _PTR) for name in ("mask", "temperature", "top_k", "top_p", "min_p", "seeds", "paths", "positions")),
        ("num_top_logprobs", _PTR),
        *((name, _I32) for name in ("num_bias", "num_penalties")),
        *((name, _PTR) for name in ("bias_rows", "bias_ids", "bias_values")),
        *((name, _PTR) for name in ("penalty_rows", "penalty_ids", "penalty_counts")),
        *((name, _PTR) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
    )


class SampledView(ctypes.Structure):
    _fields_ = (("token_ids", _PTR), ("logprobs", _PTR), ("top_ids", _PTR), ("top_logprobs", _PTR), ("max_top", _I64))


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the sampling functions of `library` their types."""
    library.anb_sample.argtypes, library.anb_sample.restype = [_PTR, _PTR], None
    library.anb_logprobs_of.argtypes = [_PTR, _I64, _I32, _PTR, _PTR, _I32, _PTR, _PTR]
    library.anb_logprobs_of.restype = None
    library.anb_top_logprobs.argtypes = [_PTR, _I64, _I32, _PTR, _I32, _I32, _PTR, _PTR]
    library.anb_top_logprobs.restype = None
    return library


def address(array: NDArray[Any]) -> int | None:
    """Where a contiguous array's data lies; None if it has none. A third of the time that `array.ctypes.data` takes: a step asks often."""
    if not array.size:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(array)) if array.flags.writeable else array.ctypes.data  # type: ignore[arg-type]  # an array is a buffer


def sample(library: ctypes.CDLL, logits: F32, batch: SamplingBatch) -> Sampled:
    """Choose one token per row of `logits` [rows, vocab], which is only read. Raises LayoutError if the columns do not fit."""
    rows, vocab = _check_logits(logits)
    num_top = _column(batch.num_top_logprobs, np.int32, rows, "num_top_logprobs")
    max_top = max(0, int(num_top.max(initial=0)))
    if max_top > vocab:
        raise LayoutError(f"num_top_logprobs must be at most {vocab} (the vocabulary), got {max_top}")
    token_ids, logprobs = np.empty(rows, np.int32), np.empty(rows, np.float32)
    top_ids, top_logprobs = np.empty((rows, max_top), np.int32), np.empty((rows, max_top), np.float32)
    view, _alive = _view(logits, batch, num_top)
    sampled = SampledView(*map(address, (token_ids, logprobs, top_ids, top_logprobs)), max_top)
    library.anb_sample(ctypes.byref(view), ctypes.byref(sampled))
    wanted = [(row, count) for row, count in enumerate(num_top.tolist()) if count > 0 and token_ids[row] >= 0]
    tops: list[tuple[Ints, F32] | None] = [None] * rows
    for row, count in wanted:
        tops[row] = top_ids[row, :count], top_logprobs[row, :count]
    return Sampled(token_ids, logprobs, tuple(tops))


def logprobs_of(library: ctypes.CDLL, logits: F32, rows: Ints, ids: Ints) -> tuple[F32, NDArray[np.bool_]]:
    """Raw log-softmax of logits[rows[j], ids[j]], and whether ids[j] is that row's argmax. One pass per run of equal rows."""
    num_rows, vocab = _check_logits(logits)
    rows, ids = _indices(rows, num_rows, "row"), _indices(ids, vocab, "token id")
    if len(rows) != len(ids):
        raise LayoutError(f"{len(rows)} rows for {len(ids)} token ids")
    logprobs, is_argmax = np.empty(len(ids), np.float32), np.empty(len(ids), np.bool_)
    library.anb_logprobs_of(
        logits.ctypes.data, _stride(logits), vocab, rows.ctypes.data, ids.ctypes.data, len(ids), logprobs.ctypes.data, is_argmax.ctypes.data
    )  # fmt: skip
    return logprobs, is_argmax


def top_logprobs(library: ctypes.CDLL, logits: F32, rows: Ints, k: int) -> tuple[Ints, F32]:
    """Ids and raw logprobs of the k most likely tokens of each row, descending, ties by id: [len(rows), k] each."""
    num_rows, vocab = _check_logits(logits)
    if not 0 <= k <= vocab:
        raise LayoutError(f"k must be in 0..{vocab} (the vocabulary), got {k}")
    rows = _indices(rows, num_rows, "row")
    ids, logprobs = np.empty((len(rows), k), np.int32), np.empty((len(rows), k), np.float32)
    library.anb_top_logprobs(
        logits.ctypes.data, _stride(logits), vocab, rows.ctypes.data, len(rows), k, ids.ctypes.data, logprobs.ctypes.data
    )  # fmt: skip
    return ids, logprobs


def _check_logits(logits: F32) -> tuple[int, int]:
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] < 1 or logits.strides[1] != 4:
        raise LayoutError(f"logits must be float32 [rows, vocab] with contiguous rows, got {logits.dtype} {logits.shape}")
    return logits.shape


def _stride(logits: F32) -> int:
    return logits.strides[0] // 4 if len(logits) > 1 else logits.shape[1]


def _indices(values: Ints, limit: int, what: str) -> Ints:
    values = np.ascontiguousarray(values, np.int32)
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise LayoutError(f"each {what} must be in [0, {limit}), got {int(values.min())} to {int(values.max())}")
    return values


def _column(values: NDArray[Any], dtype: type[np.generic], length: int, name: str) -> NDArray[Any]:
    if len(values) != length:
        raise LayoutError(f"{name} has {len(values)} entries for {length} rows")
    return np.ascontiguousarray(values, dtype)


def _edits(batch: SamplingBatch, rows: int, vocab: int) -> list[NDArray[Any]]:
    """The sparse edits' columns, checked: the native side trusts them."""
    columns = []
    for kind, values, dtype in (("bias", "values", np.float32), ("penalty", "counts", np.int32)):
        edit_rows = _indices(getattr(batch, f"{kind}_rows"), rows, f"{kind} row")
        if not len(edit_rows) and not len(getattr(batch, f"{kind}_ids")) and not len(getattr(batch, f"{kind}_{values}")):
            columns += NO_EDITS
            continue
        if (np.diff(edit_rows) < 0).any():
            raise LayoutError(f"{kind}_rows must ascend")
        ids = _column(getattr(batch, f"{kind}_ids"), np.int32, len(edit_rows), f"{kind}_ids")
        edits = _column(getattr(batch, f"{kind}_{values}"), dtype, len(edit_rows), f"{kind}_{values}")
        columns += [edit_rows, _indices(ids, vocab, f"{kind} id"), edits]
    return columns


def _mask(mask: NDArray[np.uint32] | None, rows: int, vocab: int) -> NDArray[np.uint32] | None:
    if mask is None:
        return None
    if mask.shape != (rows, -(-vocab // 32)):
        raise LayoutError(f"the mask must be [{rows}, {-(-vocab // 32)}] words for {rows} rows of {vocab} tokens, got {mask.shape}")
    return np.ascontiguousarray(mask, np.uint32)


def _view(logits: F32, batch: SamplingBatch, num_top: Ints) -> tuple[SamplingView, list[Any]]:
    """The batch as a C struct, and what must stay alive while it is used."""
    rows, vocab = logits.shape
    mask = _mask(batch.mask, rows, vocab)
    columns = [
        _column(getattr(batch, name), dtype, rows, name)
        for name, dtype in (
            ("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32),
            ("seeds", np.uint64), ("paths", np.uint64), ("positions", np.uint64),
        )
    ]  # fmt: skip
    edits = _edits(batch, rows, vocab)
    penalties = [
        None if (values := getattr(batch, name)) is None else _column(values, np.float32, rows, name)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ]
    view = SamplingView(
        logits.ctypes.data, _stride(logits), rows, vocab, batch.vocab_limit, 0 if mask is None else mask.shape[1],
        None if mask is None else address(mask), *map(address, columns), address(num_top),
        len(edits[0]), len(edits[3]), *map(address, edits), *(None if p is None else address(p) for p in penalties),
    )  # fmt: skip
    return view, [mask, columns, num_top, edits, penalties]
