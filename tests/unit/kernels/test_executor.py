"""The recorded forward of the native backend: agrees with the reference, and no row's bits depend on the rest of the step."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_forward import Row, Shape, batch_of, ints, tiny_forward
from support.weights import from_floats, random_raw

from anabranch.kernels.backends.cpu import CompiledStep, CpuBackend
from anabranch.kernels.interface import AttentionShape, Logits, Ops, Rope
from anabranch.kernels.layout import LayoutError, StepBatch
from anabranch.kernels.reference import ReferenceBackend

Floats = np.ndarray
SHAPES = {
    "plain": Shape(),
    "q4_1": Shape(form="Q4_1"),
    "floats of odd widths": Shape(form="F32", hidden=50, inner=70, head_dim=10),
    "bf16": Shape(form="BF16"),
    "mixed k-quants": Shape(form="Q4_K", hidden=256, head_dim=64, inner=256, formats={"v": "Q6_K", "down": "Q6_K", "embedding": "Q5_K"}),
    "one kv head": Shape(kv_heads=1),
    "no grouping": Shape(kv_heads=4),
    "biases": Shape(biases=True),
    "head norms": Shape(head_norms=True),
    "partly rotated": Shape(rotated_pairs=4),
    "not rotated": Shape(rotated_pairs=0),
    "window": Shape(window=5),
    "heads of 8": Shape(head_dim=8, q_heads=12, kv_heads=6, form="F32"),
    "heads of 32": Shape(head_dim=32),
    "heads of 64": Shape(head_dim=64, q_heads=3, kv_heads=1),
    "heads of 80": Shape(head_dim=80, q_heads=6, kv_heads=3, form="F16"),
    "heads of 96": Shape(head_dim=96),
    "heads of 128": Shape(head_dim=128),
    "heads of 256": Shape(head_dim=256, q_heads=2, kv_heads=1),
}


def step_of(backend: CpuBackend, shape: Shape, dtype: str = "f32", num_pages: int = 64) -> CompiledStep:
    pool = backend.kv_pool(shape.kv(dtype=dtype, num_pages=num_pages))
    pool.poison_pages(ints(np.arange(num_pages)))
    return backend.compile(tiny_forward(backend, shape), pool)


def sequences(shape: Shape, lengths: list[int], seed: int = 0) -> list[Row]:
    """Whole sequences, each with pages of its own in scattered order."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // 16) for n in lengths]
    pages = np.split(ints(rng.permutation(64)[: sum(counts)]), np.cumsum(counts)[:-1])
    return [Row(ints(rng.integers(0, shape.vocab, n)), 0, n, p) for n, p in zip(lengths, pages)]


def part(row: Row, start: int, stop: int) -> Row:
    return dataclasses.replace(row, start=start, stop=stop)


def alone(step: CompiledStep, rows: list[Row]) -> list[Floats]:
    return [step(batch_of([row])).copy() for row in rows]


