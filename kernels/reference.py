"""The contract of `interface.py` in plain PyTorch, written to be read. Every other backend must agree with it.

Weights are dequantized to float32 once; all arithmetic is float32. Each row's attention runs on its own, over exactly the KV slots that
the row may see, so nothing that lies in spare slots, other pages or other rows can reach it.

Cost: the weights in float32 are streamed once per step; attention is a Python loop over the rows of the batch, once per layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.kernels import sampling
from anabranch.kernels.formats import RawTensor, dequantize
from anabranch.kernels.interface import AttentionShape, Forward, Rope
from anabranch.kernels.layout import Ints, KVSpec, LayoutError, Sampled, SamplingBatch, StepBatch

_TORCH_DTYPE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "int16": torch.int16, "int8": torch.int8}
_STEPS = {"int16": 32767, "int8": 127}  # of the largest number of a token and head


@dataclass(frozen=True, slots=True)
class Matrix:
    """weight [rows, columns] f32; bias [rows] f32 or None."""

    weight: Tensor
    bias: Tensor | None


class ReferenceKVPool:
    """pages[layer] [num_pages, 2, page_size, num_kv_heads, head_dim]; 0 is keys, 1 is values.

    `int16` and `int8` keep one float32 scale per token and head beside them, so that value = stored * scale.
    """

    def __init__(self, spec: KVSpec) -> None:
        if spec.dtype not in _TORCH_DTYPE:
            raise LayoutError(f"KV dtype must be one of {', '.join(_TORCH_DTYPE)}, got {spec.dtype!r}")
        self.spec = spec
        shape = (spec.num_pages, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self.pages = [zeros(shape, _TORCH_DTYPE[spec.dtype], spec) for _ in range(spec.num_layers)]
        self.scales = [zeros((*shape[:-1], 1), torch.float32, spec) for _ in self.pages] if spec.dtype in _STEPS else []

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        check_pages(src, self.spec)
        check_pages(dst, self.spec)
        if len(src) != len(dst):
            raise LayoutError(f"{len(src)} source pages for {len(dst)} destinations")
        source, target = indices(src), indices(dst)
        for tensor in (*self.pages, *self.scales):
            tensor[target] = tensor[source]

    def poison_pages(self, pages: NDArray[np.int32]) -> None:
        check_pages(pages, self.spec)
        for tensor in self.scales or self.pages:
            tensor[indices(pages)] = float("nan")

    def write(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Token i's key and value go to slot offsets[i] of page pages[i]. keys, values [num_tokens, num_kv_heads, head_dim] f32."""
        for side, new in enumerate((keys, values)):
            if self.scales:
                scale = new.abs().amax(dim=-1, keepdim=True) / _STEPS[self.spec.dtype]
                self.scales[layer][pages, side, offsets] = scale
                new = torch.where(scale > 0, new / scale, 0).round()
            self.pages[layer][pages, side, offsets] = new.to(self.pages[layer].dtype)

    def read(self, layer: int, pages: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [start, stop) of a page table, each [stop - start, num_kv_heads, head_dim] f32."""
        size = self.spec.page_size
        pages = pages[start // size : -(-stop // size)]
        start, stop = start % size, start % size + stop - start
        both = self.pages[layer][pages].float()
        if self.scales:
            both = both * self.scales[layer][pages]
        keys, values = both.transpose(0, 1).flatten(1, 2)
        return keys[start:stop], values[start:stop]


class ReferenceBackend:
    """Plain PyTorch on the CPU. `num_threads` is a setting of PyTorch, and so of the whole process."""

    name = "reference"

    def __init__(self, *, num_threads: int | None = None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._tables: dict[bytes, tuple[Tensor, Tensor]] = {}

    def matrix(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> Matrix:
        weight = torch.cat([to_float(part) for part in parts]) if len(parts) > 1 else to_float(parts[0])
        return Matrix(weight, torch.cat([to_float(part) for part in bias]) if bias else None)

    def vector(self, raw: RawTensor) -> Tensor:
        return to_float(raw)

    def kv_pool(self, spec: KVSpec) -> ReferenceKVPool:
        return ReferenceKVPool(spec)

    def compile(self, forward: Forward, kv: ReferenceKVPool) -> Callable[[StepBatch], Tensor]:
        def run(batch: StepBatch) -> Tensor:
            check_batch(batch, kv.spec)
            with torch.inference_mode():
                return forward(ReferenceOps(self, kv, batch))

        return run

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        return sampling.sample(logits.numpy(), batch)

    def logprobs_of(self, logits: Tensor, rows: Ints, ids: Ints) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        return sampling.logprobs_of(logits.numpy(), rows, ids)

    def top_logprobs(self, logits: Tensor, rows: Ints, k: int) -> tuple[Ints, NDArray[np.float32]]:
        return sampling.top_logprobs(logits.numpy(), rows, k)

    def rotation(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [num_tokens, pairs] f32, from a table that grows by doubling."""
        key = rope.inv_freq.tobytes() + np.float64(rope.magnitude).tobytes()
        needed = int(positions.max()) + 1
        cos, sin = self._tables.get(key, (torch.empty(0), torch.empty(0)))
        if len(cos) < needed:
            angles = np.outer(np.arange(max(needed, 2 * len(cos), 1024), dtype=np.float64), rope.inv_freq)
            cos, sin = (torch.from_numpy((f(angles) * rope.magnitude).astype(np.float32)) for f in (np.cos, np.sin))
            self._tables[key] = cos, sin
        return cos[positions], sin[positions]


class ReferenceOps:
    """One forward over one batch. Hidden states are float32 tensors [num_tokens, width]."""

    def __init__(self, backend: ReferenceBackend, kv: ReferenceKVPool, batch: StepBatch) -> None:
        self.backend, self.kv, self.batch = backend, kv, batch
        self.token_ids, self.positions = indices(batch.token_ids), indices(batch.positions)
        self.logit_rows = indices(batch.logit_rows)
        self.page_ids = indices(batch.page_ids)
        self.rows = rows_of(batch, self.page_ids)
        slots = torch.cat([torch.arange(row.first_slot, row.kv_len) for row in self.rows])
        tables = torch.cat([torch.full((row.kv_len - row.first_slot,), row.first_page) for row in self.rows])
        self.write_pages = self.page_ids[tables + slots // kv.spec.page_size]
        self.write_offsets = slots % kv.spec.page_size

    def embed(self, table: Matrix) -> Tensor:
        return table.weight[self.token_ids]

    def attention_input(
        self, h: Tensor, layer: int, norm: Tensor, qkv: Matrix, shape: AttentionShape, rope: Rope,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        heads = linear(rms_norm(h, norm, shape.eps), qkv).unflatten(-1, (-1, shape.head_dim))
        q, k, v = heads.split([shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if q_norm is not None:
            q = rms_norm(q, q_norm, shape.eps)
        if k_norm is not None:
            k = rms_norm(k, k_norm, shape.eps)
        cos, sin = self.backend.rotation(rope, self.positions)
        self.kv.write(layer, self.write_pages, self.write_offsets, rotate(k, cos, sin), v)
        return rotate(q, cos, sin).flatten(1)

    def attention(self, q: Tensor, layer: int, shape: AttentionShape) -> Tensor:
        q = q.unflatten(-1, (shape.num_q_heads, shape.head_dim))
        out = torch.empty_like(q)
        for row in self.rows:
            low = row.lowest_visible(shape.sliding_window)
            keys, values = self.kv.read(layer, row.pages, low, row.kv_len)
            out[row.tokens] = attend(q[row.tokens], keys, values, row.visible(low, shape.sliding_window), shape.scale)
        return out.flatten(1)

    def linear_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        return residual + linear(x, weight)

    def gated_mlp_input(self, h: Tensor, norm: Tensor, gate_up: Matrix, eps: float) -> Tensor:
        gate, up = linear(rms_norm(h, norm, eps), gate_up).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def logits(self, h: Tensor, norm: Tensor, lm_head: Matrix, eps: float) -> Tensor:
        return linear(rms_norm(h[self.logit_rows], norm, eps), lm_head)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's new tokens: `tokens` of the batch, in KV slots [first_slot, kv_len) of the page table `pages`."""

    tokens: slice
    first_slot: int
    kv_len: int
    first_page: int  # where the row's table begins in the batch's page_ids
    pages: Tensor
    positions: Tensor
    parents: Ints | None  # of the tree that its last tokens form

    def lowest_visible(self, window: int | None) -> int:
        return 0 if window is None else max(0, min(self.first_slot, int(self.positions.min())) - window + 1)

    def visible(self, low: int, window: int | None) -> Tensor | None:
        """Which KV slots [low, kv_len) each new token sees, [new tokens, slots]; None if that is all of them."""
        if len(self.positions) == 1 and (window is None or self.kv_len - low <= window):
            return None
        own = torch.arange(self.first_slot, self.kv_len)[:, None]
        slots = torch.arange(low, self.kv_len)[None, :]
        seen = slots <= own
        if self.parents is not None:
            seen[-len(self.parents) :, self.kv_len - len(self.parents) - low :] = ancestors(self.parents)
        if window is not None:
            slot_positions = torch.cat([torch.arange(low, self.first_slot), self.positions])
            seen &= self.positions[:, None] - slot_positions[None, :] < window
        return seen


def rows_of(batch: StepBatch, page_ids: Tensor) -> list[Row]:
    parents = {tree.row: tree.parents for tree in batch.trees if len(tree.parents)}
    positions = indices(batch.positions)
    rows = []
    for r in range(batch.num_rows):
        start, stop = int(batch.q_indptr[r]), int(batch.q_indptr[r + 1])
        first_page, end_page = int(batch.page_indptr[r]), int(batch.page_indptr[r + 1])
        kv_len = int(batch.kv_lens[r])
        rows.append(
            Row(
                slice(start, stop), kv_len - (stop - start), kv_len, first_page, page_ids[first_page:end_page],
                positions[start:stop], parents.get(r),
            )
        )  # fmt: skip
    return rows


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of one row.

    q        [new tokens, num_q_heads, head_dim]; query head h reads KV head h // (num_q_heads / num_kv_heads)
    keys, values   [slots, num_kv_heads, head_dim]
    visible  [new tokens, slots] bool, or None: every token sees every slot
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    queries = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = (queries @ keys.permute(1, 2, 0)) * scale  # [kv heads, group * new tokens, slots]
    if visible is not None:
        scores = scores.masked_fill(~visible.repeat(num_q_heads // num_kv_heads, 1), float("-inf"))
    out = torch.softmax(scores, dim=-1) @ values.transpose(0, 1)
    return out.unflatten(1, (-1, num_tokens)).permute(2, 0, 1, 3).reshape(num_tokens, num_q_heads, head_dim)


def ancestors(parents: Ints) -> Tensor:
    """seen[i, j]: j is i itself or one of its ancestors."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    return torch.nn.functional.linear(x, matrix.weight, matrix.bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + pairs) of the first 2 * pairs dims of each head; the others pass. x [num_tokens, heads, head_dim]."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def indices(values: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def to_float(raw: RawTensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(dequantize(raw), dtype=np.float32).reshape(raw.shape))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, spec: KVSpec) -> Tensor:
    try:
        return torch.zeros(shape, dtype=dtype)
    except RuntimeError as fault:
        size = spec.num_layers * int(np.prod(shape, dtype=object)) * dtype.itemsize
        raise MemoryError(
            f"{spec.num_pages} KV pages of {spec.page_size} tokens need {size / 2**30:.1f} GiB: {fault}"
        ) from fault


def check_pages(pages: NDArray[np.int32], spec: KVSpec) -> None:
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < spec.num_pages:
        raise LayoutError(f"page ids must be in 0..{spec.num_pages - 1}, got {int(pages.min())}..{int(pages.max())}")


def check_batch(batch: StepBatch, spec: KVSpec) -> None:
    """Whether the arrays fit together. Raises LayoutError."""
    num_rows, num_tokens = batch.num_rows, batch.num_tokens
    new = np.diff(batch.q_indptr)
    pages = np.diff(batch.page_indptr)
    if num_rows == 0 or len(new) != num_rows or len(pages) != num_rows:
        raise LayoutError(f"{num_rows} rows with {len(new)} token ranges and {len(pages)} page tables")
    if (
        new.min() < 1
        or batch.q_indptr[0] != 0
        or batch.q_indptr[-1] != num_tokens
        or len(batch.positions) != num_tokens
    ):
        raise LayoutError(
            f"q_indptr {batch.q_indptr[0]}..{batch.q_indptr[-1]} does not cover {num_tokens} tokens, one or more per row"
        )
    if (new > batch.kv_lens).any() or (pages * spec.page_size < batch.kv_lens).any():
        raise LayoutError("a row's kv_len is smaller than its new tokens, or larger than its pages hold")
    if batch.page_indptr[0] != 0 or pages.min() < 0 or batch.page_indptr[-1] > len(batch.page_ids):
        raise LayoutError(f"page_indptr ends at {batch.page_indptr[-1]}, beyond {len(batch.page_ids)} page ids")
    if len(batch.logit_rows) and not 0 <= batch.logit_rows.min() <= batch.logit_rows.max() < num_tokens:
        raise LayoutError(f"logit_rows must be in 0..{num_tokens - 1}")
    check_pages(batch.page_ids, spec)
