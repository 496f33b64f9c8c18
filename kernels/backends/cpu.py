"""The native CPU backend: a model's forward is recorded once as a tape, and each step replays it in one native call.

Quantized weights stay quantized, and activations are rounded to 8 bits per row and group of 32 on their way into a matrix product
(`precision="fast"`), or everything is computed in float32 (`"exact"`). Both are batch invariant bit for bit: see `csrc/cpu/linear.h`
and `csrc/cpu/attention.h`. Calls release the GIL. One thread pool serves the process; concurrent calls take turns.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.backends import cpu_sampling
from anabranch.kernels.backends.cpu_native import OpKind
from anabranch.kernels.formats import RawTensor, dequantize
from anabranch.kernels.interface import AttentionShape, Forward, Rope
from anabranch.kernels.layout import Ints, KVSpec, LayoutError, Sampled, SamplingBatch, StepBatch
from anabranch.kernels.packed_cache import PackedCache, WeightStore
from anabranch.kernels.quantize import FORMAT_CODES, PANEL_COLUMNS, Arena, PackedPart, Packer, check_matrix

Floats = NDArray[np.float32]
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "int16": 4, "int8": 3}
MAX_UNIT_PANELS = 16  # of the heads that one task projects; see kMaxPanels in executor.cpp
OP_NAMES = ("embed", "attention_input", "attention", "linear_add", "gated_mlp_input", "logits")  # by OpKind


class CpuMatrix:
    """Weights as files have them, packed into panels when first multiplied with (a table that is only read never is)."""

    def __init__(self, packer: Packer, parts: Sequence[RawTensor], bias: Sequence[RawTensor]) -> None:
        if not parts:
            raise LayoutError("a matrix needs at least one part")
        for part in parts:
            check_matrix(part)
        if len({part.shape[1] for part in parts}) > 1:
            raise LayoutError(f"parts of one matrix differ in columns: {[(part.name, part.shape) for part in parts]}")
        self.num_rows, self.k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self._packer, self._parts = packer, tuple(parts)
        self._bias = np.concatenate([_vector(part) for part in bias]) if bias else None
        if self._bias is not None and len(self._bias) != self.num_rows:
            raise LayoutError(f"{parts[0].name}: bias of {len(self._bias)} values for {self.num_rows} rows")
        self._packed: list[PackedPart] = []
        self._panels: NDArray[np.void] | None = None
        self._native = native.Matrix()
        self._is_paired = False

    @property
    def num_panels(self) -> int:
        return sum(-(-part.shape[0] // PANEL_COLUMNS) for part in self._parts)

    def native_matrix(self, *, paired: bool = False) -> native.Matrix:
        """The packed matrix; valid as long as this object. Paired: panel i of the first half of rows, then panel i of the second half."""
        if self._panels is None:
            self._packed = self._packer.pack(self._parts, interleave=paired)
            self._panels = _panel_table(self._packed)
            if paired:
                self._panels = self._panels.reshape(2, -1).T.flatten()
            bias = None if self._bias is None else self._bias.ctypes.data
            self._native = native.Matrix(
                self._panels.ctypes.data, bias, len(self._panels), self.num_rows, self.k, int(self._packer.is_exact)
            )
            self._is_paired = paired
        assert self._is_paired == paired, "one matrix is used in two ways that need different orders"
        return self._native

    def native_table(self) -> native.Table:
        """The rows as they lie in the file; valid as long as this object."""
        if len(self._parts) != 1:
            raise LayoutError("an embedding table is one tensor")
        raw = self._parts[0]
        return native.Table(raw.data.ctypes.data, raw.data.strides[0], self.num_rows, self.k, FORMAT_CODES[raw.format], 0)

    def multiply(self, x: Floats) -> Floats:
        """x [rows, k] @ weights.T + bias, as a step would compute it."""
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim != 2 or x.shape[1] != self.k:
            raise LayoutError(f"a matrix of {self.k} columns cannot take x of shape {x.shape}")
        out = np.empty((len(x), self.num_rows), np.float32)
        self._packer.library.anb_matmul(self.native_matrix(), x.ctypes.data, len(x), out.ctypes.data)
        return out


def _panel_table(parts: list[PackedPart]) -> NDArray[np.void]:
    rows: list[tuple[int, int, int, int]] = []
    first = 0
    for part in parts:
        start, step = part.panels.ctypes.data, part.panels.strides[0]
        for i in range(len(part.panels)):
            used = min(PANEL_COLUMNS, part.num_rows - i * PANEL_COLUMNS)
            rows.append((start + i * step, first + i * PANEL_COLUMNS, used, part.kind))
        first += part.num_rows
    return np.array(rows, native.PANEL_DTYPE)


def _vector(raw: RawTensor) -> Floats:
    return np.ascontiguousarray(dequantize(raw).reshape(-1))


class CpuKVPool:
    """KV pages in the layout of `csrc/cpu/attention.h`, zeroed."""

    def __init__(self, library: ctypes.CDLL, spec: KVSpec) -> None:
        if spec.dtype not in KV_TYPES:
            raise LayoutError(f"KV dtype must be one of {', '.join(KV_TYPES)}, got {spec.dtype!r}")
        self.spec, self._library = spec, library
        self.layout = native.KVLayout(
            None, spec.num_pages, spec.page_size, spec.num_layers, spec.num_kv_heads, spec.head_dim, KV_TYPES[spec.dtype]
        )
        num_bytes = library.anb_kv_layout(self.layout)
        if num_bytes <= 0:
            raise LayoutError(f"no KV layout for {spec}")
        try:
            self._memory = Arena().take(num_bytes)
        except MemoryError as error:
            raise MemoryError(f"{spec.num_pages} KV pages of {spec.page_size} tokens need {num_bytes / 2**30:.2f} GiB: {error}") from error
        self.layout.data = self._memory.ctypes.data

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        src, dst = self._check(src), self._check(dst)
        if len(src) != len(dst):
            raise LayoutError(f"{len(src)} source pages for {len(dst)} destinations")
        self._library.anb_copy_pages(self.layout, src.ctypes.data, dst.ctypes.data, len(src))

    def poison_pages(self, pages: NDArray[np.int32]) -> None:
        pages = self._check(pages)
        self._library.anb_poison_pages(self.layout, pages.ctypes.data, len(pages))

    def _check(self, pages: NDArray[np.int32]) -> Ints:
        pages = np.ascontiguousarray(pages, np.int32)
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.spec.num_pages:
            raise LayoutError(f"page ids must be in 0..{self.spec.num_pages - 1}, got {int(pages.min())}..{int(pages.max())}")
        return pages


@dataclass(frozen=True, slots=True)
class Value:
    """What a recorded operation gives: `width` numbers per token in a buffer, until that buffer is written again."""

    buffer: int
    width: int
    version: int


class Recorder:
    """The `Ops` that compile() runs a forward with, once: every operation goes on the tape."""

    def __init__(self, library: ctypes.CDLL, kv: CpuKVPool) -> None:
        self._library, self._kv = library, kv
        self.program = library.anb_program_new(kv.layout)
        self.keep: list[object] = [kv]  # what the tape points to
        self.ropes: dict[tuple[bytes, float], int] = {}
        self.vocab_size = 0
        self._buffers: dict[tuple[str, int], int] = {}
        self._versions: dict[int, int] = {}

    def embed(self, table: CpuMatrix) -> Value:
        out = self._write("hidden", table.k)
        raw = table.native_table()
        self._add(OpKind.EMBED, table, target=out.buffer, table=ctypes.pointer(raw))
        return out

    def attention_input(
        self, h: Value, layer: int, norm: Floats, qkv: CpuMatrix, shape: AttentionShape, rope: Rope,
        q_norm: Floats | None = None, k_norm: Floats | None = None,
    ) -> Value:  # fmt: skip
        self._check_heads(h, layer, qkv, shape, rope)
        source = self._read(h, qkv.k)
        out = self._write("q", shape.num_q_heads * shape.head_dim)
        self._add(
            OpKind.ATTENTION_INPUT, qkv, norm, q_norm, k_norm, layer=layer, source=source, target=out.buffer,
            num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, eps=shape.eps,
            matrix=ctypes.pointer(qkv.native_matrix()), norm=_address(norm, qkv.k), q_norm=_address(q_norm, shape.head_dim),
            k_norm=_address(k_norm, shape.head_dim), rope=self._rope(rope),
        )  # fmt: skip
        return out

    def attention(self, q: Value, layer: int, shape: AttentionShape) -> Value:
        width = shape.num_q_heads * shape.head_dim
        source = self._read(q, width)
        out = self._write("attention", width)
        self._add(
            OpKind.ATTENTION, layer=layer, source=source, target=out.buffer, num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, scale=shape.scale, window=shape.sliding_window or 0,
        )  # fmt: skip
        return out

    def linear_add(self, x: Value, weight: CpuMatrix, residual: Value) -> Value:
        source, target = self._read(x, weight.k), self._read(residual, weight.num_rows)
        self._add(OpKind.LINEAR_ADD, weight, source=source, target=target, matrix=ctypes.pointer(weight.native_matrix()))
        self._versions[target] += 1
        return Value(target, weight.num_rows, self._versions[target])

    def gated_mlp_input(self, h: Value, norm: Floats, gate_up: CpuMatrix, eps: float) -> Value:
        inner = gate_up.num_rows // 2
        if gate_up.num_rows % 2 or gate_up.num_panels != 2 * -(-inner // PANEL_COLUMNS):
            raise LayoutError(f"gate and up of {gate_up.num_rows} rows together: give them as two parts of equal size")
        source = self._read(h, gate_up.k)
        out = self._write("gated", inner)
        self._add(
            OpKind.GATED_MLP_INPUT, gate_up, norm, source=source, target=out.buffer, eps=eps,
            matrix=ctypes.pointer(gate_up.native_matrix(paired=True)), norm=_address(norm, gate_up.k),
        )  # fmt: skip
        return out

    def logits(self, h: Value, norm: Floats, lm_head: CpuMatrix, eps: float) -> Value:
        source = self._read(h, lm_head.k)
        self.vocab_size = lm_head.num_rows
        self._add(
            OpKind.LOGITS, lm_head, norm, source=source, eps=eps, matrix=ctypes.pointer(lm_head.native_matrix()),
            norm=_address(norm, lm_head.k),
        )  # fmt: skip
        return Value(-1, lm_head.num_rows, 0)

    def _check_heads(self, h: Value, layer: int, qkv: CpuMatrix, shape: AttentionShape, rope: Rope) -> None:
        spec = self._kv.spec
        if (spec.num_kv_heads, spec.head_dim) != (shape.num_kv_heads, shape.head_dim) or not 0 <= layer < spec.num_layers:
            raise LayoutError(f"layer {layer} with {shape.num_kv_heads} KV heads of {shape.head_dim} does not fit a KV pool of {spec}")
        q_rows, kv_rows = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        panels = -(-q_rows // PANEL_COLUMNS) + 2 * -(-kv_rows // PANEL_COLUMNS)
        if qkv.num_rows != q_rows + 2 * kv_rows or qkv.num_panels != panels:
            raise LayoutError(f"qkv of {qkv.num_rows} rows for {shape}: give q, k and v as three parts")
        unit_columns = int(np.lcm(shape.head_dim, PANEL_COLUMNS))
        if unit_columns > MAX_UNIT_PANELS * PANEL_COLUMNS or 2 * len(rope.inv_freq) > shape.head_dim:
            raise LayoutError(f"head_dim {shape.head_dim} with {len(rope.inv_freq)} rotated pairs is not supported by the cpu backend")

    def _write(self, role: str, width: int) -> Value:
        """The buffer of a role: an operation's result lives until the same operation of the next layer."""
        if (role, width) not in self._buffers:
            self._buffers[role, width] = self._library.anb_program_buffer(self.program, width, int(role == "gated"))
        buffer = self._buffers[role, width]
        self._versions[buffer] = self._versions.get(buffer, 0) + 1
        return Value(buffer, width, self._versions[buffer])

    def _read(self, value: Value, width: int) -> int:
        if value.width != width:
            raise LayoutError(f"an operation that takes {width} values per token was given {value.width}")
        assert self._versions[value.buffer] == value.version, "a value is read after its buffer was written again"
        return value.buffer

    def _rope(self, rope: Rope) -> int:
        key = (rope.inv_freq.tobytes(), rope.magnitude)
        if key not in self.ropes:
            frequencies = np.ascontiguousarray(rope.inv_freq, np.float64)
            self.ropes[key] = self._library.anb_rope_new(frequencies.ctypes.data, len(frequencies), rope.magnitude)
        return self.ropes[key]

    def _add(self, kind: int, *keep: object, **fields: object) -> None:
        self.keep.extend(keep)
        op = native.OpSpec(kind=kind, **fields)
        self.keep.append(op)
        self._library.anb_program_add(self.program, op)


