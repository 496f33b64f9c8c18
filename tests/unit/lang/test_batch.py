"""Batches: order, bounded concurrency, progress, resuming from a file."""

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang.testing import Gate, Reply, ScriptedBackend


@dataclasses.dataclass
class Box:
    width: int


def test_at_most_num_threads_programs_run_at_once() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    @ab.function
    def program(s: Any, i: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        s += ab.gen("x", max_tokens=2)
        s["x"]
        with lock:
            running[0] -= 1

    program.run_batch([[i] for i in range(40)], num_threads=3, backend=ScriptedBackend())
    assert 1 <= most[0] <= 3


def test_a_slow_reader_of_a_lazy_batch_holds_the_programs_back() -> None:
    started: list[int] = []

    @ab.function
    def program(s: Any, i: int) -> None:
        started.append(i)

    results = program.run_batch(
        [[i] for i in range(500)], num_threads=2, generator_style=True, backend=ScriptedBackend()
    )
    next(results)
    results.close()
    assert len(started) < 20


def test_items_are_dicts_or_lists_of_arguments_and_wrong_ones_are_refused_before_anything_runs(
    backend: ScriptedBackend,
) -> None:
    @ab.function
    def program(s: Any, a: int, b: int = 2) -> Any:
        return a, b

    states = program.run_batch([{"a": 1}, [3], (4, 5)])
    assert [s.ret_value for s in states] == [(1, 2), (3, 2), (4, 5)]
    with pytest.raises(TypeError, match="item 1 of the batch must be a dict or a list of arguments, got 'x'"):
        program.run_batch([[1], "x"])
    with pytest.raises(TypeError, match="item 0 of the batch has 3 arguments; program takes 1 to 2"):
        program.run_batch([[1, 2, 3]])
    with pytest.raises(ValueError, match='num_threads must be "auto" or an integer >= 1, got 0'):
        program.run_batch([[1]], num_threads=0)
    with pytest.raises(ValueError, match='on_error must be "keep" or "raise"'):
        program.run_batch([[1]], on_error="ignore")
    assert program.run_batch([]) == [] and backend.calls["open"] == 3


def test_states_of_a_batch_are_closed_and_readable_unless_kept_open(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any, i: int) -> None:
        s += f"{i}" + ab.gen("x", max_tokens=2)

    states = program.run_batch([[1], [2]])
    assert backend.open_branches() == 0 and all(s.closed and s.text().endswith(s["x"]) for s in states)
    kept = program.run_batch([[1], [2]], keep_open=True)
    assert backend.open_branches() == 2 and not kept[0].closed
    assert ab.Usage.of(states).operations == 2


def test_progress_is_shown_with_hit_rate_and_tokens_per_second(backend: ScriptedBackend, capsys: Any) -> None:
    @ab.function
    def program(s: Any, i: int) -> None:
        s += "a common beginning" + ab.gen("x", max_tokens=2)

    program.run_batch([[i] for i in range(5)], progress_bar=True, num_threads=1)
    shown = capsys.readouterr().err
    assert "5/5" in shown and "cached" in shown and "tok/s" in shown


def test_a_batch_resumes_from_its_file_and_tries_failures_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    broken = [True]
    ran: list[int] = []

    @ab.function
    def program(s: Any, i: int) -> Any:
        ran.append(i)
        if i == 2 and broken[0]:
            raise RuntimeError("the network")
        s += ab.user(f"{i}") + ab.assistant(ab.gen("x", max_tokens=3))
        s += ab.gen("box", type=Box)
        return i

    items = [[i] for i in range(4)]
    first = program.run_batch(items, resume=path, seed=1, backend=ScriptedBackend())
    assert [bool(r) for r in first] == [True, True, False, True] and sorted(ran) == [0, 1, 2, 3]
    broken[0] = False
    ran.clear()
    second = program.run_batch(items, resume=str(path), seed=1, backend=ScriptedBackend())
    assert ran == [2]
    assert [r["x"] for i, r in enumerate(second) if i != 2] == [r["x"] for i, r in enumerate(first) if i != 2]
    restored = second[0]
    assert isinstance(restored, ab.SavedState) and restored.ret_value == 0 and restored.error() is None
    assert restored.text() == first[0].text() and restored.messages() == first[0].messages()
    assert restored["box"] == {"width": first[0]["box"].width} and "x" in restored
    assert restored.get_meta_info("x")["finish_reason"]["type"] in ("stop", "length")
    with pytest.raises(ab.UndefinedVariable):
        restored["y"]
    ran.clear()
    assert [r["x"] for r in program.run_batch(items, resume=path, seed=1, backend=ScriptedBackend())] == [
        r["x"] for r in second
    ]
    assert ran == []


def test_a_file_cut_off_anywhere_loses_only_the_line_it_was_cut_in(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"

    @ab.function
    def program(s: Any, i: int) -> None:
        s += f"{i}" + ab.gen("x", max_tokens=2)

    backend = ScriptedBackend()
    items = [[i] for i in range(3)]
    whole = [r["x"] for r in program.run_batch(items, resume=path, num_threads=1, seed=2, backend=backend)]
    data = path.read_bytes()
    second_line = data.index(b"\n") + 1
    for cut in (second_line + 5, len(data) - 1, len(data) - 2, second_line):
        path.write_bytes(data[:cut])
        again = program.run_batch(items, resume=path, num_threads=1, seed=2, backend=backend)
        assert [r["x"] for r in again] == whole
        assert sum(isinstance(r, ab.SavedState) for r in again) >= 1
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.endswith(b"}")]
        assert {line["index"] for line in lines} == {0, 1, 2}
        path.write_bytes(data)


def test_a_changed_program_argument_or_option_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    backend = ScriptedBackend()

    def runs(body: Any, items: Any, **options: Any) -> int:
        results = ab.function(body).run_batch(items, resume=path, backend=backend, **options)
        return sum(not isinstance(r, ab.SavedState) for r in results)

    def body(s: Any, i: int) -> None:
        s += "one"

    first = body

    def body(s: Any, i: int) -> None:  # type: ignore[no-redef]
        s += "two"

    assert runs(first, [[1], [1]]) == 2 and runs(first, [[1], [1]]) == 0
    assert runs(first, [[1], [1], [1]]) == 1 and runs(first, [[2]]) == 1
    assert runs(first, [[1]], temperature=0.5) == 1 and runs(body, [[1]]) == 1
    with pytest.raises(TypeError, match="resume= needs arguments and options that JSON can hold; item 0"):
        runs(first, [[object()]])


def test_an_interrupt_while_a_batch_is_collected_cancels_what_runs() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate) if p.text == "1" else "x")

    @ab.function
    def program(s: Any, i: int) -> None:
        if i == 0:
            raise KeyboardInterrupt
        s += str(i) + ab.gen("x")

    with pytest.raises(KeyboardInterrupt):
        program.run_batch([[i] for i in range(3)], num_threads=2, backend=backend)
    assert backend.stats().result()["waiting_ops"] == 0
