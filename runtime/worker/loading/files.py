"""Reading files that nobody vouches for: bounded JSON, read-only maps, names that stay inside a directory."""

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anabranch.runtime.worker.loading.errors import refuse, shown

MAX_JSON_BYTES = 1 << 20  # of a config file
MAX_INDEX_BYTES = 64 << 20  # of a shard index or a tokenizer.json
_DIGESTED_BYTES = 64 << 10  # of each file

_LOOKS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"),
    (b"<!doctype", "an HTML page, not weights; the download was answered with a web page"),
    (b"<html", "an HTML page, not weights; the download was answered with a web page"),
    (b"<?xml", "an XML document, not weights; the download was answered with an error"),
    (b"pk\x03\x04", "a zip archive (a PyTorch checkpoint?)"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"\x93numpy", "a NumPy array file"),
    (b"gguf", "a GGUF file"),
    (b"\x89hdf", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"{", "a JSON document"),
)


def looks_like(head: bytes) -> str | None:
    """What the first bytes of a file that is not what it should be say it is, or None."""
    if not head.strip(b"\0"):
        return "empty" if not head else "filled with zeros; the download is not complete"
    start = head.lstrip().lower() if not head.startswith((b"\x80", b"\x93", b"\x89")) else head.lower()
    return next((what for magic, what in _LOOKS if start.startswith(magic)), None)


def _open(path: Path) -> BinaryIO:
    """Open a regular file to read; a pipe or device is refused, not waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        refuse(path, "is not a regular file")
    return file


def map_file(path: Path) -> NDArray[np.uint8]:
    """The whole of a regular file as a read-only array over a memory map; no bytes are read yet.

    Raises CheckpointError if it cannot be opened, is no regular file, or is empty.
    """
    try:
        with _open(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                refuse(path, "is empty; the download is not complete")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as fault:
        refuse(path, f"cannot be opened: {fault.strerror or fault}")


def digest_of_state(paths: Iterable[Path]) -> str:
    """A digest that changes whenever one of the files does, without reading more than their heads.

    The system sets the time of the last change itself, so a file that was written to has another one, whatever its other
    times say; and no two files, not even one after the other, have the same place, number, size and times.

    Raises   CheckpointError if one cannot be opened
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        try:
            with _open(path) as file:
                status = os.fstat(file.fileno())
                state = (str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                digest.update(f"{state!r}\n".encode("utf-8", "surrogateescape"))
                digest.update(file.read(_DIGESTED_BYTES))
        except OSError as fault:
            refuse(path, f"cannot be read: {fault.strerror or fault}")
    return digest.hexdigest()


def inside(directory: Path, name: object) -> Path:
    """The path of file `name`: one plain name, spelled as on disk, and no link that leads elsewhere.

    A link is followed only into the directory itself or into the `blobs` folder of the cache it is a snapshot of.
    Raises CheckpointError.
    """
    if (
        not isinstance(name, str)
        or not name
        or name in (".", "..")
        or any(c in name for c in "/\\\0")
        or len(name) > 255
    ):
        refuse(directory, f"names a file {shown(name)}, which is not a plain file name in this directory")
    path = directory / name
    if not os.path.lexists(path) or name not in os.listdir(directory):
        similar = [entry for entry in os.listdir(directory) if entry.lower() == name.lower()]
        hint = f"; there is {similar[0]!r}, with other capital letters" if similar else ""
        refuse(path, f"does not exist{hint}")
    home = directory.resolve()
    allowed = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
    if path.resolve().parent not in allowed:
        refuse(path, f"is a link to {shown(str(path.resolve()))}, outside the model's directory")
    return path


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes."""
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                refuse(path, f"has {size} bytes; the limit for this file is {limit}")
            return file.read(size)
    except OSError as fault:
        refuse(path, f"cannot be read: {fault.strerror or fault}")


def parse_json(path: Path, data: bytes) -> Any:
    """JSON as it should be: UTF-8, no key twice, no NaN, not deep. Raises CheckpointError that names the fault."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {shown(twice)} appears twice")
        return result

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON value")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as fault:
        refuse(path, f"is not UTF-8 (byte {fault.start}){_hint(data)}")
    except RecursionError:
        refuse(path, "is nested too deeply")
    except ValueError as fault:
        refuse(path, f"is not valid JSON: {str(fault)[:200]}{_hint(data)}")


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    value = parse_json(path, read_bytes(path, limit))
    if not isinstance(value, dict):
        refuse(path, f"holds a JSON {type(value).__name__} where an object is due")
    return value


def _hint(data: bytes) -> str:
    what = looks_like(data[:256])
    return f"; it looks like {what}" if what and what != "a JSON document" else ""
