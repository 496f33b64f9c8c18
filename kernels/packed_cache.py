"""Packed weights in a file, so that the next start maps them instead of packing again.

One safetensors file per (source, native library, precision), named after a digest of these; each entry is a uint8 tensor, named
"<panel kind>:<name>". What is found is used only if it has exactly the shape that packing would give, and its first panel the bytes, so
a file from anything else is as good as none. Files appear in one atomic rename, in a directory that only we may write to, and those
that were used longest ago go when all of them exceed a budget.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.build import BuildError, make_private

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
LAYOUT_VERSION = 1  # of panels and entry names: to be raised with either
MAX_HEADER_BYTES = 64 << 20
DATA_ALIGNMENT = 4096
HUGE_PAGE_BYTES = 2 << 20
WORTH_KEEPING_BYTES = 16 << 20  # less than this is packed as fast as a file is opened
ABANDONED_S = 3600  # an unfinished file older than this has nobody who writes it


@dataclass(frozen=True, slots=True)
class WeightStore:
    """Where packed weights are kept, and of what.

    source        a digest that no other state of the model's files has
    budget_bytes  of all files in `directory` together; a model that needs more by itself is not kept, nor is a tiny one
    """

    directory: Path
    source: str
    budget_bytes: int


class PackedCache:
    """The packed weights of one source as one backend packs them. Never raises for a file: a bad one is not used.

    packing   whatever decides how the source is packed: the native library, the precision
    """

    def __init__(self, store: WeightStore, packing: str) -> None:
        digest = hashlib.sha256(f"{LAYOUT_VERSION}:{packing}:{store.source}".encode()).hexdigest()[:32]
        self.path, self._budget_bytes = store.directory / f"packed-{digest}.safetensors", store.budget_bytes
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

    def reject(self, name: str) -> None:
        """That entry's bytes are not what packing gives: nothing more of the file is used."""
        log.warning("packed weights in %s are not those of this model, packing again: %s differs", self.path, name)
        self._found = {}
        self._used = {key: entry for key, entry in self._used.items() if key.partition(":")[2] != name}

    def add(self, name: str, kind: int, entry: Bytes) -> None:
        """Keep a new entry; its bytes must stay as they are until `save`."""
        assert f"{kind}:{name}" not in self._used, f"two matrices are named {name}"
        self._used[f"{kind}:{name}"] = entry
        self._is_new = True

    def save(self) -> None:
        """Write what was found and added, if anything was added. A disk that does not take it costs a warning."""
        num_bytes = sum(entry.nbytes for entry in self._used.values())
        if not self._is_new or not WORTH_KEEPING_BYTES <= num_bytes <= self._budget_bytes:
            return
        try:
            make_private(self.path.parent)
            if shutil.disk_usage(self.path.parent).free < 2 * num_bytes:
                raise OSError(f"{num_bytes / 1e6:.0f} MB would fill more than half of what is free")
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
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix="writing-")
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            for chunk in _chunks(head, entries.values()):
                file.write(chunk)
            os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _chunks(head: Bytes, entries: Iterable[Bytes]) -> Iterator[memoryview]:
    """All bytes in whole, aligned huge pages: a file system that can then keeps them in huge pages of the page cache."""
    chunk, filled = np.empty(HUGE_PAGE_BYTES, np.uint8), 0
    for entry in (head, *entries):
        left = np.ascontiguousarray(entry).reshape(-1)
        while len(left):
            taken = left[: HUGE_PAGE_BYTES - filled]
            chunk[filled : filled + len(taken)] = taken
            filled, left = filled + len(taken), left[len(taken) :]
            if filled == HUGE_PAGE_BYTES:
                yield chunk.data
                filled = 0
    yield chunk[:filled].data


def _map(file: BinaryIO) -> Bytes:
    """The whole file, read-only, in huge pages where its file system keeps such: decoding is 3 % slower in small ones."""
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


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
            data = _map(file)[8 + length :]
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
    """Remove the files used longest ago, beyond the budget, and what writers that died have left. Others may do so at the same time."""
    found = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.name.startswith("packed-"):
                found.append((path == newest, status.st_mtime, status.st_size, path))
            elif path.name.startswith("writing-") and status.st_mtime < time.time() - ABANDONED_S:
                path.unlink()
    total = 0
    for _, _, num_bytes, path in sorted(found, reverse=True):
        total += num_bytes
        if total > budget_bytes and path != newest:
            path.unlink(missing_ok=True)
