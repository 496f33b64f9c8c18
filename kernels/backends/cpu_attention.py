"""Native attention alone, outside any model: what tests and measurements call. A model's step runs it from the executor instead."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.backends.cpu import CpuKVPool
from anabranch.kernels.layout import Ints, LayoutError, StepBatch

F32 = NDArray[np.float32]
_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class StepView(ctypes.Structure):
    """`StepView` of csrc/cpu/attention.h."""

    _fields_ = (
        *((name, _I32) for name in ("num_rows", "num_tokens", "num_trees", "num_groups", "num_page_ids", "reserved")),
        *((name, _PTR) for name in ("q_indptr", "kv_lens", "page_indptr", "page_ids")),
        *((name, _PTR) for name in ("tree_rows", "tree_indptr", "tree_parents", "groups")),
    )


class AttentionCall(ctypes.Structure):
    """`AttentionCall` of csrc/cpu/attention.h."""

    _fields_ = (
        ("layer", _I32),
        ("num_q_heads", _I32),
        ("scale", ctypes.c_float),
        ("window", _I32),
        ("q", _PTR),
        ("q_stride", _I64),
        ("out", _PTR),
        ("out_stride", _I64),
    )


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the attention functions of `library` their types."""
    library.anb_attention_plan.argtypes, library.anb_attention_plan.restype = [], _PTR
    library.anb_attention_plan_free.argtypes, library.anb_attention_plan_free.restype = [_PTR], None
    library.anb_attention_begin.argtypes, library.anb_attention_begin.restype = [_PTR, _PTR, _PTR], ctypes.c_char_p
    library.anb_attention_write.argtypes, library.anb_attention_write.restype = [_PTR, _PTR, _I32, _PTR, _PTR], None
    library.anb_attention.argtypes, library.anb_attention.restype = [_PTR, _PTR], _I32
    return library


def step_view(batch: StepBatch) -> tuple[StepView, list[Any]]:
    """The batch as a C struct, and what must stay alive while it is used. The native side checks the values."""
    if len(batch.q_indptr) != batch.num_rows + 1 or len(batch.page_indptr) != batch.num_rows + 1:
        raise LayoutError(
            f"{batch.num_rows} rows need one more of q_indptr ({len(batch.q_indptr)}) and of page_indptr ({len(batch.page_indptr)})"
        )
    parents = [tree.parents for tree in batch.trees]
    lists: tuple[Any, ...] = (
        batch.q_indptr, batch.kv_lens, batch.page_indptr, batch.page_ids, [tree.row for tree in batch.trees],
        np.cumsum([0, *(len(p) for p in parents)]), np.concatenate(parents) if parents else [],
        [(g.first_row, g.last_row, g.num_tokens) for g in batch.groups],
    )  # fmt: skip
    arrays: list[Ints] = [np.ascontiguousarray(values, np.int32) for values in lists]
    counts = (batch.num_rows, batch.num_tokens, len(batch.trees), len(batch.groups), len(batch.page_ids), 0)
    return StepView(*counts, *(array.ctypes.data for array in arrays)), arrays


class CpuAttention:
    """begin(batch), then write and attend per layer. Not for concurrent use."""

    def __init__(self, pool: CpuKVPool) -> None:
        self.pool = pool
        self._library = declare(native.library())
        self._plan = self._library.anb_attention_plan()
        self._num_tokens = 0

    def __del__(self) -> None:
        if plan := getattr(self, "_plan", None):
            self._library.anb_attention_plan_free(plan)

    def begin(self, batch: StepBatch) -> None:
        """Raises LayoutError, saying what does not fit together."""
        view, _alive = step_view(batch)
        if error := self._library.anb_attention_begin(self._plan, ctypes.byref(self.pool.layout), ctypes.byref(view)):
            raise LayoutError(error.decode())
        self._num_tokens = batch.num_tokens

    def write(self, layer: int, k: F32, v: F32) -> None:
        """Store the new tokens' k and v, [num_tokens, num_kv_heads, head_dim] each."""
        spec = self.pool.spec
        for array in (k, v):
            self._check(array, (self._num_tokens, spec.num_kv_heads, spec.head_dim))
        k, v = np.ascontiguousarray(k, np.float32), np.ascontiguousarray(v, np.float32)
        self._library.anb_attention_write(self._plan, ctypes.byref(self.pool.layout), layer, k.ctypes.data, v.ctypes.data)

    def attend(self, layer: int, q: F32, *, scale: float, window: int | None = None) -> F32:
        """Attention of q [num_tokens, num_q_heads, head_dim] over the pages of `layer`; same shape."""
        self._check(q, (self._num_tokens, q.shape[1], self.pool.spec.head_dim))
        if q.shape[1] % self.pool.spec.num_kv_heads:
            raise LayoutError(f"{q.shape[1]} query heads cannot share {self.pool.spec.num_kv_heads} KV heads evenly")
        q = np.ascontiguousarray(q, np.float32)
        out = np.full_like(q, np.nan)
        stride = q.shape[1] * q.shape[2]
        call = AttentionCall(layer, q.shape[1], scale, window or 0, q.ctypes.data, stride, out.ctypes.data, stride)
        if self._library.anb_attention(self._plan, ctypes.byref(call)):
            raise MemoryError("no memory for attention's scratch")
        return out

    @staticmethod
    def _check(array: F32, shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise LayoutError(f"expected an array of shape {shape}, got {array.shape}")
