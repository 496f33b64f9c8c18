"""The safetensors reader against the published package, and against files that lie."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import mutations, peak_allocation
from support.tiny_models import safetensors_bytes

from anabranch.runtime.worker.loading.errors import CheckpointError
from anabranch.runtime.worker.loading.safetensors import MAX_HEADER_BYTES, read_safetensors


def file_of(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    return str(caught.value)


@given(
    st.dictionaries(
        st.text("abcdef._0123", min_size=1, max_size=12),
        st.tuples(st.sampled_from(["f4", "f2"]), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_tensors_equal_what_the_published_package_wrote(tmp_path: Path, spec: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, (dtype, shape) in spec.items()}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    found = read_safetensors(path)
    assert found.keys() == tensors.keys()
    for name, raw in found.items():
        assert raw.shape == tensors[name].shape
        assert raw.format == {"f4": "F32", "f2": "F16"}[tensors[name].dtype.str[1:]]
        assert raw.data.tobytes() == tensors[name].tobytes()


def test_tensors_are_views_of_the_mapped_file_and_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": np.ones((64, 1024), np.float32), "b": np.ones(8, np.float32)}))
    tensors = read_safetensors(path)
    assert tensors["a"].data.shape == (64, 4096)
    assert tensors["b"].data.shape == (1, 32)
    for raw in tensors.values():
        assert not raw.data.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            raw.data[0, 0] = 1


def test_a_tensor_at_an_odd_offset_is_copied_to_where_floats_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {"x": entry("U8", [1], 0, 1), "w": entry("F32", [2], 1, 9)}
    path.write_bytes(file_of(header, b"\0" + np.array([1.5, 2.5], "<f4").tobytes()))
    raw = read_safetensors(path)["w"]
    assert raw.data.flags.aligned
    assert raw.data.view("<f4").tolist() == [[1.5, 2.5]]


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("F16", [4], 16, 24)}
BODY = bytes(24)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (file_of(GOOD, BODY, length=0), ["header length 0"]),
        (file_of(GOOD, BODY, length=1), ["header length 1"]),
        (file_of(GOOD, BODY, length=200_000_000), ["200000000", str(MAX_HEADER_BYTES)]),
        (file_of(GOOD, BODY, length=2**63), [str(2**63), str(MAX_HEADER_BYTES)]),
        (file_of(GOOD, BODY, length=len(file_of(GOOD, BODY)) + 1), ["does not fit"]),
        (file_of(b'{"\xff\xfe": 1}'), ["UTF-8"]),
        (file_of(b'{"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "a": 1}'), ["'a'", "twice"]),
        (file_of(b"[1, 2, 3]"), ["list"]),
        (file_of(b"[" * 1000 + b"]" * 1000), ["brackets"]),
        (file_of(b'{"a":' + b'{"b":' * 60 + b"1" + b"}" * 61 + b" " * 5000), ["exactly dtype"]),
        (file_of(b"{nonsense"), ["not valid JSON"]),
        (file_of(b'{"a": NaN}'), ["NaN"]),
    ],
)
def test_a_header_that_lies_about_itself_is_refused_with_the_reason(
    tmp_path: Path, data: bytes, words: list[str]
) -> None:
    message = refusal(tmp_path / "model.safetensors", data)
    assert all(word in message for word in ["model.safetensors", *words]), message


@pytest.mark.parametrize(
    ("header", "body", "words"),
    [
        (GOOD | {"b": entry("F16", [4], 8, 16)}, BODY, ["'b'", "overlaps"]),
        (GOOD | {"b": entry("F16", [4], 24, 16)}, BODY, ["'b'"]),
        (GOOD | {"b": entry("F16", [4], -8, 0)}, BODY, ["'b'", "data_offsets"]),
        (GOOD | {"b": entry("F16", [4], 20, 28)}, bytes(28), ["'b'", "4 unused bytes"]),
        (GOOD, bytes(25), ["1 bytes follow"]),
        (GOOD, bytes(23), ["'b'", "24", "23"]),
        (GOOD | {"b": entry("F16", [4], 2**70, 2**70 + 8)}, BODY, ["'b'", str(2**70 + 8)]),
        ({"a": entry("F32", [4, 4], 0, 60)}, bytes(60), ["'a'", "64", "60"]),
        ({"a": entry("F9", [4], 0, 16)}, bytes(16), ["'a'", "F9"]),
        ({"a": entry("F32", [2**40, 2**40], 0, 16)}, bytes(16), ["'a'", str(2**82)]),
        ({"a": entry("F32", [-4], 0, 16)}, bytes(16), ["'a'", "-4"]),
        ({"a": entry("F32", [True, 4], 0, 16)}, bytes(16), ["'a'", "shape"]),
        ({"a": entry("F32", [2.0, 2], 0, 16)}, bytes(16), ["'a'", "shape"]),
        ({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4), ["'a'", "at most 8"]),
        ({"a": {"dtype": "F32", "shape": [4]}}, bytes(16), ["'a'", "exactly"]),
        ({"a": entry("F32", [4], 0, 16) | {"more": 1}}, bytes(16), ["'a'", "exactly"]),
        ({"\n": entry("F32", [4], 0, 16)}, bytes(16), ["printable"]),
        ({"a" * 513: entry("F32", [4], 0, 16)}, bytes(16), ["512"]),
    ],
)
def test_a_table_of_tensors_that_does_not_tile_the_file_is_refused(
    tmp_path: Path, header: Any, body: bytes, words: list[str]
) -> None:
    message = refusal(tmp_path / "model.safetensors", file_of(header, body))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\n\n  <html>", "HTML page"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\x80\x04\x95" + bytes(100), "Python pickle"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF file"),
        (bytes(4096), "zeros"),
        (b"", "empty"),
        (b"abc", "3 bytes"),
    ],
)
def test_a_file_of_another_kind_is_named_for_what_it_looks_like(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal(tmp_path / "model.safetensors", data)


def test_a_pipe_or_directory_is_refused_without_waiting(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe.safetensors", "folder.safetensors", "absent.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            read_safetensors(tmp_path / name)


def test_random_damage_meets_only_refusals_and_flat_memory(tmp_path: Path) -> None:
    good = safetensors_bytes({f"t{i}": np.ones((3, i + 1), np.float32) for i in range(8)})
    path = tmp_path / "model.safetensors"
    refused = 0
    with peak_allocation() as peak:
        for data in mutations(good, num=600, seed=3, focus=800):
            path.write_bytes(data)
            try:
                read_safetensors(path)
            except CheckpointError:
                refused += 1
    assert refused > 200
    assert peak.num_bytes < 20 << 20, f"reading damaged files allocated {peak.num_bytes} bytes"
