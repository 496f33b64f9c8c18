"""safetensors: a JSON table of contents before one block of bytes; every number is checked before it is used."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.formats import RawTensor
from anabranch.runtime.worker.loading.errors import refuse, shown
from anabranch.runtime.worker.loading.files import looks_like, map_file, parse_json

MAX_HEADER_BYTES = 32 << 20
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 8

# Bytes per value of each dtype of the format; the weights that we compute with are the first three.
_WIDTHS = {
    "F32": 4, "F16": 2, "BF16": 2,
    "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_WEIGHTS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table: bytes [begin, end) after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Every tensor of a file, mapped, none copied.

    The whole header is validated first: sizes against the file, ranges that tile the data exactly, one entry per name.
    Tensors of a dtype that no weight has (integers, FP8) keep it as their format, so that taking one can name it.
    Raises CheckpointError.
    """
    data = map_file(path)
    entries, start = _table(path, data)
    return {entry.name: _tensor(entry, data, start) for entry in entries}


def _table(path: Path, data: NDArray[np.uint8]) -> tuple[list[Entry], int]:
    """The checked entries in file order, and where the data begins."""
    size = len(data)
    what = looks_like(bytes(data[:256]))
    if what:
        refuse(path, f"is not a safetensors file: it looks like {what}")
    if size < 10:
        refuse(path, f"has {size} bytes, too few for a safetensors header")
    length = int.from_bytes(bytes(data[:8]), "little")
    if length > MAX_HEADER_BYTES:
        refuse(
            path,
            f"header length {length} is over the limit of {MAX_HEADER_BYTES} bytes; this is no safetensors file",
        )
    if not 2 <= length <= size - 8:
        refuse(path, f"header length {length} does not fit the file of {size} bytes; the download may be incomplete")
    text = bytes(data[8 : 8 + length])
    _refuse_bracket_bomb(path, text)
    header = parse_json(path, text)
    if not isinstance(header, dict):
        refuse(path, f"the header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    entries = sorted((_entry(path, name, value) for name, value in header.items()), key=lambda e: (e.begin, e.end))
    _check_tiling(path, entries, size - 8 - length)
    return entries, 8 + length


def _refuse_bracket_bomb(path: Path, text: bytes) -> None:
    """An entry takes over 50 bytes for its three brackets; a header of brackets would cost 30 times its size."""
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > 64 + len(text) // 10:
        refuse(path, f"the header has {brackets} opening brackets in {len(text)} bytes; it is no table of tensors")


def _entry(path: Path, name: str, value: Any) -> Entry:
    label = f"tensor {shown(name)}"
    if not 0 < len(name) <= MAX_NAME_CHARS or not re.fullmatch(r"[\x21-\x7e]+", name):
        refuse(path, f"{label}: names are 1 to {MAX_NAME_CHARS} printable ASCII characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"{label}: the entry must have exactly dtype, shape and data_offsets, and is {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        refuse(path, f"{label}: dtype {shown(dtype)} is unknown")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        refuse(path, f"{label}: shape {shown(shape)} is not a list of at most {MAX_DIMENSIONS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        refuse(path, f"{label}: data_offsets {shown(offsets)} is not a pair of byte offsets")
    begin, end = offsets
    need = _WIDTHS[dtype]
    for n in shape:
        need *= n
    if end - begin != need:
        refuse(
            path,
            f"{label}: {dtype} {shown(shape)} takes {shown(need)} bytes, data_offsets hold {shown(end - begin)}",
        )
    return Entry(name, dtype, tuple(shape), begin, end)


def _check_tiling(path: Path, entries: list[Entry], size: int) -> None:
    """The ranges follow one another from 0 to the end of the file: no overlap, no hole, nothing after."""
    at, before = 0, "the header"
    for entry in entries:
        if entry.end > size:
            refuse(
                path,
                f"tensor {shown(entry.name)}: ends at byte {shown(entry.end)} of {size}; the file is incomplete",
            )
        if entry.begin != at:
            fault = "overlaps" if entry.begin < at else f"leaves {entry.begin - at} unused bytes after"
            refuse(
                path, f"tensor {shown(entry.name)}: begins at byte {entry.begin}, {fault} {before} which ends at {at}"
            )
        at, before = entry.end, f"tensor {shown(entry.name)}"
    if at != size:
        refuse(path, f"{size - at} bytes follow the last tensor; the file is damaged or of another format")


def _tensor(entry: Entry, data: NDArray[np.uint8], start: int) -> RawTensor:
    raw = data[start + entry.begin : start + entry.end]
    if (start + entry.begin) % _WIDTHS[entry.dtype]:
        raw = raw.copy()  # allowed by the format, but no kernel likes floats at odd addresses
    rows = entry.shape[0] if len(entry.shape) >= 2 and len(raw) else 1
    return RawTensor(entry.name, entry.dtype, entry.shape, raw.reshape(rows, -1))


def is_weight(raw: RawTensor) -> bool:
    """Whether the dtype is one that weights have here: F32, F16 or BF16."""
    return raw.format in _WEIGHTS
