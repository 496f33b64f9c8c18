"""What an engine says about its steps at each level of `anabranch_DEBUG`, and that a record runs again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.scheduling import make_engine, prompt, submit

from anabranch.runtime import trace
from anabranch.runtime.config import DebugConfig, EngineConfig, debug_level
from anabranch.runtime.errors import ConfigError
from anabranch.runtime.testing import FakeEngine
from anabranch.runtime.trace import StepRecorder, new_record, replay


def watched(level: int, record_to: Path | None = None) -> FakeEngine:
    """An engine with too few pages for its requests, every step of which a recorder looks at."""
    engine = make_engine(num_pages=12, max_slots=8, budget=32)
    config = EngineConfig(cache=engine.scheduler.state.cache, scheduler=engine.scheduler.state.config)
    recorder = StepRecorder(DebugConfig(level=level, record_to=str(record_to) if record_to else None), config)
    step = engine.scheduler.step

    def recorded(now: float, inbox: list) -> object:  # type: ignore[type-arg]
        decision = step(now, inbox)
        recorder.record(now, inbox, decision, engine.scheduler)
        return decision

    engine.scheduler.step = recorded  # type: ignore[assignment,method-assign]
    for number in range(1, 6):
        submit(engine, number, prompt(number, 20), 6)
    engine.run_until_idle()
    recorder.close()
    return engine


def test_level_1_says_nothing_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    watched(1)
    assert capsys.readouterr().err == ""


def test_level_2_has_a_line_for_each_step_and_no_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    engine = watched(2)
    lines = capsys.readouterr().err.splitlines()
    assert sum(": step" not in line and "step " in line for line in lines) == engine.scheduler.state.num_steps
    assert "in [OpenBranch,Submit] step 1:" in lines[0] and not any("waits" in line for line in lines)


def test_level_3_says_why_each_request_waits(capsys: pytest.CaptureFixture[str]) -> None:
    watched(3)
    said = capsys.readouterr().err
    assert "request 3 waits: NeedsPages(need=" in said


@pytest.mark.parametrize(("level", "is_checked"), [(3, False), (4, True), (5, True)])
def test_level_4_checks_the_cache_after_each_step(
    level: int, is_checked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks: list[object] = []
    monkeypatch.setattr(trace, "check", checks.append)
    engine = watched(level, tmp_path / "record.jsonl")
    assert bool(checks) == is_checked and (not is_checked or len(checks) >= engine.scheduler.state.num_steps)


def test_level_5_records_what_replay_runs_again_with_the_same_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.jsonl"
    engine = watched(5, path)
    assert path.stat().st_mode & 0o077 == 0, "it holds what users said"
    assert replay(path) >= engine.scheduler.state.num_steps
    assert f"step {engine.scheduler.state.num_steps}:" in capsys.readouterr().out


def damaged(change: Callable[[list[str]], list[str]], path: Path) -> Path:
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    return path


def test_a_replay_that_decides_otherwise_says_so(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    watched(5, path)

    def other_step(lines: list[str]) -> list[str]:
        line = json.loads(lines[2])
        return [*lines[:2], json.dumps(line | {"step_id": 77}), *lines[3:]]

    with pytest.raises(AssertionError, match="the record has step 77, the replay decides 2"):
        replay(damaged(other_step, path), show=False)


@pytest.mark.parametrize("change", [lambda lines: lines[1:], lambda lines: [*lines, "{}"], lambda lines: [*lines, '{"now": 1, "inbox": ["?"]}']])
def test_what_is_no_record_is_refused(tmp_path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = tmp_path / "record.jsonl"
    watched(5, path)
    with pytest.raises(ConfigError, match="is not a record of an inbox"):
        replay(damaged(change, path), show=False)


def test_only_the_last_records_are_kept(tmp_path: Path) -> None:
    made = []
    for _ in range(trace.KEPT_RECORDS + 3):
        made.append(new_record(tmp_path))
        made[-1].write_text("")
    assert sorted(tmp_path.iterdir()) == made[-trace.KEPT_RECORDS :]


@pytest.mark.parametrize(("text", "level"), [("", 0), ("0", 0), ("5", 5)])
def test_the_switch_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, level: int) -> None:
    monkeypatch.setenv("anabranch_DEBUG", text)
    assert debug_level() == level


@pytest.mark.parametrize("text", ["6", "-1", "on", "1.0"])
def test_a_level_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("anabranch_DEBUG", text)
    with pytest.raises(ConfigError, match=f"anabranch_DEBUG must be a level in 0..5, got '{text}'"):
        debug_level()
