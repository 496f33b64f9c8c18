"""Real failures of other prompt languages, as behaviour to get right: forks, errors, batches, threads, notebooks,
scopes.
"""

import asyncio
import gc
import threading
from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang.testing import Gate, Prompt, Reply, ScriptedBackend


def test_a_fork_before_any_text_works_and_sends_no_empty_request(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any, first: Any) -> None:
        if first is not None:
            s += first
        forks = s.fork(3)
        forks += ab.gen("x", max_tokens=4)
        forks.join()

    for first in (None, ""):
        state = program.run(first, backend=backend)
        assert len(state["x"]) == 3 and all(state["x"])
    assert backend.calls["append"] == 0 and backend.calls["prefill"] == 0
    assert ab.state(backend=backend).gen("y").result()


def test_several_samples_are_a_list_and_the_state_goes_on_with_the_first(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any) -> None:
        s += "A:" + ab.gen("x", n=3, max_tokens=4) + " B"

    state = program.run(seed=1)
    assert len(state["x"]) == 3 and len(set(state["x"])) > 1
    assert state.text() == "A:" + state["x"][0] + " B"
    assert [m["finish_reason"]["type"] for m in state.get_meta_info("x")] == ["stop"] * 3 or len(
        state.get_meta_info("x")
    ) == 3
    with pytest.raises(ValueError, match="n must be an integer >= 1, got 0"):
        ab.gen("x", n=0)
    assert backend.open_branches() == 1


def test_an_error_in_one_branch_is_raised_at_the_join_names_the_branch_and_keeps_the_others(
    backend: ScriptedBackend,
) -> None:
    def work(b: Any) -> None:
        if b.index == 2:
            raise ValueError("my mistake")
        b += ab.gen("x", regex="(" if b.index == 3 else "[a-c]{4}")

    @ab.function
    def program(s: Any) -> Any:
        s += "Go"
        forks = s.fork(4)
        forks.map(work)
        with pytest.raises(ab.BranchErrors) as caught:
            forks.join()
        return forks, caught.value

    state = program.run()
    forks, error = state.ret_value
    assert error.branches == (2, 3) and isinstance(error.exceptions[0], ValueError)
    assert "branch 2" in str(error) and "my mistake" in str(error) and "branch 3" in str(error)
    assert "in branch 2 of 4" in error.exceptions[0].__notes__
    assert len(state["x"][0]) == len(state["x"][1]) == 4 and state["x"][2:] == [None, None]
    assert forks[0]["x"] == state["x"][0]
    del forks, state, error
    backend.settle()
    gc.collect()
    assert backend.open_branches() == 0


def test_siblings_of_a_failed_branch_go_on_unless_told_otherwise() -> None:
    for cancel in (False, True):
        gate = Gate()
        slow = ScriptedBackend(lambda p, gate=gate: Reply(gate, "done") if p.path == (0,) else ValueError("no"))  # type: ignore[misc]
        s = ab.state(backend=slow)
        forks = s.fork(2, cancel_siblings=cancel)
        forks += ab.gen("x")
        slow.settle()
        assert isinstance(forks[1].error(), ValueError)
        slow.settle()
        assert forks[0].done() is cancel
        gate.open()
        if cancel:
            with pytest.raises(ab.Cancelled):
                forks[0]["x"]
        else:
            assert forks[0]["x"] == "done"


def test_a_users_error_in_a_group_that_nobody_joins_is_raised_at_the_end_of_the_program(
    backend: ScriptedBackend,
) -> None:
    @ab.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: ab.gen("x") if i == 0 else 1 / 0
        s["kept"] = forks

    with pytest.raises(ab.BranchErrors, match="branch 1: ZeroDivisionError"):
        program.run()


