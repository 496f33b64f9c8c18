"""`anabranch_DEBUG` as a user sets it: in the environment of a program, in either mode."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.tiny_models import make_tiny_llama

PROGRAM = textwrap.dedent(
    """
    import sys
    import anabranch as ab

    engine = ab.Engine(sys.argv[1], mode=sys.argv[2], backend="reference", num_pages=64, num_threads=1)
    ab.set_default_backend(engine)

    @ab.function
    def tree(s):
        s += "A river that left its bed"
        for branch in (branches := s.fork(3)):
            branch += ab.gen("x", max_tokens=8, temperature=1.0)
        s.join(branches[0])

    tree.run(seed=3)["x"]
    engine.close()
    """
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=5)


def run(level: int, mode: str, tiny: Path, cache: Path) -> list[str]:
    """What the program says on its standard error."""
    environment = os.environ | {"anabranch_DEBUG": str(level), "ANABRANCH_CACHE": str(cache)}
    command = [sys.executable, "-c", PROGRAM, str(tiny), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("mode", ["inprocess", "processes"])
def test_level_0_says_nothing(mode: str, tiny: Path, tmp_path: Path) -> None:
    assert run(0, mode, tiny, tmp_path) == []


def test_level_1_says_when_each_process_starts_and_ends(tiny: Path, tmp_path: Path) -> None:
    said = "\n".join(run(1, "processes", tiny, tmp_path))
    for stage in ("worker", "scheduler", "tokenizer"):
        (started,) = re.findall(rf"^anabranch {stage}: started, pid (\d+)$", said, re.MULTILINE)
        (ended,) = re.findall(rf"^anabranch: the {stage} process ended, pid (\d+), exit code", said, re.MULTILINE)
        assert started == ended
    assert ": step" not in said and " step " not in said


def test_level_1_in_one_process_names_it(tiny: Path, tmp_path: Path) -> None:
    said = run(1, "inprocess", tiny, tmp_path)
    assert re.fullmatch(r"anabranch: the engine starts in a thread of this process, pid \d+", said[0])
    assert said[1:] == ["anabranch: the engine's thread ends: the engine was closed"]


@pytest.mark.parametrize("mode", ["inprocess", "processes"])
def test_at_level_5_every_step_is_said_checked_and_recorded_and_runs_again(mode: str, tiny: Path, tmp_path: Path) -> None:
    said = "\n".join(run(5, mode, tiny, tmp_path))
    (path,) = re.findall(r"^anabranch: recording the scheduler's inbox to (.+)$", said, re.MULTILINE)
    assert " step 1: " in said and Path(path).parent == tmp_path / "records"
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.runtime.cli", "replay", path], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "the same decisions as recorded" in done.stdout, done.stderr
