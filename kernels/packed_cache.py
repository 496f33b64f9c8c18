"""Packed weights in a file, so that the next start maps them instead of packing again.

One safetensors file per (source, precision), named after a digest of both; each entry is a uint8 tensor, named "<panel kind>:<name>".
What is found is used only if it has exactly the shape that packing would give, so a file from anything else is as good as none. Files
appear in one atomic rename, in a directory that only we may write to, and the oldest go when all of them exceed a budget.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.build import BuildError, make_private

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
LAYOUT_VERSION = 1  # of panels and entry names: to be raised with either
MAX_HEADER_BYTES = 64 << 20
DATA_ALIGNMENT = 4096
BUDGET_BYTES = 16 << 30


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "anabranch" / "weights"


class PackedCache:
    """The packed weights of one source. `key` identifies it: its bytes, not its path. Never raises for a file: a bad one is not used."""

    def __init__(self, directory: Path, key: str, *, budget_bytes: int = BUDGET_BYTES) -> None:
        digest = hashlib.sha256(f"{LAYOUT_VERSION}:{key}".encode()).hexdigest()[:32]
        self.path, self._budget_bytes = directory / f"packed-{digest}.safetensors", budget_bytes
        self._found = _read(self.path)
        self._used: dict[str, Bytes] = {}
        self._is_new = False

    def find(self, name: str, shapes: dict[int, tuple[int, ...]]) -> tuple[int, Bytes] | None:
        """The entry of that name as (kind, read-only bytes), if its shape is the one that `shapes` has for its kind."""
        for kind, shape in shapes.items():
            entry = self._found.get(f"{kind}:{name}")
            if entry is not None and entry.shape == shape:
                self._used[f"{kind}:{name}"] = entry
                return kind, entry
        return None

    def add(self, name: str, kind: int, entry: Bytes) -> None:
        assert f"{kind}:{name}" not in self._used, f"two matrices are named {name}"
        self._used[f"{kind}:{name}"] = entry
        self._is_new = True

    def save(self) -> None:
        """Write what was found and added, if anything was added. A disk that does not take it costs a warning."""
        if not self._is_new:
            return
        try:
            make_private(self.path.parent)
            _write(self.path, self._used)
            _keep_within(self.path.parent, self._budget_bytes, newest=self.path)
            self._is_new = False
        except (OSError, BuildError) as error:
            log.warning("packed weights could not be kept for the next start in %s: %s", self.path, error)


def _write(path: Path, entries: dict[str, Bytes]) -> None:
    header, end = {}, 0
    for name, entry in entries.items():
        header[name] = {"dtype": "U8", "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix="writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in entries.values():
                file.write(np.ascontiguousarray(entry).data)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _read(path: Path) -> dict[str, Bytes]:
    """Every entry of the file, mapped; nothing if it is missing, another user's, or not what we write."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_size < 8:
                return {}
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, status.st_size - 8):
                return {}
            entries = dict(_entries(json.loads(file.read(length)), status.st_size - 8 - length))
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[8 + length :]
            os.utime(path)  # used: the last to go
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("packed weights in %s are not usable, packing again: %s", path, error)
        return {}
    return {name: data[start:end].reshape(shape) for name, (shape, start, end) in entries.items()}


def _entries(header: Any, num_bytes: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
    """(name, (shape, start, end)) of a header whose entries lie back to back and fill the file. Raises ValueError and its like."""
    expected = 0
    for name, entry in header.items():
        shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] != "U8" or not all(isinstance(n, int) and n > 0 for n in (*shape, end)):
            raise ValueError(f"entry {name!r} is {entry}")
        if start != expected or end - start != prod(shape):
            raise ValueError(f"entry {name!r} of shape {shape} lies at {start}..{end}, expected {expected}")
        expected = end
        yield name, (shape, start, end)
    if expected != num_bytes:
        raise ValueError(f"{num_bytes} bytes of data, but the header describes {expected}")


def _keep_within(directory: Path, budget_bytes: int, *, newest: Path) -> None:
    files = sorted(directory.glob("packed-*.safetensors"), key=lambda p: (p == newest, p.stat().st_mtime), reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > budget_bytes and path != newest:
            path.unlink(missing_ok=True)
