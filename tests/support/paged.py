"""Sequences whose KV lies in scattered, poisoned pages, and what attention over them must give, in float64."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.backends.cpu import CpuKVPool
from anabranch.kernels.backends.cpu_attention import CpuAttention
from anabranch.kernels.layout import KVSpec, SharedPrefix, StepBatch, TreeMask

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def ints(values: object) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def bits(array: F32) -> NDArray[np.int32]:
    return np.ascontiguousarray(array).view(np.int32)


@dataclass(frozen=True)
class Shape:
    num_q_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 16
    dtype: str = "f32"
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Tokens:
    """q [n, num_q_heads, head_dim]; k, v [n, num_kv_heads, head_dim]: what a model would have computed for n tokens."""

    q: F32
    k: F32
    v: F32

    def __len__(self) -> int:
        return len(self.q)

    def take(self, index: object) -> "Tokens":
        return Tokens(self.q[index], self.k[index], self.v[index])

    def then(self, other: "Tokens") -> "Tokens":
        return Tokens(*(np.concatenate(pair) for pair in ((self.q, other.q), (self.k, other.k), (self.v, other.v))))


def draw(rng: np.random.Generator, shape: Shape, n: int, spread: float = 1.0) -> Tokens:
    def some(heads: int, scale: float = 1.0) -> F32:
        return (scale * rng.normal(size=(n, heads, shape.head_dim))).astype(np.float32)

    return Tokens(some(shape.num_q_heads, spread), some(shape.num_kv_heads), some(shape.num_kv_heads))


@dataclass(frozen=True)
class Row:
    """The last `num_new` of the first `kv_len` tokens of sequence `name` are new; with `parents`, the last of them form a tree."""

    name: str
    kv_len: int
    num_new: int
    parents: tuple[int, ...] = ()


class World:
    """Every sequence's pages, anywhere in one pool; every slot holds NaN until it is written."""

    def __init__(self, shape: Shape, sequences: dict[str, Tokens], *, page_size: int = 16, seed: int = 0) -> None:
        self.shape, self.sequences, self.page_size = shape, sequences, page_size
        counts = [-(-len(tokens) // page_size) for tokens in sequences.values()]
        order = np.random.default_rng(seed).permutation(sum(counts) + 3)
        spec = KVSpec(len(order), page_size, 2, shape.num_kv_heads, shape.head_dim, shape.dtype)
        self.pool = CpuKVPool(native.library(), spec)
        self.pool.poison_pages(ints(np.arange(spec.num_pages)))
        ends = np.cumsum(counts)
        self.pages = {name: ints(order[end - count : end]) for name, count, end in zip(sequences, counts, ends)}
        self.attention = CpuAttention(self.pool)

    def share(self, first: str, others: Seq[str], num_tokens: int) -> None:
        """The others' tables start with the first one's pages: their first `num_tokens` tokens must be the same."""
        for name in others:
            self.pages[name][: num_tokens // self.page_size] = self.pages[first][: num_tokens // self.page_size]

    def batch(self, rows: Seq[Row], groups: Seq[SharedPrefix] = ()) -> StepBatch:
        tables = [self.pages[row.name][: -(-row.kv_len // self.page_size)] for row in rows]
        num_new = [row.num_new for row in rows]
        positions = [np.arange(row.kv_len - row.num_new, row.kv_len) for row in rows]
        trees = tuple(TreeMask(r, ints(row.parents)) for r, row in enumerate(rows) if row.parents)
        return StepBatch(
            token_ids=ints(np.zeros(sum(num_new))), positions=ints(np.concatenate(positions)), q_indptr=ints(np.cumsum([0, *num_new])),
            kv_lens=ints([row.kv_len for row in rows]), page_indptr=ints(np.cumsum([0, *map(len, tables)])),
            page_ids=np.concatenate(tables), logit_rows=ints([]), trees=trees, groups=tuple(groups),
        )  # fmt: skip

    def run(self, rows: Seq[Row], groups: Seq[SharedPrefix] = (), layer: int = 1) -> list[F32]:
        """One step: write the rows' new KV, attend. Returns [num_new, num_q_heads, head_dim] per row."""
        new = [self.sequences[row.name].take(slice(row.kv_len - row.num_new, row.kv_len)) for row in rows]
        self.attention.begin(self.batch(rows, groups))
        self.attention.write(layer, np.concatenate([n.k for n in new]), np.concatenate([n.v for n in new]))
        out = self.attention.attend(
            layer, np.concatenate([n.q for n in new]), scale=self.shape.scale, window=self.shape.window
        )
        return np.split(out, np.cumsum([row.num_new for row in rows])[:-1])

    def run_in_chunks(self, name: str, cuts: Seq[int], layer: int = 1) -> F32:
        """A sequence from its start, each chunk in a step of its own."""
        edges = [0, *cuts, len(self.sequences[name])]
        return np.concatenate([self.run([Row(name, b, b - a)], layer=layer)[0] for a, b in pairwise(edges) if b > a])


def stored(x: F32, dtype: str, side: str) -> F64:
    """What a pool of `dtype` gives back of x [..., head_dim], on its "k" or "v" side."""
    if dtype == "f16":
        return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)
    if dtype == "bf16":
        words = x.view(np.uint32).astype(np.uint64)
        return ((words + 0x7FFF + (words >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    if dtype == "int16" and side == "k":
        scale = (np.sqrt((x.astype(np.float64) ** 2).sum(axis=-1, keepdims=True)) / 32767).astype(np.float32)
        return np.rint(x * (np.float32(1) / scale)).astype(np.float64) * scale
    if dtype in ("int8", "int16"):
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127 if dtype == "int8" else 8191)  # float32 throughout: ties round alike
        return np.rint(x * (np.float32(1) / scale)).astype(np.float64) * scale
    return x.astype(np.float64)


def visible(row: Row, window: int | None) -> NDArray[np.bool_]:
    """[num_new, kv_len]: which slots each new token sees."""
    first = row.kv_len - row.num_new
    base = row.kv_len - len(row.parents)
    position = list(range(base))
    for i, parent in enumerate(row.parents):
        position.append(base if parent < 0 else position[base + parent] + 1)
        assert -1 <= parent < i
    seen = np.zeros((row.num_new, row.kv_len), np.bool_)
    for i in range(row.num_new):
        slot = first + i
        seen[i, : min(slot + 1, base)] = True
        while slot >= base:
            seen[i, slot] = True
            parent = row.parents[slot - base]
            slot = base + parent if parent >= 0 else -1
        if window is not None:
            for other in range(row.kv_len):
                seen[i, other] &= position[first + i] - position[other] < window
    return seen


def expected(shape: Shape, tokens: Tokens, row: Row) -> F64:
    """Attention of the row's new tokens by the book: [num_new, num_q_heads, head_dim]."""
    group = shape.num_q_heads // shape.num_kv_heads
    k = np.repeat(stored(tokens.k[: row.kv_len], shape.dtype, "k"), group, axis=1)
    v = np.repeat(stored(tokens.v[: row.kv_len], shape.dtype, "v"), group, axis=1)
    q = tokens.q[row.kv_len - row.num_new : row.kv_len].astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", q, k) * shape.scale
    scores = np.where(visible(row, shape.window)[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)
