"""A small decoder straight on `Ops`, with random weights in any format: the same one on every backend."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from support.weights import from_floats, random_raw

from anabranch.kernels.formats import RawTensor
from anabranch.kernels.interface import AttentionShape, Backend, Forward, Logits, Ops, Rope
from anabranch.kernels.layout import KVSpec, StepBatch

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    hidden: int = 64
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    vocab: int = 130
    form: str = "Q8_0"
    biases: bool = False
    head_norms: bool = False
    rotated_pairs: int | None = None  # None: all of the head
    window: int | None = None
    broken_token: int | None = None  # its embedding is NaN; needs form F32
    formats: dict[str, str] = field(default_factory=dict)  # by role, where it is not `form`

    def kv(self, num_pages: int = 64, page_size: int = 16, dtype: str = "f32") -> KVSpec:
        return KVSpec(num_pages, page_size, self.layers, self.kv_heads, self.head_dim, dtype)


def tiny_forward(backend: Backend, s: Shape, seed: int = 0) -> Forward:
    """The forward of a model whose every weight follows from `seed`."""
    rng = np.random.default_rng(seed)

    def matrix(role: str, rows: int, columns: int) -> RawTensor:
        form = s.formats.get(role, s.form)
        return random_raw(form, rows, columns, seed=int(rng.integers(1 << 30)), spread=0.2 / columns**0.5)

    def bias(rows: int) -> RawTensor:
        return from_floats("bias", rng.normal(0, 0.1, rows).astype(np.float32))

    def norm(width: int) -> RawTensor:
        return from_floats("norm", rng.uniform(0.7, 1.3, width).astype(np.float32))

    def stacked(rows: Sequence[tuple[str, int]], columns: int) -> object:
        parts = [matrix(role, n, columns) for role, n in rows]
        return backend.matrix(parts, [bias(n) for _, n in rows] if s.biases else ())

    q_rows, kv_rows = s.q_heads * s.head_dim, s.kv_heads * s.head_dim
    pairs = s.head_dim // 2 if s.rotated_pairs is None else s.rotated_pairs
    rope = Rope(1000.0 ** -(np.arange(pairs) / max(pairs, 1)), 1.1)
    attention = AttentionShape(s.q_heads, s.kv_heads, s.head_dim, s.head_dim**-0.5, 1e-5, s.window)
    table = matrix("embedding", s.vocab, s.hidden)
    lm_head = embedding = backend.matrix([table])
    if s.broken_token is not None:
        data = table.data.copy()
        data.view(np.float32)[s.broken_token] = np.nan
        embedding = backend.matrix([replace(table, data=data)])
    layers = [
        (
            backend.vector(norm(s.hidden)),
            stacked([("q", q_rows), ("k", kv_rows), ("v", kv_rows)], s.hidden),
            backend.vector(norm(s.head_dim)) if s.head_norms else None,
            backend.vector(norm(s.head_dim)) if s.head_norms else None,
            stacked([("output", s.hidden)], q_rows),
            backend.vector(norm(s.hidden)),
            stacked([("gate", s.inner), ("up", s.inner)], s.hidden),
            stacked([("down", s.hidden)], s.inner),
        )
        for _ in range(s.layers)
    ]
    last = backend.vector(norm(s.hidden))

    def forward(ops: Ops) -> Logits:
        h = ops.embed(embedding)
        for i, (norm1, qkv, q_norm, k_norm, output, norm2, gate_up, down) in enumerate(layers):
            q = ops.attention_input(h, i, norm1, qkv, attention, rope, q_norm, k_norm)
            h = ops.linear_add(ops.attention(q, i, attention), output, h)
            h = ops.linear_add(ops.gated_mlp_input(h, norm2, gate_up, 1e-5), down, h)
        return ops.logits(h, last, lm_head, 1e-5)

    return forward


def ints(values: object) -> Ints:
    return np.asarray(values, np.int32)


@dataclass(frozen=True)
class Row:
    """New tokens `ids[start:stop]` of a sequence whose pages are `pages`."""

    ids: Ints
    start: int
    stop: int
    pages: Ints


def batch_of(rows: Sequence[Row], page_size: int = 16, *, all_logits: bool = True) -> StepBatch:
    counts = [row.stop - row.start for row in rows]
    tables = [row.pages[: -(-row.stop // page_size)] for row in rows]
    ends = np.cumsum(counts)
    return StepBatch(
        token_ids=ints(np.concatenate([row.ids[row.start : row.stop] for row in rows])),
        positions=ints(np.concatenate([np.arange(row.start, row.stop) for row in rows])),
        q_indptr=ints([0, *ends]), kv_lens=ints([row.stop for row in rows]),
        page_indptr=ints(np.cumsum([0, *map(len, tables)])), page_ids=np.concatenate(tables),
        logit_rows=ints(np.arange(ends[-1]) if all_logits else ends - 1),
    )  # fmt: skip
