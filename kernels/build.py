"""Build the native CPU library on first use, into a cache directory of the user, and load it.

Every `csrc/cpu/*.cpp` is compiled with COMMON flags, plus those that its name asks for: `*_avx512.cpp` and `*_avx2.cpp` hold one
instruction set's variant each (chosen at run time by CPUID, never built on other machines), every other file runs anywhere. The
library's name holds a hash of the sources, the flags, the compiler and the machine, so a stale one is never loaded; nothing depends
on the CPU it was built on. Parallel processes build once (a lock file), and a library appears in one atomic rename.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent / "csrc" / "cpu"
COMPILERS = ("g++", "clang++", "c++")
# Contraction would let the compiler fuse a multiply and an add in one variant and not in another: results must be bit-equal.
COMMON = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default", "-Wall", "-Wextra")
VARIANTS = {  # the compilers' own headers of intrinsics set off -Wuninitialized
    "_avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c", "-Wno-uninitialized"),
    "_avx2": ("-mavx2", "-mfma", "-mf16c", "-Wno-uninitialized"),
}
KEPT_LIBRARIES = 16  # of other versions, compilers and flags, beside each other
X86 = ("x86_64", "amd64")


class BuildError(RuntimeError):
    """The native library cannot be built or loaded here. The message says why and what to do; the `reference` backend still works."""


@dataclass(frozen=True, slots=True)
class Unit:
    source: Path
    flags: tuple[str, ...]


def units(sources: Path = SOURCES, machine: str | None = None) -> list[Unit]:
    """What to compile, with which flags, slowest first."""
    is_x86 = (machine or platform.machine()).lower() in X86
    found = []
    for source in sorted(sources.glob("*.cpp")):
        suffix = next((s for s in VARIANTS if source.stem.endswith(s)), None)
        if suffix is None:
            # On x86 the plain variants are a last resort: not worth four times the compile time.
            found.append(Unit(source, (*COMMON, "-O2") if is_x86 and source.stem.endswith("_plain") else COMMON))
        elif is_x86:
            found.append(Unit(source, COMMON + VARIANTS[suffix]))
    return sorted(found, key=lambda unit: -unit.source.stat().st_size)


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "anabranch" / "native"


def find_compiler(compiler: str | None = None) -> str:
    """Full path of the C++ compiler. Raises BuildError if there is none."""
    for name in (compiler,) if compiler else COMPILERS:
        if path := shutil.which(name):
            return path
    wanted = compiler or ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler found (looked for {wanted}): install one (Debian: apt-get install g++) or use --backend reference")


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def source_key(compiler: str, sources: Path = SOURCES) -> str:
    """Hash of everything that decides the library's bytes."""
    digest = hashlib.sha256()
    parts = [compiler, _compiler_version(compiler), platform.machine()]
    parts += [f"{unit.source.name} {' '.join(unit.flags)}" for unit in units(sources)]
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:20]


def build(cache_dir: Path | None = None, compiler: str | None = None, sources: Path = SOURCES) -> Path:
    """Path of the built library, compiling it if the cache has none. Raises BuildError."""
    cxx = find_compiler(compiler)
    directory = cache_dir or default_cache_dir()
    library = directory / f"anabranch-cpu-{source_key(cxx, sources)}.so"
    try:
        make_private(directory)
        if _is_ours(library):
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(library)  # used: the last to go
            return library
        with open(directory / f"{library.stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_ours(library):
                _compile(cxx, units(sources), library)
                _keep_the_last(directory)
    except OSError as error:
        raise BuildError(f"cannot build the native library in {directory}: {error}; give another cache directory") from error
    return library


def make_private(directory: Path) -> None:
    """We will run or trust what lies there: it must be ours, and nobody else may write to it. Raises BuildError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise BuildError(f"{directory} belongs to user {status.st_uid}, not to us ({os.geteuid()}): give another cache directory")
    if status.st_mode & 0o022:
        directory.chmod(status.st_mode & 0o755)


def _keep_the_last(directory: Path) -> None:
    """Remove libraries, and their locks, that nobody has loaded for the longest time. Whoever has one loaded keeps it."""
    libraries = sorted(directory.glob("anabranch-cpu-*.so"), key=lambda path: path.stat().st_mtime)
    for old in libraries[:-KEPT_LIBRARIES]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def _is_ours(library: Path) -> bool:
    return library.is_file() and library.stat().st_uid == os.geteuid()


def _compile(compiler: str, work: list[Unit], library: Path) -> None:
    # Not to the log, which few people see: a first start that stands still for half a minute must say why.
    print(f"anabranch: compiling {len(work)} files of CPU kernels with {compiler}, once; half a minute or more", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:

        def compile_one(unit: Unit) -> str:
            output = f"{scratch}/{unit.source.stem}.o"
            _run([compiler, *unit.flags, "-c", str(unit.source), "-o", output])
            return output

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, work))
        linked = f"{scratch}/{library.name}"
        _run([compiler, "-shared", "-pthread", "-o", linked, *objects])
        os.replace(linked, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\nfailed with status {done.returncode}:\n{done.stderr[-4000:]}")
    if done.stderr:
        log.debug("%s: %s", command[-1], done.stderr)


@cache
def load(cache_dir: Path | None = None, compiler: str | None = None) -> ctypes.CDLL:
    """The native library, built if needed. Calls through it release the GIL. Raises BuildError."""
    path = build(cache_dir, compiler)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}; delete it and try again") from error