def _address(vector: Floats | None, size: int) -> int | None:
    if vector is None:
        return None
    if vector.shape != (size,):
        raise LayoutError(f"a norm over {size} values has weights of shape {vector.shape}")
    return int(vector.ctypes.data)


class CompiledStep:
    """A recorded forward, and the buffers of its steps. Calling it runs one batch; its logits live until the next call."""

    def __init__(self, library: ctypes.CDLL, recorder: Recorder) -> None:
        self._library, self._recorder = library, recorder
        self._logits = np.empty(0, np.float32)

    def __call__(self, batch: StepBatch) -> Floats:
        lists, args = _step_args(batch)
        vocab_size, num_logits = self._recorder.vocab_size, len(batch.logit_rows)
        if self._logits.size < num_logits * vocab_size:
            self._logits = np.empty(num_logits * vocab_size, np.float32)
        args.logits = self._logits.ctypes.data
        error = self._library.anb_program_run(self._recorder.program, args)
        del lists  # it had to live until here
        if error is not None:
            raise LayoutError(error.decode())
        return self._logits[: num_logits * vocab_size].reshape(num_logits, vocab_size)

    def spent_ns(self) -> dict[str, int]:
        """Nanoseconds in each kind of operation since compile()."""
        spent = np.zeros(len(OP_NAMES), np.uint64)
        self._library.anb_program_times(self._recorder.program, spent.ctypes.data)
        return dict(zip(OP_NAMES, spent.tolist()))

    def __del__(self) -> None:
        self._library.anb_program_free(self._recorder.program)
        for rope in self._recorder.ropes.values():
            self._library.anb_rope_free(rope)


