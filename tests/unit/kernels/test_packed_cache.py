"""Packed weights kept for the next start: found again bit for bit, or not used at all."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.weights import from_floats, random_raw, random_rows

from anabranch.kernels import build, packed_cache
from anabranch.kernels.backends.cpu import CpuBackend, CpuMatrix
from anabranch.kernels.formats import RawTensor
from anabranch.kernels.packed_cache import PackedCache, WeightStore

SHAPES = {0: (2, 1, 64), 3: (2, 1, 128)}


@pytest.fixture(autouse=True)
def keep_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "WORTH_KEEPING_BYTES", 1)


def entry(seed: int = 0, kind: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SHAPES[kind], dtype=np.uint8)


def cache_of(directory: Path, source: str = "model", *, packing: str = "fast", budget_bytes: int = 1 << 30) -> PackedCache:
    return PackedCache(WeightStore(directory, source, budget_bytes), packing)


def kept(tmp_path: Path, **entries: np.ndarray) -> Path:
    cache = cache_of(tmp_path)
    for name, values in entries.items():
        cache.add(name, 0, values)
    cache.save()
    return cache.path


def test_entries_are_found_again_and_only_under_their_key(tmp_path: Path) -> None:
    kept(tmp_path, a=entry(1), b=entry(2))
    again = cache_of(tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        found = again.find(name, SHAPES)
        assert found is not None and found[0] == 0
        np.testing.assert_array_equal(found[1], entry(seed))
        assert found[1].ctypes.data % 64 == 0 and not found[1].flags.writeable
    assert again.find("c", SHAPES) is None and cache_of(tmp_path, "other model").find("a", SHAPES) is None


def test_an_entry_of_another_shape_or_kind_is_not_used(tmp_path: Path) -> None:
    kept(tmp_path, a=entry(1))
    again = cache_of(tmp_path)
    assert again.find("a", {0: (1, 2, 64)}) is None and again.find("a", {3: SHAPES[0]}) is None


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "no json", "lying header", "gap", "not a dict", "negative"])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    path = kept(tmp_path, a=entry(1), b=entry(2))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]

    def with_header(changed: object) -> bytes:
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + body

    second = header["0:b"]
    damaged = {
        "empty": b"",
        "cut": data[:-1],
        "longer": data + b"x",
        "no json": data[:8] + b"\xff" * length + body,
        "lying header": (1 << 60).to_bytes(8, "little") + data[8:],
        "gap": with_header(header | {"0:b": second | {"data_offsets": [129, 257]}}),
        "not a dict": with_header([1, 2]),
        "negative": with_header(header | {"0:b": second | {"shape": [-2, -1, 64]}}),
    }[damage]
    path.write_bytes(damaged)
    cache = cache_of(tmp_path)
    assert cache.find("a", SHAPES) is None
    cache.add("a", 0, entry(1))
    cache.save()
    assert cache_of(tmp_path).find("a", SHAPES) is not None


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, a=entry(1))
    real = os.geteuid()
    monkeypatch.setattr(packed_cache.os, "geteuid", lambda: real + 1)
    assert cache_of(tmp_path).find("a", SHAPES) is None


def test_nothing_is_written_when_everything_was_found(tmp_path: Path) -> None:
    path = kept(tmp_path, a=entry(1))
    before = path.stat()
    again = cache_of(tmp_path)
    again.find("a", SHAPES)
    again.save()
    assert path.stat().st_ino == before.st_ino and list(tmp_path.iterdir()) == [path]


def test_a_disk_that_refuses_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = cache_of(tmp_path / "file" / "cache")
    cache.add("a", 0, entry(1))
    cache.save()
    assert "could not be kept" in caplog.text


def test_the_oldest_files_go_when_the_budget_is_exceeded(tmp_path: Path) -> None:
    paths = []
    for i in range(4):
        cache = cache_of(tmp_path, f"model {i}", budget_bytes=3 * 4300)
        cache.add("a", 0, entry(i))
        cache.save()
        paths.append(cache.path)
        os.utime(cache.path, (1000 + i, 1000 + i))
    assert [path.exists() for path in paths] == [False, True, True, True]
    tight = cache_of(tmp_path, "one more", budget_bytes=200)
    tight.add("a", 0, entry(9))
    tight.save()
    assert list(tmp_path.iterdir()) == [tight.path]


def test_the_file_used_last_stays_longest(tmp_path: Path) -> None:
    for i in range(3):
        cache = cache_of(tmp_path, f"model {i}", budget_bytes=3 * 4300)
        cache.add("a", 0, entry(i))
        cache.save()
        os.utime(cache.path, (1000 + i, 1000 + i))
    first = cache_of(tmp_path, "model 0")
    assert first.find("a", SHAPES) is not None
    another = cache_of(tmp_path, "one more", budget_bytes=3 * 4300)
    another.add("a", 0, entry(9))
    another.save()
    assert first.path.exists() and not cache_of(tmp_path, "model 1").path.exists()


def test_weights_over_the_whole_budget_are_not_kept(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, budget_bytes=entry(1).nbytes - 1)
    cache.add("a", 0, entry(1))
    cache.save()
    assert not list(tmp_path.iterdir())


def test_few_bytes_are_not_worth_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "WORTH_KEEPING_BYTES", entry(1).nbytes + 1)
    assert not kept(tmp_path, a=entry(1)).exists()


def test_what_a_writer_left_that_died_is_removed_and_what_one_writes_now_is_not(tmp_path: Path) -> None:
    (tmp_path / "writing-old").write_bytes(b"x")
    os.utime(tmp_path / "writing-old", (1000, 1000))
    (tmp_path / "writing-new").write_bytes(b"x")
    path = kept(tmp_path, a=entry(1))
    assert set(tmp_path.iterdir()) == {path, tmp_path / "writing-new"}


def test_entries_of_many_sizes_come_back_from_the_chunks_they_are_written_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "HUGE_PAGE_BYTES", 4096 + 100)
    sizes = (1, 31, 2, 64, 7)
    entries = [np.random.default_rng(i).integers(0, 256, (n, 2, 320), dtype=np.uint8) for i, n in enumerate(sizes)]
    cache = cache_of(tmp_path)
    for i, values in enumerate(entries):
        cache.add(str(i), 0, values[:, :1])  # not contiguous
    cache.save()
    again = cache_of(tmp_path)
    for i, values in enumerate(entries):
        found = again.find(str(i), {0: (len(values), 1, 320)})
        assert found is not None
        np.testing.assert_array_equal(found[1], values[:, :1])


def test_a_rejected_entry_ends_the_use_of_the_file_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path, a=entry(1), b=entry(2), c=entry(3))
    again = cache_of(tmp_path)
    assert again.find("a", SHAPES) is not None and again.find("b", SHAPES) is not None
    again.reject("b")
    assert again.find("b", SHAPES) is None and again.find("c", SHAPES) is None
    again.add("b", 0, entry(5))
    again.add("c", 0, entry(3))
    again.save()
    assert len(caplog.records) == 1 and "packing again: b differs" in caplog.text
    for name, seed in (("a", 1), ("b", 5), ("c", 3)):
        found = cache_of(tmp_path).find(name, SHAPES)
        assert found is not None
        np.testing.assert_array_equal(found[1], entry(seed))


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    def write(_: int) -> None:
        cache = cache_of(tmp_path)
        if cache.find("a", SHAPES) is None:
            cache.add("a", 0, entry(1))
        cache.save()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(32)))
    assert [path.name for path in tmp_path.iterdir()] == [cache_of(tmp_path).path.name]
    found = cache_of(tmp_path).find("a", SHAPES)
    assert found is not None
    np.testing.assert_array_equal(found[1], entry(1))


def rename(raw: RawTensor, name: str) -> RawTensor:
    return RawTensor(name, raw.format, raw.shape, raw.data)


def matrices(backend: CpuBackend) -> list[CpuMatrix]:
    huge = np.random.default_rng(5).normal(0, 1e9, (40, 96)).astype(np.float32)
    return [
        backend.matrix([rename(random_raw("Q4_K", 64, 256, 1), "q"), rename(random_raw("Q6_K", 40, 256, 2), "v")]),
        backend.matrix([rename(random_raw("Q4_1", 70, 256, 3), "down")]),
        backend.matrix([from_floats("huge", huge)]),
        backend.matrix([rename(random_raw("BF16", 64, 96, 4), "half")]),
    ]


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_a_backend_computes_the_same_from_mapped_weights_without_packing(tmp_path: Path, precision: str) -> None:
    def products(backend: CpuBackend) -> list[np.ndarray]:
        out = [matrix.multiply(random_rows(3, matrix.k)) for matrix in matrices(backend)]
        backend._packer.finish()
        return out

    store = WeightStore(tmp_path, "model", 1 << 30)
    cold = products(CpuBackend(precision=precision, store=store))
    backend = CpuBackend(precision=precision, store=store)
    warm = products(backend)
    assert backend._packer.arena.num_bytes == 0
    for a, b in zip(cold, warm):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    other = "exact" if precision == "fast" else "fast"
    products(CpuBackend(precision=other, store=store))
    assert len(list(tmp_path.glob("packed-*.safetensors"))) == 2


def test_kept_weights_of_another_model_under_the_same_key_are_packed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = WeightStore(tmp_path, "model", 1 << 30)
    x = random_rows(3, 256)

    def product(seed: int) -> np.ndarray:
        backend = CpuBackend(store=store)
        matrix = backend.matrix([rename(random_raw("Q4_1", 70, 256, seed), "down")])
        out = matrix.multiply(x)
        backend._packer.finish()
        return out

    assert not np.array_equal(product(1), product(2)) and "down differs" in caplog.text
    np.testing.assert_array_equal(product(2), CpuBackend().matrix([rename(random_raw("Q4_1", 70, 256, 2), "down")]).multiply(x))
    assert len(caplog.records) == 1


def test_a_changed_native_library_does_not_read_what_another_one_packed(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "model", 1 << 30)
    assert PackedCache(store, "fast:anabranch-cpu-1.so").path != PackedCache(store, "fast:anabranch-cpu-2.so").path
    library = build.build()
    assert CpuBackend(store=store)._packer._cache.path == PackedCache(store, f"fast:{library.name}").path  # type: ignore[union-attr]