def test_a_batch_keeps_order_and_keeps_failures_as_objects(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any, i: int) -> None:
        if i % 10 == 3:
            raise KeyError(f"item {i}")
        s += "x" * i + ab.gen("y", regex="(" if i == 50 else None, max_tokens=3)
        s["i"] = i

    results = program.run_batch([{"i": i} for i in range(60)], num_threads=5)
    good = [r for r in results if r]
    assert [r["i"] for r in good] == [i for i in range(60) if i % 10 != 3 and i != 50]
    bad = [r for r in results if not r]
    assert [r.index for r in bad] == [3, 13, 23, 33, 43, 50, 53]
    assert isinstance(bad[0].error(), KeyError) and bad[0].arguments == {"i": 3}
    with pytest.raises(KeyError, match="item 3"):
        bad[0]["y"]
    with pytest.raises(ab.BatchErrors) as caught:
        program.run_batch([{"i": 2}, {"i": 3}], on_error="raise")
    assert len(caught.value.results) == 2 and caught.value.results[0]["i"] == 2
    assert backend.open_branches() == 0


def test_one_thread_is_enough_for_a_batch_of_programs_that_fork_in_forks(backend: ScriptedBackend) -> None:
    seen: list[int] = []

    @ab.function
    def program(s: Any, i: int) -> None:
        outer = s.fork(8)
        outer += ab.gen("a", max_tokens=2)
        for branch in outer:
            inner = branch.fork(8)
            inner += ab.gen("b", max_tokens=2)
            inner.join()
        outer.join()
        seen.append(threading.active_count())

    before = threading.active_count()
    states = program.run_batch([{"i": i} for i in range(30)], num_threads=1)
    assert all(len(s["b"]) == 8 for s in states)
    assert max(seen) <= before + 2  # the batch's one thread, and the backend's


def test_a_thousand_concurrent_branches_need_no_thread_of_their_own() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda prompt: Reply(gate, "x"))
    s = ab.state(backend=backend)
    s += "Root"
    backend.settle()
    before = threading.active_count()
    group = s.fork(1000)
    group += ab.gen("y")
    backend.settle()
    assert threading.active_count() == before and not any(b.done() for b in group)
    gate.open()
    group.join()
    assert s["y"] == ["x"] * 1000 and backend.open_branches() == 1


def test_programs_run_inside_a_running_event_loop_sync_async_and_streaming(backend: ScriptedBackend) -> None:
    @ab.function
    def plain(s: Any) -> None:
        s += "A" + ab.gen("x", max_tokens=3)

    @ab.function
    async def concurrent(s: Any) -> Any:
        s += "B"
        return await s.gen("x", max_tokens=3)

    async def cell() -> list[str]:
        one = plain.run()
        two = concurrent.run()
        three = await concurrent.arun()
        streamed = "".join([c async for c in plain.run(stream=True).text_async_iter()])
        return [one["x"], two["x"], three["x"], streamed]

    assert all(asyncio.run(cell()))


def test_an_interrupt_ends_the_program_in_the_runtime_and_the_next_one_runs() -> None:
    gate, reading = Gate(), threading.Event()
    backend = ScriptedBackend(lambda p: Reply(gate, "x") if p.text == "slow" else "fine")

    @ab.function
    def interrupted(s: Any) -> None:
        s += "slow"
        forks = s.fork(2)
        forks += ab.gen("x")
        reading.set()
        raise KeyboardInterrupt  # what a signal would raise inside the wait

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(backend=backend)
    assert reading.is_set() and backend.calls["cancel_program"] == 1
    gc.collect()
    assert backend.open_branches() == 0 and backend.stats().result()["waiting_ops"] == 0
    s = ab.state(backend=backend)
    assert s.gen("next").result() == "fine"


def test_select_follows_the_chosen_rule_and_returns_every_score() -> None:
    options = {"Paris": [-0.4], "Antidisestablishmentarianism": [-0.1, -0.3, -0.1, -0.5]}
    backend = ScriptedBackend(lambda p: Reply(scores=options))
    s = ab.state(backend=backend)
    assert s.select("by_mean", list(options)).result() == "Antidisestablishmentarianism"
    assert s.select("by_sum", list(options), choices_method=ab.likelihood).result() == "Paris"
    meta = s.get_meta_info("by_mean")
    assert meta["normalized_prompt_logprobs"] == pytest.approx([-0.4, -0.25])
    assert [len(row) for row in meta["input_token_logprobs"]] == [1, 4] and meta["scores"] == pytest.approx(
        [-0.4, -0.25]
    )


