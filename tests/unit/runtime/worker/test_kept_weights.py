"""Packed weights across starts of a worker: the same tokens, without packing, and never from the wrong file."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import make_tiny_gguf, make_tiny_llama
from support.worker_driver import GREEDY, Driver

from anabranch.kernels import build, packed_cache, registry
from anabranch.runtime.messages import SamplingParams
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.worker import Worker

Start = Callable[..., tuple[list[int], int]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a worker, generate, end it: (tokens, bytes that it packed)."""
    try:
        registry.backend("cpu")
    except registry.BackendUnavailable as fault:
        pytest.skip(str(fault))
    monkeypatch.setattr(packed_cache, "WORTH_KEEPING_BYTES", 1)
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "native").symlink_to(build.default_cache_dir())  # built once for all tests

    def run(path: Path, *, params: SamplingParams = GREEDY, **options: object) -> tuple[list[int], int]:
        defaults = {"cache_dir": tmp_path / "cache", "kept_weights_bytes": 1 << 30, "backend": "cpu", "num_pages": 64, "page_size": 4}
        worker = Worker(path, **(defaults | options))  # type: ignore[arg-type]
        driver = Driver(worker)
        branch = driver.open([5, 6, 7, 8, 9], params)
        driver.generate(branch, 12)
        worker.close()
        return branch.output, worker._backend._packer.arena.num_bytes  # type: ignore[attr-defined]

    yield run


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "weights").glob("*"))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_second_start_packs_nothing_and_generates_the_same(tmp_path: Path, start: Start, kind: str) -> None:
    path = make_tiny_llama(tmp_path / "m") if kind == "safetensors" else make_tiny_gguf(tmp_path / "m.gguf", quant="Q4_0")
    without, packed = start(path, kept_weights_bytes=0)
    assert packed and not (tmp_path / "cache" / "weights").exists()
    assert start(path) == (without, packed)
    assert start(path) == (without, 0)
    assert len(kept(tmp_path)) == 1


def test_exact_weights_are_not_kept(tmp_path: Path, start: Start) -> None:
    path = make_tiny_llama(tmp_path / "m")
    assert start(path, precision="exact")[1] and not kept(tmp_path)


@pytest.mark.parametrize("change", ["other weights, same size", "time set back", "another file in its place"])
def test_a_file_that_changed_is_packed_again(tmp_path: Path, start: Start, change: str) -> None:
    path, other = make_tiny_llama(tmp_path / "m", seed=1), make_tiny_llama(tmp_path / "other", seed=2)
    file, before = path / "model.safetensors", (path / "model.safetensors").stat()
    old, _ = start(path)
    if change == "another file in its place":
        os.replace(other / "model.safetensors", file)
    else:
        file.write_bytes((other / "model.safetensors").read_bytes())
    if change == "time set back":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    new, packed = start(path)
    assert packed and new == start(path, kept_weights_bytes=0)[0] != old


def test_a_damaged_file_is_replaced_with_one_warning(tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_llama(tmp_path / "m")
    tokens, _ = start(path)
    (file,) = kept(tmp_path)
    data = np.fromfile(file, np.uint8)
    data[int.from_bytes(data[:8].tobytes(), "little") + 8 :] ^= 0x55
    data.tofile(file)
    again, packed = start(path)
    assert again == tokens and packed and len(caplog.records) == 1 and "packing again" in caplog.text
    assert start(path) == (tokens, 0) and len(caplog.records) == 1


def test_each_shard_is_part_of_what_weights_are_kept_under(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", shards=2)
    before = open_checkpoint(path).source
    assert before == open_checkpoint(path).source
    for shard in path.glob("*.safetensors"):
        shard.touch()
        after = open_checkpoint(path).source
        assert after != before
        before = after
