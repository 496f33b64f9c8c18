"""The examples on the scripted backend: they run, print what sharing saved, and use the facade's names alone."""

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.lang import api
from anabranch.lang.testing import Prompt, Reply, ScriptedBackend

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("[0-9]*.py"))


def script(prompt: Prompt) -> Any:
    if prompt.choices == ("Lookup", "Finish"):
        return Reply(scores={"Lookup": [-0.1 if "Danube is" not in prompt.text else -3.0], "Finish": [-1.0]})
    return None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs_on_the_scripted_backend(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name in api.__all__:
        monkeypatch.setattr(anabranch, name, getattr(api, name), raising=False)
    backend = ScriptedBackend(script)
    api.set_default_backend(backend)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        api.set_default_backend(None)
    printed = capsys.readouterr().out
    assert "saved" in printed or "tokens" in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_is_short_and_uses_the_facade_alone(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - set(sys.stdlib_module_names) == {"anabranch"}
    assert "import anabranch as ab\n" in text
