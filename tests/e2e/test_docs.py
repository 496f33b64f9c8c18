"""The code in README and docs runs: every Python block of a page, in order, in one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda path: path.name)
def test_the_code_of_a_page_runs(page: Path, model_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(BLOCK.findall(page.read_text())))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing, f"{page.name} links to {missing}"
