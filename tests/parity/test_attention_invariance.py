"""Bit for bit, attention gives a token the same whatever else is in the batch, however its prompt was cut, and wherever its pages lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import F32, Row, Shape, Tokens, World, bits, draw

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.layout import SharedPrefix

DTYPES = ["f32", "f16", "bf16", "int8", "int16"]
LENGTH = 403  # ends inside a page, a chunk and a block


@pytest.fixture(autouse=True)
def restore_threads_and_isa() -> object:
    library = native.library()
    threads, isa = library.anb_num_threads(), library.anb_isa()
    yield
    library.anb_set_num_threads(threads)
    library.anb_set_isa(isa)


def same(a: F32, b: F32) -> bool:
    return bool((bits(a) == bits(b)).all())


def sequence(shape: Shape, seed: int = 0, n: int = LENGTH) -> Tokens:
    return draw(np.random.default_rng(seed), shape, n, spread=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", [0, 1, 2])
def test_a_prompt_gives_the_same_bits_in_any_chunks(dtype: str, isa: int) -> None:
    if native.library().anb_set_isa(isa) != isa:
        pytest.skip("this machine lacks the instruction set")
    shape = Shape(9, 3, 64, dtype)
    world = World(shape, {"s": sequence(shape)})
    whole = world.run_in_chunks("s", [])
    assert np.isfinite(whole).all()
    for chunk in (1, 7, 16, 64, 130):
        if chunk == 1 and isa == 0:
            continue
        assert same(world.run_in_chunks("s", range(chunk, LENGTH, chunk)), whole), f"chunks of {chunk}"


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 299), max_size=12), dtype=st.sampled_from(DTYPES), window=st.sampled_from([None, 40, 200]))
def test_a_prompt_gives_the_same_bits_however_it_is_cut(cuts: set[int], dtype: str, window: int | None) -> None:
    shape = Shape(6, 2, 32, dtype, window)
    world = World(shape, {"s": sequence(shape, n=300)})
    assert same(world.run_in_chunks("s", sorted(cuts)), world.run_in_chunks("s", []))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_page_size_and_placement_change_nothing(dtype: str, head_dim: int) -> None:
    shape = Shape(4, 2, head_dim, dtype)
    tokens = sequence(shape)
    outs = [World(shape, {"s": tokens}, page_size=p, seed=p).run([Row("s", LENGTH, LENGTH)])[0] for p in (16, 1, 3, 4, 32, 64, 512)]
    assert np.isfinite(outs[0]).all() and all(same(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_gives_the_same_bits_alone_and_in_a_crowd(dtype: str, num_threads: int) -> None:
    shape = Shape(9, 3, 64, dtype)
    rng = np.random.default_rng(1)
    rows = [Row(f"crowd{i}", int(n), int(rng.integers(1, n))) for i, n in enumerate(rng.integers(2, 500, 12))]
    rows = [Row("decode", 402, 1), *rows[:6], Row("prompt", LENGTH, 200), *rows[6:]]
    world = World(shape, {row.name: sequence(shape, i, row.kv_len) for i, row in enumerate(rows)})
    native.library().anb_set_num_threads(num_threads)
    for row in rows:
        if row.kv_len > row.num_new:
            world.run([Row(row.name, row.kv_len - row.num_new, row.kv_len - row.num_new)])
    crowd = world.run(rows)
    native.library().anb_set_num_threads(1)
    for row, out in zip(rows, crowd):
        assert np.isfinite(out).all() and same(world.run([row])[0], out), row


def test_a_long_decode_split_over_threads_equals_the_prompts_last_token() -> None:
    shape = Shape(9, 3, 64, "f16")
    n = 2500
    world = World(shape, {"s": sequence(shape, n=n), "other": sequence(shape, 1, n)})
    native.library().anb_set_num_threads(1)
    whole = world.run([Row("s", n, n), Row("other", n, n)])
    for num_threads in (2, 4):
        native.library().anb_set_num_threads(num_threads)
        for num_new in (1, 5, 33):
            assert same(world.run([Row("s", n, num_new)])[0], whole[0][-num_new:]), (num_threads, num_new)
        both = world.run([Row("s", n, 1), Row("other", n - 3, 40)])
        assert same(both[0], whole[0][-1:]) and same(both[1], whole[1][-43:-3])


@pytest.mark.parametrize("dtype", ["f16", "int8", "int16"])
@pytest.mark.parametrize(("page_size", "shared"), [(16, 256), (16, 400), (64, 128), (4, 300), (16, 112), (16, 16)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_of_a_shared_prefix_group_give_the_bits_they_give_apart(dtype: str, page_size: int, shared: int, num_threads: int) -> None:
    shape = Shape(9, 3, 64, dtype)
    prefix = sequence(shape, 0, shared)
    lengths = [shared + extra for extra in (1, 2, 17, 90, 300, 5, 33)]
    tokens = {str(i): prefix.then(sequence(shape, 10 + i, n - shared)) for i, n in enumerate(lengths)}
    tokens["stranger"] = sequence(shape, 99, 200)
    world = World(shape, tokens, page_size=page_size)
    world.share("0", [str(i) for i in range(1, len(lengths))], shared)
    native.library().anb_set_num_threads(num_threads)
    for i, n in enumerate(lengths):
        world.run([Row(str(i), n, n if i == 0 else n - shared)])
    rows = [Row(str(i), n, 1 if i % 2 else n - shared) for i, n in enumerate(lengths)]
    apart = world.run([Row("stranger", 200, 200), *rows, Row("stranger", 200, 1)])
    group = (SharedPrefix(1, 1 + len(rows), shared),)
    grouped = world.run([Row("stranger", 200, 200), *rows, Row("stranger", 200, 1)], group)
    assert all(np.isfinite(out).all() for out in apart)
    assert all(same(a, b) for a, b in zip(apart, grouped))


def test_two_groups_and_rows_outside_them_share_a_step() -> None:
    shape = Shape(6, 2, 32, "f16", window=300)
    first, second = sequence(shape, 0, 256), sequence(shape, 1, 384)
    tokens = {name: (first if name < "c" else second).then(sequence(shape, ord(name), 30)) for name in "abcd"}
    world = World(shape, tokens)
    world.share("a", ["b"], 256)
    world.share("c", ["d"], 384)
    rows = [Row(name, len(tokens[name]), 30) for name in "abcd"]
    for row in (Row("a", 256, 256), Row("c", 384, 384)):
        world.run([row])
    apart = world.run(rows)
    grouped = world.run(rows, (SharedPrefix(0, 2, 256), SharedPrefix(2, 4, 384)))
    assert all(same(a, b) for a, b in zip(apart, grouped))


def test_what_a_token_does_not_see_never_reaches_it() -> None:
    shape = Shape(9, 3, 64, "f32")
    tokens = sequence(shape)
    clean = World(shape, {"s": tokens}).run([Row("s", LENGTH, LENGTH)])[0]
    for bad in (np.nan, np.inf, -np.inf, 3e38):
        dirty = Tokens(tokens.q.copy(), tokens.k.copy(), tokens.v.copy())
        for array in (dirty.q, dirty.k, dirty.v):
            array[250:] = bad
        out = World(shape, {"s": dirty}).run([Row("s", LENGTH, LENGTH)])[0]
        assert same(out[:250], clean[:250]) and (bad == 3e38 or np.isnan(out[250:]).all())


def test_a_broken_query_row_breaks_only_itself() -> None:
    shape = Shape(4, 2, 16, "f16")
    rng = np.random.default_rng(0)
    world = World(shape, {"a": draw(rng, shape, 150), "b": draw(rng, shape, 150)})
    rows = [Row("a", 150, 150), Row("b", 150, 150)]
    clean = world.run(rows)
    world.sequences["a"].q[70, 1, 3] = np.nan
    broken = world.run(rows)
    assert np.isnan(broken[0][70, 1]).all() and same(broken[1], clean[1])
    healthy = np.ones((150, 4), np.bool_)
    healthy[70, 1] = False
    assert same(broken[0][healthy], clean[0][healthy])


def test_reading_a_slot_that_nobody_wrote_shows_as_nan() -> None:
    for dtype in DTYPES:
        shape = Shape(2, 1, 16, dtype)
        world = World(shape, {"s": sequence(shape, n=40)})
        assert np.isnan(world.run([Row("s", 40, 1)])[0]).all(), dtype


def test_layers_do_not_mix() -> None:
    shape = Shape(3, 1, 16, "f16")
    world = World(shape, {"s": sequence(shape, n=50)})
    first = world.run([Row("s", 50, 50)], layer=0)[0]
    world.sequences["s"] = sequence(shape, 1, 50)
    world.run([Row("s", 50, 50)], layer=1)
    world.sequences["s"] = sequence(shape, 0, 50)
    assert same(world.run([Row("s", 50, 1)], layer=0)[0], first[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_avx2_and_avx512_give_the_same_bits(dtype: str) -> None:
    library = native.library()
    if library.anb_set_isa(2) != 2:
        pytest.skip("this machine has no avx512")
    shape = Shape(9, 3, 64, dtype)
    world = World(shape, {"s": sequence(shape)})
    wide = world.run([Row("s", LENGTH, LENGTH)])[0]
    library.anb_set_isa(1)
    assert same(world.run([Row("s", LENGTH, LENGTH)])[0], wide)