def _step_args(batch: StepBatch) -> tuple[Ints, native.StepArgs]:
    """The batch as the native step takes it, and the array that its pointers point into: one for all lists, as each costs microseconds."""
    num_rows, num_tokens = batch.num_rows, batch.num_tokens
    if len(batch.q_indptr) != num_rows + 1 or len(batch.page_indptr) != num_rows + 1 or len(batch.positions) != num_tokens:
        raise LayoutError(
            f"{num_rows} rows of {num_tokens} tokens with q_indptr of {len(batch.q_indptr)}, page_indptr of {len(batch.page_indptr)} "
            f"and positions of {len(batch.positions)}: expected {num_rows + 1}, {num_rows + 1} and {num_tokens}"
        )
    trees, groups = batch.trees, batch.groups
    tree_lists: tuple[Ints, ...] = ()
    if trees:
        ends = np.cumsum([0, *(len(tree.parents) for tree in trees)])
        tree_lists = (np.array([tree.row for tree in trees]), ends, *(tree.parents for tree in trees))
    shared = [np.array([(g.first_row, g.last_row, g.num_tokens) for g in groups]).reshape(-1)] if groups else []
    fixed = (batch.q_indptr, batch.kv_lens, batch.page_indptr, batch.page_ids, batch.token_ids, batch.positions, batch.logit_rows)
    flat = np.concatenate((*fixed, *tree_lists, *shared), dtype=np.int32, casting="same_kind")
    at, pointers = flat.ctypes.data, []
    for size in (*map(len, fixed), len(trees), len(trees) + 1 if trees else 0, sum(map(len, tree_lists[2:]))):
        pointers.append(at)
        at += 4 * size
    q_indptr, kv_lens, page_indptr, page_ids, token_ids, positions, logit_rows, *tree_pointers = pointers
    args = native.StepArgs(
        num_rows, num_tokens, len(trees), len(groups), len(batch.page_ids), 0, q_indptr, kv_lens, page_indptr, page_ids,
        *tree_pointers, at, len(batch.logit_rows), 0, token_ids, positions, logit_rows,
    )  # fmt: skip
    return flat, args


