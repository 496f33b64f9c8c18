"""The notebooks' code on the scripted backend, cell by cell, in a real kernel."""

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SETUP = "import anabranch as ab\nfrom anabranch.lang.testing import ScriptedBackend\nab.set_default_backend(ScriptedBackend())"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_on_the_scripted_backend(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src") + os.pathsep + os.environ.get("PYTHONPATH", ""))
    notebook: Any = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert any("text/html" in o.get("data", {}) for o in outputs) and any("saved" in o.get("text", "") for o in outputs)
