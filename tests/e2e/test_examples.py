"""Every example runs on the embedded default, as a user runs it; each checks what must hold whatever the model says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path, model_path: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, f"{example.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.strip(), f"{example.name} printed nothing"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_uses_the_facade_only(example: Path) -> None:
    source = example.read_text()
    assert len(source.splitlines()) <= 60, f"{example.name} has more than 60 lines"
    assert "import anabranch as ab" in source and "from anabranch." not in source


def test_the_main_job_computes_each_token_once(model_path: Path) -> None:
    """Tree search: tokens computed over distinct tokens needed is at most 1.01; the last prompt token of a fork is not computed again."""
    import re

    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/02_tree_search.py")], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = dict(re.findall(r"^(tokens computed|distinct tokens needed)\s+(\d+)$", done.stdout, re.M))
    computed, distinct = int(figures["tokens computed"]), int(figures["distinct tokens needed"])
    assert distinct > 300
    assert computed <= 1.01 * distinct, f"{computed} tokens computed, {distinct} distinct ones needed"
