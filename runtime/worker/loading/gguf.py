"""GGUF, versions 2 and 3: typed metadata, a table of tensors, aligned data.

Every count is checked against the bytes that are left before anything is read or allocated.

Source: the GGUF specification (ggml `docs/gguf.md`).
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.formats import FORMATS, RawTensor
from anabranch.runtime.worker.loading.errors import refuse, shown
from anabranch.runtime.worker.loading.files import looks_like, map_file

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = 65535
MAX_STRING_BYTES = 16 << 20  # a value
MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_DEPTH = 2
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16

_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata as plain Python values (arrays of numbers: numpy views); tensors under the file's own names."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]


class _Cursor:
    """Reads forward through the file; never past its end."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path, self.data, self.at, self.size = path, data.data, 0, len(data)
        self.field = "the header"

    @property
    def left(self) -> int:
        return self.size - self.at

    def refuse(self, problem: str) -> Any:
        refuse(self.path, f"{self.field}: {problem}")

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > self.left:
            self.refuse(f"needs {shown(num_bytes)} bytes, the file has {self.left} left; it is damaged or incomplete")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, each: int, limit: int) -> int:
        """A 64-bit count of things that take at least `each` bytes of what is left."""
        n = int(self.number("Q"))
        if n > limit:
            self.refuse(f"{what} is {n}, over the limit of {limit}")
        if n * each > self.left:
            self.refuse(f"{what} is {n}, but the file has only {self.left} bytes left")
        return n

    def string(self, limit: int) -> str:
        n = self.count("the length of a string", 1, limit)
        try:
            return str(self.take(n), "utf-8")
        except UnicodeDecodeError as fault:
            return str(self.refuse(f"a string is not UTF-8 (byte {fault.start})"))


def read_gguf(path: Path, *, with_tensors: bool = True) -> GgufFile:
    """Metadata and tensors of a file, mapped, none copied. Without tensors, only the metadata is read.

    Raises CheckpointError.
    """
    data = map_file(path)
    cursor = _Cursor(path, data)
    version = _version(cursor, data)
    num_tensors = cursor.count("the number of tensors", 24, MAX_TENSORS)
    num_keys = cursor.count("the number of metadata keys", 13, MAX_KEYS)
    metadata = _metadata(cursor, num_keys)
    if metadata.get("split.count", 0) not in (0, 1):
        refuse(path, "is one part of a split model; merge the parts with `llama-gguf-split --merge FIRST_PART OUTPUT`")
    tensors = _tensors(cursor, num_tensors, _alignment(path, metadata), data) if with_tensors else {}
    return GgufFile(path, version, metadata, tensors)


def _version(cursor: _Cursor, data: NDArray[np.uint8]) -> int:
    magic = bytes(data[:4])
    if magic != b"GGUF":
        what = looks_like(bytes(data[:256]))
        refuse(
            cursor.path, f"is not a GGUF file{f': it looks like {what}' if what else f' (it begins with {magic!r})'}"
        )
    cursor.take(4)
    version = int(cursor.number("I"))
    if version in (2 << 24, 3 << 24):
        refuse(cursor.path, "is a big-endian GGUF file; convert it for this machine with `gguf-convert-endian`")
    if version not in (2, 3):
        refuse(cursor.path, f"has GGUF version {version}; supported are 2 and 3")
    return version