def test_five_labels_of_uneven_length_get_the_answer_that_each_documented_rule_gives() -> None:
    labels = {
        "a": [-1.0],
        "b b": [-0.9, -0.1],
        "c c c": [-0.2, -2.0, -0.1],
        "d d d d": [-0.3] * 4,
        "e e e e e": [-0.25, -0.9, -0.9, -0.9, -0.9],
    }
    backend = ScriptedBackend(lambda p: Reply(scores=labels))
    s = ab.state(backend=backend)
    assert s.select("m", list(labels)).result() == "d d d d"  # the best mean
    assert (
        s.select("g", list(labels), choices_method=ab.greedy_token_selection).result() == "c c c"
    )  # the best first token
    assert s.select("l", list(labels), choices_method=ab.likelihood).result() == "a" or s["l"] == "b b"  # the best sum


def test_children_see_the_parents_values_at_the_fork_and_writes_stay_where_they_are(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any) -> None:
        s["a"] = "parent"
        forks = s.fork(3)
        s["late"] = "after the fork"
        for i, b in enumerate(forks):
            assert b["a"] == "parent" and "late" not in b
            b["a"], b["b"] = f"child {i}", f"b{i}"
        with pytest.raises(ab.UndefinedVariable, match="'only_in_0'"):
            forks[0]["only_in_0"] = 1
            forks[1]["only_in_0"]
        assert s["a"] == "parent" and "b" not in s
        forks.join()
        assert s["a"] == "parent" and s["b"] == ["b0", "b1", "b2"] and s["only_in_0"] == [1, None, None]

    program.run()


def test_a_child_sees_a_value_that_its_parent_is_still_generating() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "value") if not p.path else "own")
    s = ab.state(backend=backend)
    s += ab.gen("x")
    child = s.fork(1)[0]
    s["x"] = "parent's new one"
    gate.open()
    assert child["x"] == "value" and s["x"] == "parent's new one"


def test_when_the_engine_dies_a_waiting_program_gets_the_cause_and_so_does_the_next() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "x"))

    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("x")
        backend.die(ConnectionError("the engine is gone"))
        s["x"]

    for _ in range(2):
        with pytest.raises(ConnectionError, match="the engine is gone"):
            program.run(backend=backend)


def test_a_generation_with_a_timeout_raises_and_is_ended_in_the_runtime() -> None:
    backend = ScriptedBackend(lambda p: Reply(Gate(), "never"))
    s = ab.state(backend=backend)
    s += ab.gen("x", timeout=0.05)
    with pytest.raises(TimeoutError):
        s["x"]
    assert backend.stats().result()["waiting_ops"] == 0


def test_a_timeout_of_the_run_ends_it_also_where_the_backend_keeps_no_time() -> None:
    class Deaf(ScriptedBackend):
        """Ignores timeouts, as an engine that hangs does."""

        def open(self, **kwargs: Any) -> Any:
            branch = super().open(**kwargs)
            generate = branch.generate
            branch.generate = lambda sampling, on_text=None: generate(
                __import__("dataclasses").replace(sampling, timeout=None), on_text
            )  # type: ignore[method-assign]
            return branch

    backend = Deaf(lambda p: Reply(Gate(), "never"))

    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("x")
        s["x"]

    with pytest.raises(TimeoutError):
        program.run(backend=backend, timeout=0.05)
    gc.collect()
    assert backend.calls["cancel_program"] == 1 and backend.open_branches() == 0


def test_a_lazy_batch_yields_in_order_and_closing_it_cancels_the_rest() -> None:
    gate = Gate()
    started: list[int] = []

    def script(p: Prompt) -> Any:
        return Reply(gate, "x") if int(p.text) >= 3 else "x"

    backend = ScriptedBackend(script)

    @ab.function
    def program(s: Any, i: int) -> None:
        started.append(i)
        s += str(i) + ab.gen("x")
        s["i"] = i

    results = program.run_batch([{"i": i} for i in range(50)], num_threads=2, generator_style=True, backend=backend)
    assert [next(results)["i"] for _ in range(3)] == [0, 1, 2]
    results.close()
    gc.collect()
    assert backend.open_branches() == 0 and backend.stats().result()["waiting_ops"] == 0
    assert len(started) < 10