class CpuBackend:
    """precision    "fast" | "exact"
    num_threads  of the process's pool; None: every core this process may use
    cache_dir    where the native library is built; None: the user's cache
    store        where packed weights are kept, so that the next start maps them; None: they are not
    Raises       build.BuildError where the native library cannot be built
    """

    name = "cpu"

    def __init__(
        self, *, precision: str = "fast", num_threads: int | None = None, cache_dir: Path | None = None, store: WeightStore | None = None
    ) -> None:  # fmt: skip
        if precision not in ("fast", "exact"):
            raise ValueError(f"precision must be 'fast' or 'exact', got {precision!r}")
        self.precision = precision
        self._library = cpu_sampling.declare(native.library(cache_dir))
        # The library's name holds a digest of its sources: a changed layout of panels never reads an older file.
        cache = PackedCache(store, f"{precision}:{Path(self._library._name).name}") if store is not None else None
        self._packer = Packer(self._library, is_exact=precision == "exact", cache=cache)
        if num_threads is not None:
            self.set_num_threads(num_threads)

    @property
    def num_threads(self) -> int:
        return int(self._library.anb_num_threads())

    def set_num_threads(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self._library.anb_set_num_threads(num_threads)

    def matrix(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> CpuMatrix:
        return CpuMatrix(self._packer, parts, bias)

    def vector(self, raw: RawTensor) -> Floats:
        return _vector(raw)

    def kv_pool(self, spec: KVSpec) -> CpuKVPool:
        return CpuKVPool(self._library, spec)

    def compile(self, forward: Forward, kv: CpuKVPool) -> Callable[[StepBatch], Floats]:
        recorder = Recorder(self._library, kv)
        step = CompiledStep(self._library, recorder)
        forward(recorder)
        self._packer.finish()
        return step

    def sample(self, logits: Floats, batch: SamplingBatch) -> Sampled:
        return cpu_sampling.sample(self._library, logits, batch)

    def logprobs_of(self, logits: Floats, rows: Ints, ids: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        return cpu_sampling.logprobs_of(self._library, logits, rows, ids)

    def top_logprobs(self, logits: Floats, rows: Ints, k: int) -> tuple[Ints, Floats]:
        return cpu_sampling.top_logprobs(self._library, logits, rows, k)