def assert_same_bits(got: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("name", SHAPES)
def test_exact_precision_agrees_with_the_reference(name: str) -> None:
    shape = SHAPES[name]
    rows = sequences(shape, [1, 37, 20])
    reference = ReferenceBackend()
    expected = reference.compile(tiny_forward(reference, shape), reference.kv_pool(shape.kv()))(batch_of(rows)).numpy()
    got = step_of(CpuBackend(precision="exact"), shape)(batch_of(rows))
    assert got.shape == (58, shape.vocab)
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", SHAPES)
def test_fast_precision_stays_near_the_exact_one(name: str) -> None:
    shape = SHAPES[name]
    rows = sequences(shape, [1, 37, 20])
    exact = step_of(CpuBackend(precision="exact"), shape)(batch_of(rows))
    fast = step_of(CpuBackend(), shape)(batch_of(rows))
    assert 0 < np.abs(fast - exact).mean() < 0.05 * exact.std()


@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("dtype", ["f16", "int16", "int8"])
@pytest.mark.parametrize("name", ["plain", "q4_1", "mixed k-quants", "biases", "heads of 64", "floats of odd widths"])
def test_chunks_crowds_and_threads_do_not_change_a_bit(precision: str, dtype: str, name: str) -> None:
    shape, backend = SHAPES[name], CpuBackend(precision=precision, num_threads=2)
    step = step_of(backend, shape, dtype)
    rows = sequences(shape, [60, 1, 33, 17])
    whole = alone(step, rows)
    assert np.isfinite(np.concatenate(whole)).all()
    for num_threads in (1, 2, 3):
        backend.set_num_threads(num_threads)
        assert_same_bits(step(batch_of(rows)), np.concatenate(whole))
    chunks = [step(batch_of([part(rows[0], a, b)])).copy() for a, b in ((0, 1), (1, 19), (19, 20), (20, 60))]
    assert_same_bits(np.concatenate(chunks), whole[0])
    step(batch_of([part(rows[2], 0, 30), part(rows[0], 0, 59)]))
    mixed = step(batch_of([part(rows[2], 30, 33), part(rows[0], 59, 60), rows[3]]))
    assert_same_bits(mixed, np.concatenate([whole[2][30:], whole[0][59:], whole[3]]))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_of_any_crowd_gives_the_same_bits(data: st.DataObject) -> None:
    shape = SHAPES["q4_1"]
    step = step_of(CpuBackend(), shape)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    rows = sequences(shape, lengths, seed=data.draw(st.integers(0, 9)))
    whole = alone(step, rows)
    done = [0] * len(rows)
    while any(d < n for d, n in zip(done, lengths)):
        stops = [data.draw(st.integers(d, n)) if d < n else d for d, n in zip(done, lengths)]
        if stops == done:
            stops = lengths
        chosen = [i for i in range(len(rows)) if stops[i] > done[i]]
        out = step(batch_of([part(rows[i], done[i], stops[i]) for i in chosen]))
        assert_same_bits(out, np.concatenate([whole[i][done[i] : stops[i]] for i in chosen]))
        done = stops


def test_a_long_prefill_runs_in_blocks_of_rows_with_the_same_bits() -> None:
    shape = dataclasses.replace(SHAPES["q4_1"], layers=1)
    step = step_of(CpuBackend(), shape)
    (row,) = sequences(shape, [700])
    whole = step(batch_of([row])).copy()
    pieces = [step(batch_of([part(row, a, a + 100)])).copy() for a in range(0, 700, 100)]
    assert_same_bits(np.concatenate(pieces), whole)


def test_only_the_logits_asked_for_are_computed_and_in_order() -> None:
    shape = SHAPES["plain"]
    step = step_of(CpuBackend(), shape)
    rows = sequences(shape, [12, 30])
    everything = step(batch_of(rows)).copy()
    last = step(batch_of(rows, all_logits=False))
    assert_same_bits(last, everything[[11, 41]])
    none = step(dataclasses.replace(batch_of(rows), logit_rows=ints([])))
    assert none.shape == (0, shape.vocab)


def test_a_broken_row_leaves_the_others_alone() -> None:
    """A NaN in one token's embedding makes that sequence NaN from there on, and nothing else."""
    shape = Shape(form="F32")
    backend = CpuBackend()
    rows = sequences(shape, [20, 20, 20])
    for row in rows:
        row.ids[row.ids == 7] = 8
    clean = step_of(backend, shape)(batch_of(rows)).copy()
    rows[1].ids[9] = 7
    out = step_of(backend, dataclasses.replace(shape, broken_token=7))(batch_of(rows))
    assert_same_bits(np.delete(out, np.arange(29, 40), axis=0), np.delete(clean, np.arange(29, 40), axis=0))
    assert np.isnan(out[29:40]).all()


def test_the_logits_of_a_step_live_until_the_next_one() -> None:
    step = step_of(CpuBackend(), SHAPES["plain"])
    rows = sequences(SHAPES["plain"], [9, 14])
    first = step(batch_of(rows[:1]))
    kept = first.copy()
    again = step(batch_of(rows[:1]))
    assert_same_bits(again, kept)


def wrong(batch: StepBatch, **changes: object) -> StepBatch:
    return dataclasses.replace(batch, **changes)


def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    shape = SHAPES["plain"]
    step = step_of(CpuBackend(), shape)
    rows = sequences(shape, [20, 5])
    good = batch_of(rows)
    expected = step(good).copy()
    ids = good.token_ids.copy()
    ids[3] = shape.vocab
    for batch, message in (
        (wrong(good, token_ids=ids), "token 3 has id 130, outside the vocabulary of 130"),
        (wrong(good, token_ids=-ids - 1), "token 0 has id -"),
        (wrong(good, logit_rows=ints([25])), r"logit_rows\[0\] is 25, but the step has 25 tokens"),
        (wrong(good, positions=good.positions - 1), "token 0 has position -1"),
        (wrong(good, positions=good.positions[:-1]), "positions of 24: expected 3, 3 and 25"),
        (wrong(good, q_indptr=good.q_indptr[:-1]), "2 rows of 25 tokens with q_indptr of 2"),
        (wrong(good, page_ids=good.page_ids + 64), "page"),
    ):
        with pytest.raises(LayoutError, match=message):
            step(batch)
    assert_same_bits(step(good), expected)


def test_a_forward_that_reads_a_value_after_it_is_gone_is_our_mistake() -> None:
    shape, backend = SHAPES["plain"], CpuBackend()
    made = tiny_forward(backend, shape)

    class Late:
        """Hands the old residual on where the model expects the new one."""

        def __init__(self, ops: Ops) -> None:
            self.ops = ops

        def __getattr__(self, name: str) -> object:
            return getattr(self.ops, name)

        def linear_add(self, x: object, weight: object, residual: object) -> object:
            self.ops.linear_add(x, weight, residual)
            return residual

    with pytest.raises(AssertionError, match="read after its buffer was written again"):
        backend.compile(lambda ops: made(Late(ops)), backend.kv_pool(shape.kv()))  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_together_are_refused_when_compiled() -> None:
    backend, shape = CpuBackend(), SHAPES["plain"]
    with pytest.raises(LayoutError, match="does not fit a KV pool"):
        backend.compile(tiny_forward(backend, shape), backend.kv_pool(dataclasses.replace(shape, kv_heads=1).kv()))

    def mismatched(ops: Ops) -> Logits:
        h = ops.embed(backend.matrix([random_raw("Q8_0", 40, 64)]))
        norm = backend.vector(from_floats("norm", np.ones(64, np.float32)))
        heads = AttentionShape(4, 2, 16, 1.0, 1e-5)
        q = ops.attention_input(h, 0, norm, backend.matrix([random_raw("Q8_0", 96, 64)]), heads, Rope(np.ones(8)))
        return ops.logits(q, norm, backend.matrix([random_raw("Q8_0", 40, 64)]), 1e-5)

    with pytest.raises(LayoutError, match="give q, k and v as three parts"):
        backend.compile(mismatched, backend.kv_pool(shape.kv()))


def test_pages_are_copied_in_every_layer() -> None:
    shape, backend = SHAPES["plain"], CpuBackend()
    pool = backend.kv_pool(shape.kv())
    step = backend.compile(tiny_forward(backend, shape), pool)
    (row,) = sequences(shape, [40])
    expected = step(batch_of([row])).copy()
    free = ints(np.setdiff1d(np.arange(64), row.pages)[:3])
    pool.copy_pages(row.pages, free)
    pool.poison_pages(row.pages)
    moved = dataclasses.replace(row, pages=free, start=39)
    assert_same_bits(step(batch_of([moved])), expected[39:])


def test_settings_out_of_range_name_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="'fast' or 'exact', got 'half'"):
        CpuBackend(precision="half")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        CpuBackend(num_threads=0)
    with pytest.raises(LayoutError, match="f32, f16, bf16, int16, int8, got 'fp8'"):
        CpuBackend().kv_pool(Shape().kv(dtype="fp8"))
