"""The reference backend against the plainest oracle: one token at a time, dense float64, no pages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.formats import RawTensor
from anabranch.kernels.interface import AttentionShape, Rope
from anabranch.kernels.layout import KVSpec, LayoutError, StepBatch, TreeMask
from anabranch.kernels.reference import Matrix, ReferenceBackend, ReferenceKVPool, ReferenceOps

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 24
ROPE = Rope(10000.0 ** (-np.arange(0, DIM, 2) / DIM), magnitude=1.1)


def raw(values: np.ndarray, name: str = "w") -> RawTensor:
    data = np.ascontiguousarray(values, "<f4")
    return RawTensor(name, "F32", values.shape, data.view(np.uint8).reshape(len(data) if data.ndim > 1 else 1, -1))


class Layer:
    """Random weights of one attention layer, and what it must compute."""

    def __init__(self, seed: int, *, bias: bool = False, qk_norm: bool = False, window: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.shape = AttentionShape(HEADS, KV_HEADS, DIM, DIM**-0.5, 1e-5, sliding_window=window)
        self.norm = rng.uniform(0.5, 1.5, WIDTH)
        self.qkv = rng.standard_normal(((HEADS + 2 * KV_HEADS) * DIM, WIDTH)) * 0.5
        self.bias = rng.standard_normal(len(self.qkv)) if bias else np.zeros(len(self.qkv))
        self.q_norm = rng.uniform(0.5, 1.5, DIM) if qk_norm else None
        self.k_norm = rng.uniform(0.5, 1.5, DIM) if qk_norm else None
        self.table = rng.standard_normal((50, WIDTH))

    def run(self, batch: StepBatch, pool: ReferenceKVPool, backend: ReferenceBackend) -> np.ndarray:
        def forward(ops: ReferenceOps) -> torch.Tensor:
            h = ops.embed(backend.matrix([raw(self.table)]))
            qkv = backend.matrix([raw(self.qkv[:10]), raw(self.qkv[10:])], [raw(self.bias)])
            norms = [None if n is None else backend.vector(raw(n)) for n in (self.q_norm, self.k_norm)]
            q = ops.attention_input(h, 0, backend.vector(raw(self.norm)), qkv, self.shape, ROPE, *norms)
            return ops.attention(q, 0, self.shape)

        return backend.compile(forward, pool)(batch).numpy()

    def oracle(self, tokens: list[int], positions: list[int], sees: np.ndarray) -> np.ndarray:
        """Outputs of all tokens; sees[i, j]: token i sees token j."""
        q, k, v = np.split(self._project(tokens, positions), [HEADS, HEADS + KV_HEADS], axis=1)
        out = np.zeros((len(tokens), HEADS, DIM))
        for i in range(len(tokens)):
            for h in range(HEADS):
                scores = np.array(
                    [q[i, h] @ k[j, h // 2] * self.shape.scale if sees[i, j] else -np.inf for j in range(len(tokens))]
                )
                weights = np.exp(scores - scores.max())
                out[i, h] = (weights / weights.sum()) @ v[:, h // 2]
        return out.reshape(len(tokens), -1)

    def _project(self, tokens: list[int], positions: list[int]) -> np.ndarray:
        x = self.table[tokens]
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * self.norm
        heads = (x @ self.qkv.T + self.bias).reshape(len(tokens), -1, DIM)
        for part, weight in ((slice(0, HEADS), self.q_norm), (slice(HEADS, HEADS + KV_HEADS), self.k_norm)):
            if weight is not None:
                heads[:, part] /= np.sqrt((heads[:, part] ** 2).mean(axis=-1, keepdims=True) + 1e-5)
                heads[:, part] *= weight
        for i, position in enumerate(positions):
            for pair, frequency in enumerate(ROPE.inv_freq):
                turn = np.exp(1j * position * frequency) * ROPE.magnitude
                for head in range(HEADS + KV_HEADS):
                    z = (heads[i, head, pair] + 1j * heads[i, head, pair + DIM // 2]) * turn
                    heads[i, head, pair], heads[i, head, pair + DIM // 2] = z.real, z.imag
        return heads


def visible(num_tokens: int, window: int | None = None, positions: list[int] | None = None) -> np.ndarray:
    sees = np.tril(np.ones((num_tokens, num_tokens), bool))
    if window is not None:
        at = np.arange(num_tokens) if positions is None else np.array(positions)
        sees &= at[:, None] - at[None, :] < window
    return sees


class Sequence:
    """Tokens of one row, and pages handed out in a shuffled order."""

    def __init__(self, tokens: list[int], page_size: int, free: list[int]) -> None:
        self.tokens, self.page_size, self.done = tokens, page_size, 0
        self.pages = [free.pop() for _ in range(-(-len(tokens) // page_size))]


def batch_of(
    parts: list[tuple[Sequence, int]], trees: tuple[TreeMask, ...] = (), positions: list[int] | None = None
) -> StepBatch:
    """The next `n` tokens of each sequence."""
    tokens = [t for s, n in parts for t in s.tokens[s.done : s.done + n]]
    places = [p for s, n in parts for p in range(s.done, s.done + n)]
    kv_lens = [s.done + n for s, n in parts]
    used = [s.pages[: -(-length // s.page_size)] for (s, _), length in zip(parts, kv_lens, strict=True)]
    i32 = lambda values: np.array(values, np.int32)  # noqa: E731
    return StepBatch(
        i32(tokens), i32(places if positions is None else positions), i32([0, *np.cumsum([n for _, n in parts])]), i32(kv_lens),
        i32([0, *np.cumsum([len(u) for u in used])]), i32([p for u in used for p in u]), i32(range(len(tokens))), trees,
    )  # fmt: skip


def run_all(
    layer: Layer, sequences: list[Sequence], pool: ReferenceKVPool, rng: np.random.Generator
) -> list[np.ndarray]:
    """Compute every sequence in random chunks, several rows in a step."""
    backend, outputs = ReferenceBackend(), [[] for _ in sequences]
    while waiting := [i for i, s in enumerate(sequences) if s.done < len(s.tokens)]:
        chosen = [i for i in waiting if rng.random() < 0.7] or waiting[:1]
        parts = [(sequences[i], int(rng.integers(1, len(sequences[i].tokens) - sequences[i].done + 1))) for i in chosen]
        out, at = layer.run(batch_of(parts), pool, backend), 0
        for i, (s, n) in zip(chosen, parts, strict=True):
            outputs[i].append(out[at : at + n])
            at, s.done = at + n, s.done + n
    return [np.concatenate(parts) for parts in outputs]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), page_size=st.sampled_from([1, 4, 16]), window=st.sampled_from([None, 1, 3, 8]),
    bias=st.booleans(), qk_norm=st.booleans(), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)  # fmt: skip
def test_chunked_paged_attention_is_dense_attention(seed, page_size, window, bias, qk_norm, lengths) -> None:
    rng = np.random.default_rng(seed)
    layer = Layer(seed, bias=bias, qk_norm=qk_norm, window=window)
    num_pages = sum(-(-n // page_size) for n in lengths) + 3
    pool = ReferenceKVPool(KVSpec(num_pages, page_size, 1, KV_HEADS, DIM, "f32"))
    pool.poison_pages(np.arange(num_pages, dtype=np.int32))  # whoever reads a slot that nobody wrote turns to NaN
    free = rng.permutation(num_pages).tolist()
    sequences = [Sequence(rng.integers(0, 50, n).tolist(), page_size, free) for n in lengths]
    for s, out in zip(sequences, run_all(layer, sequences, pool, rng), strict=True):
        expected = layer.oracle(s.tokens, list(range(len(s.tokens))), visible(len(s.tokens), window))
        np.testing.assert_allclose(out, expected, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), window=st.sampled_from([None, 4]), prefix=st.integers(0, 9), size=st.integers(1, 12)
)
def test_tree_tokens_see_the_prefix_their_ancestors_and_themselves(seed, window, prefix, size) -> None:
    rng = np.random.default_rng(seed)
    layer = Layer(seed, window=window)
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(size)], np.int32)
    depth = [0] * size
    for i, parent in enumerate(parents):
        depth[i] = depth[parent] + 1 if parent >= 0 else 0
    tokens = rng.integers(0, 50, prefix + size).tolist()
    positions = [*range(prefix), *(prefix + d for d in depth)]
    pool = ReferenceKVPool(KVSpec(8, 4, 1, KV_HEADS, DIM, "f32"))
    pool.poison_pages(np.arange(8, dtype=np.int32))
    s = Sequence(tokens, 4, list(range(8)))
    cached = int(rng.integers(0, prefix + 1))
    backend = ReferenceBackend()
    if cached:
        layer.run(batch_of([(s, cached)]), pool, backend)
        s.done = cached
    out = layer.run(batch_of([(s, len(tokens) - cached)], (TreeMask(0, parents),), positions[cached:]), pool, backend)
    sees = visible(len(tokens))
    for i in range(size):
        sees[prefix + i, prefix:] = False
        j = i
        while j >= 0:
            sees[prefix + i, prefix + j] = True
            j = parents[j]
    if window is not None:
        sees &= np.array(positions)[:, None] - np.array(positions)[None, :] < window
    np.testing.assert_allclose(out, layer.oracle(tokens, positions, sees)[cached:], atol=2e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-5), ("f16", 0.01), ("bf16", 0.08), ("int16", 0.01), ("int8", 0.2)])
def test_kv_dtypes_cost_what_they_may(dtype: str, bound: float) -> None:
    layer, rng = Layer(3), np.random.default_rng(3)
    pool = ReferenceKVPool(KVSpec(8, 4, 1, KV_HEADS, DIM, dtype))
    pool.poison_pages(np.arange(8, dtype=np.int32))
    s = Sequence(rng.integers(0, 50, 21).tolist(), 4, list(range(8)))
    (out,) = run_all(layer, [s], pool, rng)
    error = np.abs(out - layer.oracle(s.tokens, list(range(21)), visible(21))).max()
    assert error < bound
    assert dtype == "f32" or error > 1e-6  # it was really stored in fewer bits


def test_a_zero_vector_survives_int8() -> None:
    pool = ReferenceKVPool(KVSpec(1, 4, 1, 1, DIM, "int8"))
    zero, one = torch.zeros(1, 1, DIM), torch.ones(1, 1, DIM)
    pool.write(0, torch.tensor([0]), torch.tensor([0]), zero, one)
    keys, values = pool.read(0, torch.tensor([0]), 0, 1)
    assert keys.abs().max() == 0 and torch.equal(values, one)


def test_copied_pages_hold_the_same_keys_and_values_in_every_layer() -> None:
    for dtype in ("f32", "int8"):
        pool = ReferenceKVPool(KVSpec(4, 2, 3, KV_HEADS, DIM, dtype))
        for layer in range(3):
            pool.write(
                layer,
                torch.tensor([1]),
                torch.tensor([1]),
                torch.randn(1, KV_HEADS, DIM),
                torch.randn(1, KV_HEADS, DIM),
            )
        pool.copy_pages(np.array([1], np.int32), np.array([3], np.int32))
        for layer in range(3):
            for ours, theirs in zip(
                pool.read(layer, torch.tensor([1]), 0, 2), pool.read(layer, torch.tensor([3]), 0, 2), strict=True
            ):
                assert torch.equal(ours, theirs) and ours.abs().max() > 0


def test_a_row_of_nan_leaves_the_others_as_they_were() -> None:
    layer, backend, rng = Layer(5), ReferenceBackend(), np.random.default_rng(5)
    tokens = [rng.integers(0, 49, 6).tolist() for _ in range(3)]
    layer.table[49] = np.nan
    results = []
    for middle in (tokens[1], [49] * 6):
        pool = ReferenceKVPool(KVSpec(9, 4, 1, KV_HEADS, DIM, "f32"))
        free = list(range(9))
        sequences = [Sequence(t, 4, free) for t in (tokens[0], middle, tokens[2])]
        results.append(layer.run(batch_of([(s, 6) for s in sequences]), pool, backend))
    clean, mixed = results
    assert np.isnan(mixed[6:12]).all()
    np.testing.assert_array_equal(clean[[*range(6), *range(12, 18)]], mixed[[*range(6), *range(12, 18)]])


def test_rope_tables_grow_without_changing_what_they_held() -> None:
    backend = ReferenceBackend()
    early = backend.rotation(ROPE, torch.tensor([3, 1023]))
    backend.rotation(ROPE, torch.tensor([5000]))
    for before, after in zip(early, backend.rotation(ROPE, torch.tensor([3, 1023])), strict=True):
        assert torch.equal(before, after)
    expected = (np.cos(1023 * ROPE.inv_freq) * ROPE.magnitude).astype(np.float32)
    np.testing.assert_array_equal(early[0][1].numpy(), expected)


def test_the_gated_mlp_and_the_projections_follow_their_formulas() -> None:
    backend, rng = ReferenceBackend(), np.random.default_rng(0)
    weights = {"gate": (10, WIDTH), "up": (10, WIDTH), "down": (WIDTH, 10), "head": (50, WIDTH)}
    w = {name: rng.standard_normal(shape) for name, shape in weights.items()}
    norm, bias, table = rng.uniform(0.5, 1.5, WIDTH), rng.standard_normal(WIDTH), rng.standard_normal((50, WIDTH))

    def forward(ops: ReferenceOps) -> torch.Tensor:
        h = ops.embed(backend.matrix([raw(table)]))
        m = ops.gated_mlp_input(h, backend.vector(raw(norm)), backend.matrix([raw(w["gate"]), raw(w["up"])]), 1e-5)
        h = ops.linear_add(m, backend.matrix([raw(w["down"])], [raw(bias)]), h)
        return ops.logits(h, backend.vector(raw(norm)), backend.matrix([raw(w["head"])]), 1e-5)

    pool = ReferenceKVPool(KVSpec(2, 4, 1, KV_HEADS, DIM, "f32"))
    batch = batch_of([(Sequence([1, 2, 3], 4, [0]), 3)])
    batch = StepBatch(
        *(getattr(batch, n) for n in ("token_ids", "positions", "q_indptr", "kv_lens", "page_indptr", "page_ids")),
        np.array([2], np.int32),
    )
    normed = lambda x: x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * norm  # noqa: E731
    x = table[3]
    gate, up = w["gate"] @ normed(x), w["up"] @ normed(x)
    x = x + w["down"] @ (gate / (1 + np.exp(-gate)) * up) + bias
    np.testing.assert_allclose(
        backend.compile(forward, pool)(batch).numpy()[0], w["head"] @ normed(x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_ids": np.array([7], np.int32)}, "page ids must be in 0..3"),
        ({"kv_lens": np.array([9], np.int32)}, "kv_len"),
        ({"kv_lens": np.array([1], np.int32)}, "kv_len"),
        ({"q_indptr": np.array([0, 2], np.int32)}, "does not cover 3 tokens"),
        ({"logit_rows": np.array([3], np.int32)}, "logit_rows must be in 0..2"),
        ({"page_indptr": np.array([0, 5], np.int32)}, "beyond 1 page ids"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change: dict, words: str) -> None:
    layer, pool = Layer(0), ReferenceKVPool(KVSpec(4, 4, 1, KV_HEADS, DIM, "f32"))
    good = batch_of([(Sequence([1, 2, 3], 4, [0]), 3)])
    fields = {name: getattr(good, name) for name in StepBatch.__dataclass_fields__} | change
    with pytest.raises(LayoutError, match=words):
        layer.run(StepBatch(**fields), pool, ReferenceBackend())


def test_pools_refuse_what_they_cannot_be() -> None:
    with pytest.raises(LayoutError, match="KV dtype must be one of"):
        ReferenceKVPool(KVSpec(1, 1, 1, 1, 2, "f8"))
    with pytest.raises(MemoryError, match="KV pages of 1024 tokens need"):
        ReferenceKVPool(KVSpec(1 << 30, 1024, 64, 64, 1024, "f32"))
    pool = ReferenceKVPool(KVSpec(2, 1, 1, 1, 2, "f32"))
    with pytest.raises(LayoutError, match="page ids"):
        pool.copy_pages(np.array([0], np.int32), np.array([2], np.int32))


def test_a_matrix_keeps_its_parts_in_order() -> None:
    backend = ReferenceBackend()
    a, b = np.arange(6.0).reshape(2, 3), np.arange(9.0).reshape(3, 3)
    matrix = backend.matrix([raw(a), raw(b)], [raw(np.ones(2)), raw(np.zeros(3))])
    assert isinstance(matrix, Matrix) and matrix.bias is not None
    np.testing.assert_array_equal(matrix.weight.numpy(), np.concatenate([a, b]))
    assert matrix.bias.tolist() == [1, 1, 0, 0, 0]
