"""Python's side of the native attention: the KV pool, and a step's arrays as the C structs of `csrc/cpu/attention.h`."""

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels import build
from anabranch.kernels.layout import Ints, KVSpec, LayoutError, StepBatch

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3}
HUGE_PAGE = 2 << 20
_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class KVPoolStruct(ctypes.Structure):
    _fields_ = (
        ("data", _PTR),
        ("num_pages", _I64),
        *((name, _I32) for name in ("page_size", "num_layers", "num_kv_heads", "head_dim", "type")),
        *((name, _I32) for name in ("chunk", "padded_dim", "v_offset", "scale_offset")),
        *((name, _I64) for name in ("head_bytes", "page_bytes", "layer_bytes")),
    )


class StepViewStruct(ctypes.Structure):
    _fields_ = (
        *((name, _I32) for name in ("num_rows", "num_tokens", "num_trees", "num_groups", "num_page_ids", "reserved")),
        *((name, _PTR) for name in ("q_indptr", "kv_lens", "page_indptr", "page_ids")),
        *((name, _PTR) for name in ("tree_rows", "tree_indptr", "tree_parents", "groups")),
    )


class AttentionCallStruct(ctypes.Structure):
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
    library.anb_kv_layout.argtypes, library.anb_kv_layout.restype = [_PTR], _I64
    library.anb_attention_plan.argtypes, library.anb_attention_plan.restype = [], _PTR
    library.anb_attention_plan_free.argtypes, library.anb_attention_plan_free.restype = [_PTR], None
    library.anb_attention_begin.argtypes, library.anb_attention_begin.restype = [_PTR, _PTR, _PTR], ctypes.c_char_p
    library.anb_attention_write.argtypes, library.anb_attention_write.restype = [_PTR, _PTR, _I32, _PTR, _PTR], None
    library.anb_attention.argtypes, library.anb_attention.restype = [_PTR, _PTR], _I32
    return library


