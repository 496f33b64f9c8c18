"""The command line as a newcomer meets it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def anabranch(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anabranch.runtime.cli", *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=200)


def test_generate_streams_text_and_says_where_time_went(model_path: Path) -> None:
    done = anabranch("generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0", "--trace")
    assert done.returncode == 0 and "Paris" in done.stdout
    laps = {name.strip(): float(value) for name, value in re.findall(r"^(.{30})\s*([\d.]+) ms$", done.stderr, re.MULTILINE)}
    parts = ("tokenizer and template", "headers of the weights", "backend", "weights packed, or mapped")
    assert {"imports", "engine start", "first text", "total", *parts} <= laps.keys()
    assert sum(laps[name] for name in parts) <= laps["engine start"] <= laps["total"]


def test_chat_answers_until_the_input_ends(model_path: Path) -> None:
    done = anabranch("chat", "--max-tokens", "8", said="Hello\nAnd you?\n")
    assert done.returncode == 0 and len(done.stdout) > 10


def test_doctor_names_versions_compiler_and_kernels() -> None:
    done = anabranch("doctor")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("torch", "compiler", "kernels", "cache directory", "default model"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("generate", "x", "--model", "/no/such/model"), "/no/such/model"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--regex", "("), "regex"),
        (("replay", "/no/such/file"), "/no/such/file"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: tuple[str, ...], told: str, model_path: Path) -> None:
    done = anabranch(*arguments)
    assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
