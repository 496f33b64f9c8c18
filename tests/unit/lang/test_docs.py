"""The code in the language guide runs, in order, in one session; the pages name only what exists."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.lang import api
from anabranch.lang.testing import ScriptedBackend

DOCS = Path(__file__).parents[3] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def test_every_block_of_the_guide_runs_in_order(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    for name in api.__all__:
        monkeypatch.setattr(anabranch, name, getattr(api, name), raising=False)
    monkeypatch.chdir(tmp_path)
    api.set_default_backend(ScriptedBackend())
    session = tmp_path / "guide.py"
    session.write_text("\n".join(blocks("language.md")))
    try:
        runpy.run_path(str(session))
    finally:
        api.set_default_backend(None)
    assert len(blocks("language.md")) >= 15


@pytest.mark.parametrize("page", ["language.md", "coming-from-sglang.md"])
def test_the_pages_name_only_what_exists(page: str) -> None:
    facade = {"Engine", "Runtime"}  # the engine's own, beside the language
    named = set(re.findall(r"\b(?:ab|sgl)\.([A-Za-z_]+)", (DOCS / page).read_text()))
    assert named - facade <= set(api.__all__), named - facade - set(api.__all__)
