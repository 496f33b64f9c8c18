"""The time to the first text is that of the first byte, whatever happens before and after it."""

import sys
from pathlib import Path

import pytest

from anabranch.runtime.bench import start

TRACE = "       imports      91.0 ms\n  engine start   1,576.3 ms\nnot a stage\n"


def test_stages_are_read_from_a_trace_in_their_order() -> None:
    assert list(start.stages_of(TRACE).items()) == [("imports", 91.0), ("engine start", 1576.3)]


def test_first_text_comes_before_the_exit_and_stages_become_figures() -> None:
    script = f"import sys\nprint('x', end='', flush=True)\nsum(range(3_000_000))\nsys.stderr.write({TRACE!r})"
    timed = start.time_process([sys.executable, "-c", script])
    assert 0 < timed.first_text < timed.exit
    assert timed.as_figures()["stage_engine_start_ms"] == 1576.3


def test_a_process_that_fails_or_says_nothing_is_an_error_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="exit code 3: so it goes"):
        start.time_process([sys.executable, "-c", "import sys\nprint('x')\nsys.stderr.write('so it goes')\nsys.exit(3)"])
    with pytest.raises(RuntimeError, match="exit code 0"):
        start.time_process([sys.executable, "-c", "pass"])


def test_at_least_three_starts_are_timed_after_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 1.0, 3.0, 2.0])
    monkeypatch.setattr(start, "time_process", lambda words: start.Start(next(times), 4.0, {"imports": 5.0}))
    result = start.run(Path("model.gguf"), repeats=1)
    assert result["first_text_s"]["values"] == [1.0, 3.0, 2.0] and result["first_text_s"]["unit"] == "s"
    assert result["stage_imports_ms"]["unit"] == "ms" and "2 s" in start.show(result)


def test_the_command_asks_for_a_trace_and_passes_engine_options_on() -> None:
    words = start.command(Path("m.gguf"), ["--num-threads", "2"])
    assert "--trace" in words and words[-2:] == ["--num-threads", "2"]
