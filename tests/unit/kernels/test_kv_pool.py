"""The native KV pool: whole pages, in every layer, and nothing else."""

import numpy as np
import pytest
from support.paged import Row, Shape, World, bits, draw, ints

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.backends.cpu import CpuKVPool
from anabranch.kernels.layout import KVSpec, LayoutError

DTYPES = ["f32", "f16", "bf16", "int8", "int16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fresh_pool_reads_as_zeros(dtype: str) -> None:
    shape = Shape(2, 1, 16, dtype)
    world = World(shape, {"s": draw(np.random.default_rng(0), shape, 20)})
    world.pool = CpuKVPool(native.library(), world.pool.spec)
    world.attention.pool = world.pool
    out = world.run([Row("s", 20, 1)])[0]
    assert np.isfinite(out).all() and (np.abs(out) < np.abs(world.sequences["s"].v).max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_copied_page_gives_what_its_source_gives_in_every_layer(dtype: str, page_size: int) -> None:
    shape = Shape(4, 2, 24, dtype)
    n = 3 * page_size
    world = World(shape, {"s": draw(np.random.default_rng(1), shape, n)}, page_size=page_size)
    before = [world.run([Row("s", n, n)], layer=layer)[0] for layer in (0, 1)]
    spare = np.setdiff1d(np.arange(world.pool.spec.num_pages), world.pages["s"]).astype(np.int32)[:3]
    world.pool.copy_pages(world.pages["s"], spare)
    world.pool.poison_pages(world.pages["s"])
    world.pages["s"] = spare
    for layer in (0, 1):
        after = world.run([Row("s", n, 1)], layer=layer)[0]
        assert (bits(after) == bits(before[layer][-1:])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_page_spoils_who_reads_it_and_nobody_else(dtype: str) -> None:
    shape = Shape(4, 2, 16, dtype)
    rng = np.random.default_rng(2)
    world = World(shape, {"a": draw(rng, shape, 40), "b": draw(rng, shape, 40)})
    rows = [Row("a", 40, 40), Row("b", 40, 40)]
    before = world.run(rows)
    world.pool.poison_pages(world.pages["a"][:1])
    after = world.run([Row("a", 40, 1), Row("b", 40, 1)])
    assert np.isnan(after[0]).all() and (bits(after[1]) == bits(before[1][-1:])).all()


@pytest.mark.parametrize("pages", [[-1], [0, 7], [2**31 - 1]])
def test_a_page_outside_the_pool_is_refused_with_the_numbers(pages: list[int]) -> None:
    pool = CpuKVPool(native.library(), KVSpec(7, 4, 1, 1, 16))
    for call in (lambda: pool.poison_pages(ints(pages)), lambda: pool.copy_pages(ints(pages), ints(pages))):
        with pytest.raises(LayoutError, match="page ids"):
            call()


def test_copying_needs_as_many_sources_as_destinations() -> None:
    with pytest.raises(LayoutError, match="2 source pages for 1"):
        CpuKVPool(native.library(), KVSpec(7, 4, 1, 1, 16)).copy_pages(ints([0, 1]), ints([2]))


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec(0, 16, 1, 1, 64), KVSpec(4, 0, 1, 1, 64), KVSpec(4, 16, 0, 1, 64), KVSpec(4, 16, 1, 0, 64), KVSpec(4, 16, 1, 1, 0),
        KVSpec(-1, 16, 1, 1, 64), KVSpec(2**31 - 1, 2**16, 2**16, 2**16, 2**14), KVSpec(4, 16, 1, 1, 64, "f64"),
    ],
)  # fmt: skip
def test_an_impossible_pool_is_refused(spec: KVSpec) -> None:
    with pytest.raises(LayoutError):
        CpuKVPool(native.library(), spec)


def test_bytes_per_token_are_those_of_keys_and_values() -> None:
    for dtype, size in (("f32", 4), ("f16", 2), ("bf16", 2), ("int8", 1), ("int16", 2)):
        pool = CpuKVPool(native.library(), KVSpec(10, 16, 3, 2, 64, dtype))
        scales = 2 * 4 if dtype in ("int8", "int16") else 0
        assert pool.layout.page_bytes == 16 * 3 * 2 * (2 * 64 * size + scales)
