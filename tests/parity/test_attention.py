"""Native paged attention against float64 by the book, over every KV dtype, page size, head shape and instruction set."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paged import Row, Shape, World, bits, draw, expected, ints

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.layout import LayoutError, SharedPrefix, StepBatch, TreeMask

# Where |v| is about 1: rounding of float32 sums; with integers also queries and weights in 15 bits. The oracle rounds KV as the pool does.
TOLERANCE = {"f32": 4e-6, "f16": 4e-6, "bf16": 4e-6, "int8": 1e-3, "int16": 1e-3}
NAMES = ["plain", "avx2", "avx512"]


@pytest.fixture(params=range(3), ids=NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[int]:
    library = native.library()
    before = library.anb_isa()
    if library.anb_set_isa(request.param) != request.param:
        pytest.skip(f"this machine has no {NAMES[request.param]}")
    yield request.param
    library.anb_set_isa(before)


def check(world: World, rows: list[Row], groups: tuple[SharedPrefix, ...] = ()) -> None:
    for row, out in zip(rows, world.run(rows, groups)):
        wanted = expected(world.shape, world.sequences[row.name], row)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=TOLERANCE[world.shape.dtype], err_msg=f"{world.shape} {row}")


def fill(world: World, rows: list[Row]) -> None:
    """Bring the pages to where the rows start."""
    for row in rows:
        if row.kv_len > row.num_new:
            world.run([Row(row.name, row.kv_len - row.num_new, row.kv_len - row.num_new)])


@pytest.mark.parametrize("page_size", [1, 4, 16, 24, 64])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8", "int16"])
def test_a_mixed_batch_agrees_with_float64(dtype: str, page_size: int, isa: int) -> None:
    shape = Shape(9, 3, 64, dtype)
    rng = np.random.default_rng(page_size)
    rows = [Row("decode", 301, 1), Row("prefill", 140, 140), Row("extend", 290, 20), Row("short", 3, 1), Row("first", 1, 1)]
    world = World(shape, {row.name: draw(rng, shape, row.kv_len, spread=2.0) for row in rows}, page_size=page_size)
    fill(world, rows)
    check(world, rows)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (4, 4), (7, 1), (8, 2), (14, 2), (32, 2)])
@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 80, 96, 128, 256])
def test_every_head_shape_agrees_with_float64(head_dim: int, num_q_heads: int, num_kv_heads: int, isa: int) -> None:
    shape = Shape(num_q_heads, num_kv_heads, head_dim, "f16")
    rng = np.random.default_rng(head_dim)
    rows = [Row("a", 150, 1), Row("b", 40, 13)]
    world = World(shape, {row.name: draw(rng, shape, row.kv_len) for row in rows})
    fill(world, rows)
    check(world, rows)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.01), ("int16", 3e-4), ("f16", 5e-4)])
def test_stored_in_fewer_bits_the_float64_answer_on_the_original_values_stays(dtype: str, bound: float, isa: int) -> None:
    exact, rounded = Shape(9, 3, 64, "f32"), Shape(9, 3, 64, dtype)
    tokens = draw(np.random.default_rng(8), exact, 600)
    row = Row("s", 600, 100)
    world = World(rounded, {"s": tokens})
    fill(world, [row])
    error = world.run([row])[0] - expected(exact, tokens, row)
    assert np.sqrt((error**2).mean()) < bound * np.sqrt((expected(exact, tokens, row) ** 2).mean())


@pytest.mark.parametrize("window", [1, 5, 16, 100, 128, 129, 1000])
def test_a_sliding_window_sees_its_last_tokens_only(window: int, isa: int) -> None:
    shape = Shape(6, 2, 32, "f32", window)
    world = World(shape, {"s": draw(np.random.default_rng(window), shape, 420)})
    fill(world, [Row("s", 420, 60)])
    check(world, [Row("s", 420, 60)])
    check(world, [Row("s", 420, 1)])


@st.composite
def mixes(draw_: st.DrawFn) -> tuple[Shape, list[Row], int, int]:
    num_kv_heads = draw_(st.sampled_from([1, 2, 3]))
    shape = Shape(
        num_kv_heads * draw_(st.integers(1, 5)), num_kv_heads, draw_(st.sampled_from([16, 24, 64])),
        draw_(st.sampled_from(["f32", "f16", "bf16", "int8", "int16"])), draw_(st.sampled_from([None, None, 7, 130])),
    )  # fmt: skip
    rows = []
    for i in range(draw_(st.integers(1, 6))):
        num_new = draw_(st.one_of(st.just(1), st.integers(1, 70)))
        size = draw_(st.one_of(st.just(0), st.integers(0, min(num_new, 9))))
        parents = tuple(draw_(st.integers(-1, j - 1)) for j in range(size))
        rows.append(Row(str(i), num_new + draw_(st.integers(0, 300)), num_new, parents))
    return shape, rows, draw_(st.sampled_from([1, 3, 16, 32])), draw_(st.integers(0, 2**32))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mixes())
def test_any_ragged_mix_agrees_with_float64_and_each_row_with_itself_alone(mix: tuple[Shape, list[Row], int, int]) -> None:
    shape, rows, page_size, seed = mix
    rng = np.random.default_rng(seed)
    world = World(shape, {row.name: draw(rng, shape, row.kv_len) for row in rows}, page_size=page_size, seed=seed)
    fill(world, [Row(row.name, row.kv_len, row.num_new) for row in rows])
    check(world, rows)
    together = world.run(rows)
    for row, out in zip(rows, together):
        assert (bits(world.run([row])[0]) == bits(out)).all(), f"{row} differs alone: {shape}, page size {page_size}, seed {seed}"


def test_a_tree_equals_its_branches_computed_as_sequences_of_their_own(isa: int) -> None:
    shape = Shape(6, 2, 64, "f32")
    rng = np.random.default_rng(5)
    prefix = draw(rng, shape, 200)
    parents = [int(rng.integers(-1, i)) if i else -1 for i in range(90)]  # more than one word of bits
    tree = draw(rng, shape, len(parents))
    world = World(shape, {"tree": prefix.then(tree)})
    fill(world, [Row("tree", 290, 90)])
    out = world.run([Row("tree", 290, 90, tuple(parents))])[0]
    for i in (0, 1, 17, 63, 64, 65, 89):
        path = [i]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        branch = prefix.then(tree.take(path))
        alone = World(shape, {"branch": branch}).run([Row("branch", len(branch), len(branch))])[0]
        np.testing.assert_allclose(out[i], alone[-1], rtol=0, atol=TOLERANCE["f32"])


def test_tokens_before_a_tree_in_the_same_row_see_a_line() -> None:
    shape = Shape(3, 1, 16, "f32")
    world = World(shape, {"s": draw(np.random.default_rng(0), shape, 40)})
    check(world, [Row("s", 40, 40, (-1, 0, 0, 2, -1))])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8", "int16"])
def test_huge_scores_pick_one_token_and_never_overflow(dtype: str, isa: int) -> None:
    shape = Shape(2, 1, 16, dtype)
    rng = np.random.default_rng(3)
    tokens = draw(rng, shape, 150)
    tokens.k[:] = rng.choice([-1.0, 1.0], size=tokens.k.shape) * np.linspace(1, 2, 150)[:, None, None]
    tokens.q[:] = 3e3 * np.sign(tokens.k[149])
    world = World(shape, {"s": tokens})
    out = world.run([Row("s", 150, 150)])[0]
    assert np.isfinite(out).all()
    best = (stored := tokens.k[:, 0].astype(np.float64) @ tokens.q[149].T.astype(np.float64)).argmax(axis=0)
    assert (np.sort(stored, axis=0)[-1] - np.sort(stored, axis=0)[-2] > 1000).all()
    np.testing.assert_allclose(out[149], tokens.v[best, 0], atol=0.03)


def test_f16_pages_saturate_instead_of_turning_infinite(isa: int) -> None:
    shape = Shape(1, 1, 16, "f16")
    tokens = draw(np.random.default_rng(0), shape, 1)
    tokens.v[0, 0, :4] = [1e6, -1e6, 65504, 1e38]
    out = World(shape, {"s": tokens}).run([Row("s", 1, 1)])[0]
    assert out[0, 0, :4].tolist() == [65504, -65504, 65504, 65504]


def broken(batch: StepBatch, **changes: object) -> StepBatch:
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    return StepBatch(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": ints([2, 20])}, "row 0: kv_len 2 is less than its 3 new tokens"),
        ({"kv_lens": ints([40, 100])}, "row 1: 2 pages of 16 slots cannot hold kv_len 100"),
        ({"page_ids": ints([0, 1, 99, 2, 3])}, "page id 99 is outside the pool"),
        ({"page_ids": ints([0, 1, -1, 2, 3])}, "page id -1 is outside the pool"),
        ({"q_indptr": ints([0, 3, 5])}, "q_indptr must run from 0 to the 4 tokens"),
        ({"q_indptr": ints([0, 5, 4])}, "must not decrease"),
        ({"q_indptr": ints([0, 4])}, "2 rows need one more of q_indptr"),
        ({"page_indptr": ints([0, 3, 6])}, "page_indptr must run from 0 to the 5 page ids"),
        ({"trees": (TreeMask(2, ints([-1])),)}, "tree 0: row 2 is outside the 2 rows"),
        ({"trees": (TreeMask(1, ints([-1, 0])),)}, "row 1: a tree of 2 tokens does not fit its 1 new tokens"),
        ({"trees": (TreeMask(0, ints([-1, 1])),)}, r"tree token 1 has parent 1, which must be in \[-1, 1\)"),
        ({"trees": (TreeMask(0, ints([-1])), TreeMask(0, ints([-1])))}, "row 0 has two trees"),
        ({"groups": (SharedPrefix(0, 3, 16),)}, r"rows \[0, 3\) must be ascending"),
        ({"groups": (SharedPrefix(0, 2, 16),)}, "rows 0 and 1 differ in their first 1 pages"),
        ({"groups": (SharedPrefix(0, 1, 8),)}, "8 shared tokens are not whole pages of 16"),
        ({"groups": (SharedPrefix(0, 2, 32),)}, "row 1 has 19 slots before its new tokens, fewer than the 32 shared"),
    ],
)
def test_a_step_that_does_not_fit_together_is_refused_with_the_numbers(changes: dict[str, object], message: str) -> None:
    shape = Shape()
    rng = np.random.default_rng(0)
    world = World(shape, {"a": draw(rng, shape, 40), "b": draw(rng, shape, 20)})
    batch = broken(world.batch([Row("a", 40, 3), Row("b", 20, 1)]), page_ids=ints([0, 1, 2, 3, 4]))
    world.attention.begin(batch)
    with pytest.raises(LayoutError, match=message):
        world.attention.begin(broken(batch, **changes))


