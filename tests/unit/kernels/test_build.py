"""Building native code on first use: once, atomically, privately, and with words when it cannot be done."""

import ctypes
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.kernels import build
from anabranch.kernels.build import BuildError

pytestmark = pytest.mark.skipif(not any(map(build.shutil.which, build.COMPILERS)), reason="no C++ compiler")

ANSWER = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "answer.cpp").write_text(ANSWER % 42)
    return directory


def built(sources: Path, cache: Path, **how: str) -> Path:
    return build.build(cache, sources=sources, **how)


def test_a_library_is_built_once_and_found_again(sources: Path, tmp_path: Path) -> None:
    first = built(sources, tmp_path / "cache")
    made = first.stat()
    assert ctypes.CDLL(str(first)).answer() == 42
    assert built(sources, tmp_path / "cache") == first and first.stat().st_ino == made.st_ino
    assert not [p for p in first.parent.iterdir() if p.name.startswith("build-")]


def test_changed_sources_headers_or_flags_make_another_library(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {built(sources, tmp_path / "cache")}
    (sources / "answer.cpp").write_text(ANSWER % 43)
    paths.add(built(sources, tmp_path / "cache"))
    (sources / "unused.h").write_text("// a header\n")
    paths.add(built(sources, tmp_path / "cache"))
    monkeypatch.setattr(build, "COMMON", (*build.COMMON, "-DSOMETHING"))
    paths.add(built(sources, tmp_path / "cache"))
    assert len(paths) == 4


def test_only_this_machines_variants_are_compiled(sources: Path) -> None:
    for name in ("k_avx512.cpp", "k_avx2.cpp", "k_plain.cpp"):
        (sources / name).write_text("")
    x86 = {unit.source.name: unit.flags for unit in build.units(sources, "x86_64")}
    assert set(x86) == {"answer.cpp", "k_avx512.cpp", "k_avx2.cpp", "k_plain.cpp"}
    assert "-mavx512vnni" in x86["k_avx512.cpp"] and not any(flag.startswith("-mavx") for flag in x86["k_plain.cpp"])
    assert {unit.source.name for unit in build.units(sources, "aarch64")} == {"answer.cpp", "k_plain.cpp"}


def test_a_missing_compiler_is_named_with_the_remedy(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="looked for no-such-compiler.*install one.*reference"):
        built(sources, tmp_path / "cache", compiler="no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"looked for g\+\+, clang\+\+, c\+\+"):
        built(sources, tmp_path / "cache")


def test_a_failed_compilation_shows_the_compilers_words_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.cpp").write_text("int answer( { return 42; }\n")
    with pytest.raises(BuildError, match="(?s)failed with status .*error"):
        built(sources, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))
    (sources / "answer.cpp").write_text(ANSWER % 1)
    assert built(sources, tmp_path / "cache").is_file()


def test_a_cache_that_others_may_write_to_is_closed_to_them(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    built(sources, cache)
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0


def test_a_cache_of_another_user_is_refused(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    real = os.geteuid()
    monkeypatch.setattr(build.os, "geteuid", lambda: real + 1)
    with pytest.raises(BuildError, match=f"belongs to user {real}, not to us .{real + 1}."):
        built(sources, tmp_path / "cache")


def test_a_cache_that_cannot_be_made_says_where(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot build the native library in .*file/cache"):
        built(sources, tmp_path / "file" / "cache")


BUILD = """
import sys
from pathlib import Path
from anabranch.kernels import build
path = build.build(Path(sys.argv[2]), sources=Path(sys.argv[1]))
print(path, path.stat().st_ino)
"""


def test_parallel_processes_build_one_library(sources: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(sources), str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len(set(results)) == 1 and str(tmp_path) in results[0]


def test_only_the_libraries_used_last_are_kept(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "KEPT_LIBRARIES", 2)
    libraries = []
    for version in (0, 1, 0, 2):
        (sources / "extra.h").write_text(f"// {version}")
        libraries.append(built(sources, tmp_path / "cache"))
        if version == 1:
            for age, library in enumerate(libraries):
                os.utime(library, (1000 + age, 1000 + age))
    zero, one, again, two = libraries
    assert zero == again and zero.exists() and two.exists(), "used again"
    assert not one.exists() and not one.with_suffix(".lock").exists()


def test_the_real_sources_compile_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everything but the slow instruction set variants, which the rest of the suite has compiled anyway."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in build.SOURCES.iterdir():
        if path.suffix == ".h" or not path.stem.endswith(("_avx512", "_avx2", "_plain")):
            (sources / path.name).write_bytes(path.read_bytes())
    with caplog.at_level(logging.DEBUG, build.__name__):
        for unit in build.units(sources):
            build._run([build.find_compiler(), *unit.flags, "-O0", "-fsyntax-only", str(unit.source)])
    assert not [record.getMessage() for record in caplog.records if "warning:" in record.getMessage()]