def _map_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Anonymous memory, in huge pages where the system has them: attention jumps between pages, and would miss the TLB at each."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class CpuKVPool:
    """KV pages in the native layout: `data` [num_layers, num_pages, bytes of a page], zeros that take no memory until they are written.

    `struct` is what native calls want; its address stays valid as long as the pool lives.
    """

    def __init__(self, spec: KVSpec, library: ctypes.CDLL | None = None) -> None:
        """Raises LayoutError if the spec is out of range, MemoryError with the sizes if it cannot be allocated."""
        if spec.dtype not in KV_TYPES:
            raise LayoutError(f"KV dtype must be one of {', '.join(KV_TYPES)}, got {spec.dtype!r}")
        self.spec = spec
        self.struct = KVPoolStruct(
            None, spec.num_pages, spec.page_size, spec.num_layers, spec.num_kv_heads, spec.head_dim, KV_TYPES[spec.dtype]
        )
        num_bytes = declare(library or build.load()).anb_kv_layout(ctypes.byref(self.struct))
        if num_bytes == 0:
            raise LayoutError(f"a KV pool needs positive sizes within reason, got {spec}")
        try:
            memory = _map_zeros(num_bytes + HUGE_PAGE)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"{spec.num_pages} KV pages of {num_bytes // spec.num_pages} bytes ({num_bytes / 2**20:.0f} MiB) do not fit in memory: "
                "ask for fewer pages or a smaller KV dtype"
            ) from error
        start = -memory.ctypes.data % HUGE_PAGE
        self.data = memory[start : start + num_bytes].reshape(spec.num_layers, spec.num_pages, -1)
        self.struct.data = self.data.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy whole pages in every layer. src and dst are disjoint. Raises LayoutError for a page outside the pool."""
        if len(src) != len(dst):
            raise LayoutError(f"{len(src)} source pages for {len(dst)} destinations")
        self._check(src)
        self._check(dst)
        for i, j in zip(src.tolist(), dst.tolist()):
            self.data[:, j] = self.data[:, i]

    def poison_pages(self, pages: NDArray[np.int32]) -> None:
        """Fill pages with NaN (debug): whatever reads a slot before it was written shows. int8 pages get NaN scales."""
        self._check(pages)
        bits = {"f32": 0x7FC00000, "f16": 0x7E007E00, "bf16": 0x7FC07FC0, "int8": 0x7FC00000}[self.spec.dtype]
        self.data.view(np.uint32)[:, pages] = bits

    def _check(self, pages: NDArray[np.int32]) -> None:
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.spec.num_pages:
            raise LayoutError(f"page ids {int(pages.min())} to {int(pages.max())} are not all in [0, {self.spec.num_pages})")


def _address(array: Ints) -> int:
    assert array.dtype == np.int32 and array.flags.c_contiguous, f"native calls take contiguous int32, got {array.dtype} {array.strides}"
    return array.ctypes.data


def step_view(batch: StepBatch) -> tuple[StepViewStruct, list[Any]]:
    """The batch as a C struct, and what must stay alive while it is used. The native side checks the values."""
    if len(batch.q_indptr) != batch.num_rows + 1 or len(batch.page_indptr) != batch.num_rows + 1:
        raise LayoutError(f"{batch.num_rows} rows need as many + 1 of q_indptr ({len(batch.q_indptr)}) and page_indptr ({len(batch.page_indptr)})")
    trees = [np.ascontiguousarray(tree.parents, np.int32) for tree in batch.trees]
    tree_rows = np.array([tree.row for tree in batch.trees], np.int32)
    tree_indptr = np.cumsum([0, *(len(parents) for parents in trees)], dtype=np.int32)
    tree_parents = np.concatenate(trees) if trees else np.empty(0, np.int32)
    groups = np.array([(g.first_row, g.last_row, g.num_tokens) for g in batch.groups], np.int32).reshape(-1, 3)
    arrays = [batch.q_indptr, batch.kv_lens, batch.page_indptr, batch.page_ids, tree_rows, tree_indptr, tree_parents, groups]
    arrays = [np.ascontiguousarray(array, np.int32) for array in arrays]
    view = StepViewStruct(
        batch.num_rows, batch.num_tokens, len(trees), len(groups), len(batch.page_ids), 0, *(_address(array) for array in arrays)
    )
    return view, arrays


class CpuAttention:
    """Attention alone, outside any model: what tests and benchmarks call."""

    def __init__(self, pool: CpuKVPool, library: ctypes.CDLL | None = None) -> None:
        self.pool = pool
        self._library = declare(library or build.load())
        self._plan = self._library.anb_attention_plan()

    def __del__(self) -> None:
        if plan := getattr(self, "_plan", None):
            self._library.anb_attention_plan_free(plan)

    def begin(self, batch: StepBatch) -> None:
        """Raises LayoutError, saying what does not fit together."""
        view, _alive = step_view(batch)
        if error := self._library.anb_attention_begin(self._plan, ctypes.byref(self.pool.struct), ctypes.byref(view)):
            raise LayoutError(error.decode())

    def write(self, layer: int, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Store the new tokens' k and v, [num_tokens, num_kv_heads, head_dim] each."""
        k, v = np.ascontiguousarray(k, np.float32), np.ascontiguousarray(v, np.float32)
        self._library.anb_attention_write(self._plan, ctypes.byref(self.pool.struct), layer, k.ctypes.data, v.ctypes.data)

    def attend(
        self, layer: int, q: NDArray[np.float32], *, scale: float, window: int | None = None
    ) -> NDArray[np.float32]:
        """Attention of q [num_tokens, num_q_heads, head_dim] over the pages of `layer`; same shape."""
        q = np.ascontiguousarray(q, np.float32)
        out = np.full_like(q, np.nan)
        stride = q.shape[1] * q.shape[2]
        call = AttentionCallStruct(layer, q.shape[1], scale, window or 0, q.ctypes.data, stride, out.ctypes.data, stride)
        if self._library.anb_attention(self._plan, ctypes.byref(call)):
            raise MemoryError("no memory for attention's scratch")
        return out