def _metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.field = f"metadata key {index}"
        key = cursor.string(MAX_KEY_BYTES)
        cursor.field = f"field {shown(key)}"
        if key in metadata:
            cursor.refuse("appears twice")
        metadata[key] = _value(cursor, int(cursor.number("I")))
    return metadata


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _BOOL:
        return _as_bool(cursor, int(cursor.number("B")))
    if kind == _STRING:
        return cursor.string(MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _array(cursor, 1)
    return cursor.refuse(f"has the unknown value type {kind}")


def _as_bool(cursor: _Cursor, value: int) -> bool:
    if value > 1:
        cursor.refuse(f"is the boolean {value}; it must be 0 or 1")
    return bool(value)


def _array(cursor: _Cursor, depth: int) -> Any:
    if depth > MAX_ARRAY_DEPTH:
        cursor.refuse(f"is an array nested deeper than {MAX_ARRAY_DEPTH}")
    kind = int(cursor.number("I"))
    if kind in _SCALARS or kind == _BOOL:
        dtype = np.dtype("<" + _SCALARS.get(kind, "B"))
        n = cursor.count("the length of an array", dtype.itemsize, MAX_ARRAY_ITEMS)
        return np.frombuffer(cursor.take(n * dtype.itemsize), dtype)
    if kind == _STRING:
        return _strings(cursor, cursor.count("the length of an array", 8, MAX_ARRAY_ITEMS))
    if kind == _ARRAY:
        return [_array(cursor, depth + 1) for _ in range(cursor.count("the length of an array", 12, MAX_KEYS))]
    return cursor.refuse(f"is an array of the unknown value type {kind}")


def _strings(cursor: _Cursor, n: int) -> list[str]:
    """A vocabulary: the hot loop of the reader, so it walks the buffer itself."""
    data, at, end = cursor.data, cursor.at, cursor.size
    unpack: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
    result = []
    for _ in range(n):
        if end - at < 8:
            cursor.refuse("is an array that runs past the end of the file")
        (length,) = unpack(data, at)
        at += 8
        if length > end - at:
            cursor.refuse(f"holds a string of {length} bytes, but the file has only {end - at} left")
        try:
            result.append(str(data[at : at + length], "utf-8"))
        except UnicodeDecodeError:
            cursor.refuse(f"string {len(result)} of the array is not UTF-8")
        at += length
    cursor.at = at
    return result


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        refuse(
            path,
            f"field 'general.alignment' is {shown(alignment)}; it must be a power of two from 8 to {MAX_ALIGNMENT}",
        )
    return alignment


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    format: str
    shape: tuple[int, ...]  # outermost first
    begin: int
    num_bytes: int


def _tensors(cursor: _Cursor, n: int, alignment: int, data: NDArray[np.uint8]) -> dict[str, RawTensor]:
    entries: dict[str, _Entry] = {}
    for index in range(n):
        cursor.field = f"tensor {index}"
        entry = _entry(cursor, alignment)
        if entry.name in entries:
            cursor.refuse("appears twice")
        entries[entry.name] = entry
    start = -(-cursor.at // alignment) * alignment
    if start > cursor.size and entries:
        refuse(cursor.path, "ends before its tensor data begins; the download is incomplete")
    _check_layout(cursor.path, sorted(entries.values(), key=lambda e: e.begin), cursor.size - start, alignment)
    return {entry.name: _tensor(entry, data[start:]) for entry in entries.values()}


def _entry(cursor: _Cursor, alignment: int) -> _Entry:
    name = cursor.string(MAX_KEY_BYTES)
    cursor.field = f"tensor {shown(name)}"
    dims = int(cursor.number("I"))
    if not 1 <= dims <= MAX_DIMENSIONS:
        cursor.refuse(f"has {dims} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    sizes = [int(cursor.number("Q")) for _ in range(dims)]  # innermost first
    kind = int(cursor.number("I"))
    begin = int(cursor.number("Q"))
    fmt = FORMATS.get(_TYPES.get(kind, ""))
    if fmt is None:
        cursor.refuse(
            f"has type {_TYPES.get(kind, f'number {kind}')}, which is not supported; supported are {', '.join(FORMATS)}"
        )
    assert fmt is not None
    if min(sizes) < 1:
        cursor.refuse(f"has shape {shown(sizes)}; sizes must be at least 1")
    if sizes[0] % fmt.block:
        cursor.refuse(f"has rows of {sizes[0]} values, not a multiple of the {fmt.block} in a {fmt.name} block")
    num_bytes = sizes[0] // fmt.block * fmt.num_bytes
    for size in sizes[1:]:
        num_bytes *= size
    if num_bytes > cursor.size or begin > cursor.size - num_bytes:
        cursor.refuse(
            f"of shape {shown(sizes[::-1])} at offset {begin} takes {shown(num_bytes)} bytes, the file {cursor.size}"
        )
    if begin % alignment:
        cursor.refuse(f"begins at offset {begin}, which is not a multiple of the alignment {alignment}")
    return _Entry(name, fmt.name, tuple(reversed(sizes)), begin, num_bytes)


def _check_layout(path: Path, entries: list[_Entry], size: int, alignment: int) -> None:
    """The tensors tile the data in some order, with nothing between or after them but padding."""
    at, before = 0, "the header"
    for entry in entries:
        if entry.begin < at:
            refuse(
                path, f"tensor {shown(entry.name)}: begins at offset {entry.begin}, inside {before} which ends at {at}"
            )
        if entry.begin - at >= alignment:
            refuse(path, f"tensor {shown(entry.name)}: leaves {entry.begin - at} unused bytes after {before}")
        at, before = entry.begin + entry.num_bytes, f"tensor {shown(entry.name)}"
        if at > size:
            refuse(path, f"{before}: ends at byte {at} of {size} data bytes; the download is incomplete")
    if size - at >= alignment:
        refuse(path, f"{size - at} bytes follow the last tensor; the file is damaged or of another format")


def _tensor(entry: _Entry, data: NDArray[np.uint8]) -> RawTensor:
    rows = entry.num_bytes // _row_bytes(entry)
    return RawTensor(
        entry.name, entry.format, entry.shape, data[entry.begin : entry.begin + entry.num_bytes].reshape(rows, -1)
    )


def _row_bytes(entry: _Entry) -> int:
    fmt = FORMATS[entry.format]
    return entry.shape[-1] // fmt.block * fmt.num_bytes
