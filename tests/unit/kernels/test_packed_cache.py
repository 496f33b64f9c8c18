"""Packed weights kept for the next start: found again bit for bit, or not used at all."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.weights import from_floats, random_raw, random_rows

from anabranch.kernels import packed_cache
from anabranch.kernels.backends.cpu import CpuBackend, CpuMatrix
from anabranch.kernels.formats import RawTensor
from anabranch.kernels.packed_cache import PackedCache

SHAPES = {0: (2, 1, 64), 3: (2, 1, 128)}


def entry(seed: int = 0, kind: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SHAPES[kind], dtype=np.uint8)


def kept(tmp_path: Path, **entries: np.ndarray) -> Path:
    cache = PackedCache(tmp_path, "key")
    for name, values in entries.items():
        cache.add(name, 0, values)
    cache.save()
    return cache.path


def test_entries_are_found_again_and_only_under_their_key(tmp_path: Path) -> None:
    kept(tmp_path, a=entry(1), b=entry(2))
    again = PackedCache(tmp_path, "key")
    for name, seed in (("a", 1), ("b", 2)):
        found = again.find(name, SHAPES)
        assert found is not None and found[0] == 0
        np.testing.assert_array_equal(found[1], entry(seed))
        assert found[1].ctypes.data % 64 == 0 and not found[1].flags.writeable
    assert again.find("c", SHAPES) is None and PackedCache(tmp_path, "other key").find("a", SHAPES) is None


def test_an_entry_of_another_shape_or_kind_is_not_used(tmp_path: Path) -> None:
    kept(tmp_path, a=entry(1))
    again = PackedCache(tmp_path, "key")
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
    cache = PackedCache(tmp_path, "key")
    assert cache.find("a", SHAPES) is None
    cache.add("a", 0, entry(1))
    cache.save()
    assert PackedCache(tmp_path, "key").find("a", SHAPES) is not None


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, a=entry(1))
    real = os.geteuid()
    monkeypatch.setattr(packed_cache.os, "geteuid", lambda: real + 1)
    assert PackedCache(tmp_path, "key").find("a", SHAPES) is None


def test_nothing_is_written_when_everything_was_found(tmp_path: Path) -> None:
    path = kept(tmp_path, a=entry(1))
    before = path.stat()
    again = PackedCache(tmp_path, "key")
    again.find("a", SHAPES)
    again.save()
    assert path.stat().st_ino == before.st_ino and list(tmp_path.iterdir()) == [path]


def test_a_disk_that_refuses_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = PackedCache(tmp_path / "file" / "cache", "key")
    cache.add("a", 0, entry(1))
    cache.save()
    assert "could not be kept" in caplog.text


def test_the_oldest_files_go_when_the_budget_is_exceeded(tmp_path: Path) -> None:
    paths = []
    for i in range(4):
        cache = PackedCache(tmp_path, f"key {i}", budget_bytes=3 * 4300)
        cache.add("a", 0, entry(i))
        cache.save()
        paths.append(cache.path)
        os.utime(cache.path, (1000 + i, 1000 + i))
    assert [path.exists() for path in paths] == [False, True, True, True]
    tiny = PackedCache(tmp_path, "one more", budget_bytes=1)
    tiny.add("a", 0, entry(9))
    tiny.save()
    assert list(tmp_path.iterdir()) == [tiny.path]


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

    cold = products(CpuBackend(precision=precision, cache_key="model", weights_dir=tmp_path))
    backend = CpuBackend(precision=precision, cache_key="model", weights_dir=tmp_path)
    warm = products(backend)
    assert backend._packer.arena.num_bytes == 0
    for a, b in zip(cold, warm):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    other = "exact" if precision == "fast" else "fast"
    products(CpuBackend(precision=other, cache_key="model", weights_dir=tmp_path))
    assert len(list(tmp_path.glob("packed-*.safetensors"))) == 2
