"""The GGUF reader against the `gguf` package, and against headers that lie."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.damage import mutations, peak_allocation
from support.tiny_models import make_tiny_gguf

from anabranch.kernels.formats import FORMATS
from anabranch.runtime.worker.loading.errors import CheckpointError
from anabranch.runtime.worker.loading.gguf import MAX_KEYS, read_gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf_bytes(
    keys: list[bytes],
    tensors: list[bytes] = [],  # noqa: B006
    body: bytes = b"",
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    data = head + b"".join(keys) + b"".join(tensors)
    return data + bytes(-len(data) % 32) + body


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    return str(caught.value)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_tensors_and_metadata_equal_what_the_published_package_reads(tmp_path: Path, quant: str) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", quant=quant)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.tensors.keys() == {t.name for t in theirs.tensors}
    for t in theirs.tensors:
        raw = ours.tensors[t.name]
        assert raw.format == t.tensor_type.name
        assert raw.shape == tuple(reversed([int(n) for n in t.shape]))
        assert raw.data.tobytes() == t.data.tobytes()
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name


def test_metadata_can_be_read_without_the_tensors(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    assert read_gguf(path, with_tensors=False).tensors == {}
    assert read_gguf(path, with_tensors=False).metadata.keys() == read_gguf(path).metadata.keys()


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    numbers = struct.pack("<IQ3h", 3, 3, -1, 0, 7)
    names = struct.pack("<IQ", STRING, 2) + text("ä") + text("")
    nested = struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ2B", 0, 2, 8, 9)
    path.write_bytes(
        gguf_bytes(
            [
                key("a", U32, struct.pack("<I", 2**32 - 1)),
                key("b", BOOL, b"\1"),
                key("c", STRING, text("héllo")),
                key("d", ARRAY, numbers),
                key("e", ARRAY, names),
                key("f", ARRAY, nested),
                key("g", 12, struct.pack("<d", 0.1)),
                key("h", 11, struct.pack("<q", -(2**63))),
            ]
        )
    )
    m = read_gguf(path).metadata
    assert (m["a"], m["b"], m["c"], m["g"], m["h"]) == (2**32 - 1, True, "héllo", 0.1, -(2**63))
    assert m["d"].tolist() == [-1, 0, 7]
    assert m["e"] == ["ä", ""]
    assert m["f"][0].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gguf_bytes([], num_keys=2**60), ["metadata keys", str(2**60), str(MAX_KEYS)]),
        (gguf_bytes([], num_keys=1000), ["metadata keys", "1000", "bytes left"]),
        (gguf_bytes([], num_tensors=2**62), ["number of tensors", str(2**62)]),
        (gguf_bytes([key("k", STRING, struct.pack("<Q", 2**62))]), ["'k'", str(2**62)]),
        (gguf_bytes([struct.pack("<Q", 2**62) + bytes(16)], num_keys=1), ["metadata key 0", str(2**62)]),
        (gguf_bytes([key("k", ARRAY, struct.pack("<IQ", U32, 2**62))]), ["'k'", "length of an array"]),
        (gguf_bytes([key("k", ARRAY, struct.pack("<IQQ", STRING, 1000, 7000) + bytes(7992))]), ["'k'", "past the end"]),
        (gguf_bytes([key("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**62) + bytes(64))]), ["'k'", str(2**62)]),
        (gguf_bytes([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]), ["'k'", "nested deeper"]),
        (gguf_bytes([key("k", 77, bytes(8))]), ["'k'", "77"]),
        (gguf_bytes([key("k", BOOL, b"\2")]), ["'k'", "boolean 2"]),
        (gguf_bytes([key("k", U32, bytes(4)), key("k", U32, bytes(4))]), ["'k'", "twice"]),
        (gguf_bytes([key("k", STRING, text(b"\xff"))]), ["'k'", "UTF-8"]),
        (gguf_bytes([], version=1), ["version 1"]),
        (gguf_bytes([], version=3 << 24), ["big-endian"]),
        (gguf_bytes([key("general.alignment", U32, struct.pack("<I", 33))]), ["alignment", "33"]),
        (gguf_bytes([key("general.alignment", U32, struct.pack("<I", 0))]), ["alignment", "0"]),
        (gguf_bytes([key("split.count", 2, struct.pack("<H", 3))]), ["split", "gguf-split --merge"]),
        (b"GGUF", ["header"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["LFS pointer"]),
        (b"\x80\x02" + bytes(100), ["pickle"]),
        (bytes(64), ["zeros"]),
    ],
)
def test_a_header_that_lies_is_refused_naming_the_field_and_the_value(
    tmp_path: Path, data: bytes, words: list[str]
) -> None:
    message = refusal(tmp_path / "bad.gguf", data)
    assert all(word in message for word in ["bad.gguf", *words]), message


ROW = bytes(128)  # 32 values of F32


@pytest.mark.parametrize(
    ("tensors", "body", "words"),
    [
        ([text("t") + struct.pack("<I", 10**6) + bytes(64)], ROW, ["'t'", "1000000 dimensions"]),
        ([text("t") + struct.pack("<I", 0xFFFFFFFF) + bytes(64)], ROW, ["'t'", "4294967295 dimensions"]),
        ([tensor("t", [32], 0, 2**62)], ROW, ["'t'", str(2**62)]),
        ([tensor("t", [2**62, 2**62], 0, 0)], ROW, ["'t'"]),
        ([tensor("t", [0], 0, 0)], ROW, ["'t'", "at least 1"]),
        ([tensor("t", [33], 2, 0)], ROW, ["'t'", "33", "Q4_0"]),
        ([tensor("t", [32], 11, 0)], ROW, ["'t'", "Q3_K", "not supported", "Q4_K"]),
        ([tensor("t", [32], 99, 0)], ROW, ["'t'", "number 99"]),
        ([tensor("t", [32], 0, 8)], ROW, ["'t'", "alignment"]),
        ([tensor("t", [32], 0, 0), tensor("t", [32], 0, 128)], ROW * 2, ["'t'", "twice"]),
        ([tensor("t", [32], 0, 0), tensor("u", [32], 0, 64)], ROW * 2, ["'u'", "inside"]),
        ([tensor("t", [32], 0, 0), tensor("u", [32], 0, 256)], ROW * 3, ["'u'", "128 unused"]),
        ([tensor("t", [32], 0, 0)], ROW * 2, ["128 bytes follow"]),
        ([tensor("t", [32], 0, 0)], ROW[:100], ["'t'", "128"]),
        ([tensor("t", [32], 0, 0)], b"", ["'t'"]),
    ],
)
def test_a_table_of_tensors_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, tensors: list[bytes], body: bytes, words: list[str]
) -> None:
    message = refusal(tmp_path / "bad.gguf", gguf_bytes([], tensors, body))
    assert all(word in message for word in words), message


def test_an_unusual_alignment_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    header = gguf_bytes(
        [key("general.alignment", U32, struct.pack("<I", 256))],
        [tensor("t", [32], 0, 0), tensor("u", [32], 0, 256)],
    )
    header += bytes(-len(header) % 256)
    path.write_bytes(header + np.arange(32, dtype="<f4").tobytes() + bytes(128) + np.ones(32, "<f4").tobytes())
    tensors = read_gguf(path).tensors
    assert tensors["t"].data.view("<f4")[0].tolist() == list(range(32))
    assert tensors["u"].data.view("<f4")[0].tolist() == [1.0] * 32


def test_refusals_of_huge_counts_allocate_nothing(tmp_path: Path) -> None:
    with peak_allocation() as peak:
        for data in (
            gguf_bytes([], num_keys=2**60),
            gguf_bytes([], num_tensors=2**62),
            gguf_bytes([key("k", ARRAY, struct.pack("<IQ", U64, 2**62))]),
            gguf_bytes([key("k", ARRAY, struct.pack("<IQ", STRING, 2**40))]),
        ):
            refusal(tmp_path / "bad.gguf", data)
    assert peak.num_bytes < 1 << 20


def test_random_damage_meets_only_refusals_and_flat_memory(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    good = make_tiny_gguf(path, vocab=384, hidden=32, heads=2, kv_heads=1, inner=32, layers=1).read_bytes()
    header = len(good) - sum(t.data.nbytes for t in read_gguf(path).tensors.values())
    refused = 0
    with peak_allocation() as peak:
        for data in mutations(good, num=300, seed=5, focus=header):
            path.write_bytes(data)
            try:
                read_gguf(path)
            except CheckpointError:
                refused += 1
    assert refused > 100
    assert peak.num_bytes < 20 << 20, f"reading damaged files allocated {peak.num_bytes} bytes"


def test_the_formats_that_the_reader_admits_are_those_that_are_computed_with() -> None:
    known = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    for name, fmt in FORMATS.items():
        assert (fmt.block, fmt.num_bytes) == known[name]
