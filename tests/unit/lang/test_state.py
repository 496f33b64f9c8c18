"""States: adding, reading, branching, undoing and releasing; what is refused and in which words."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang.backend import Sampling
from anabranch.lang.fake_text import token_id
from anabranch.lang.testing import Gate, Prompt, Reply, ScriptedBackend

# ---------------------------------------------------------------- adding


def test_adding_sends_at_once_and_does_not_wait() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "x"))
    s = ab.state(backend=backend)
    s += "A" + ab.gen("a") + "B" + ab.gen("b") + ab.select("c", ["x", "y"])
    for b in s.fork(3):
        b += ab.gen("d")
    assert backend.calls["generate"] == 5 and backend.calls["score"] == 1 and not s.done()
    gate.open()
    assert s["a"] == s["b"] == s["c"] == "x"


def test_one_addition_sends_its_text_and_turns_in_one_message(backend: ScriptedBackend) -> None:
    s = ab.state()
    s += ab.system("a") + ab.user("b" + "" + "c") + ab.assistant_begin() + "d"
    assert backend.calls["append"] == 1
    s += ab.gen("x", max_tokens=2) + "e"
    assert backend.calls["append"] == 2


def test_the_model_sees_exactly_what_was_added(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=2)
    s += ab.system("Be brief.")
    with s.user():
        s += "One, " + "two"
    s += ab.assistant("Well: " + ab.gen("x"))
    assert backend.prompts == ["<|system|>Be brief.<|end|><|user|>One, two<|end|><|assistant|>Well: "]


@pytest.mark.parametrize(
    ("thing", "words"),
    [(None, "None was added"), (3, "got int; write str"), (["a"], "got list"), (b"x", "got bytes")],
)
def test_what_is_no_text_and_no_expression_is_refused(backend: ScriptedBackend, thing: Any, words: str) -> None:
    s = ab.state()
    with pytest.raises((TypeError, ValueError), match=words):
        s += thing
    with pytest.raises(TypeError):
        "x" + ab.gen("y") + 3  # type: ignore[operator]
    assert backend.calls["append"] == 0


def test_turns_do_not_nest_and_close_only_what_is_open(backend: ScriptedBackend) -> None:
    s = ab.state()
    with pytest.raises(ab.TurnError, match="no user turn is open"):
        s += ab.user_end()
    s += ab.user_begin() + "Hi"
    with pytest.raises(ab.TurnError, match="cannot begin inside the user turn"):
        s += ab.assistant("x")
    with pytest.raises(ab.TurnError, match="no assistant turn is open, but a user turn is"):
        s += ab.assistant_end()
    s += ab.user_end()
    assert s.messages() == [{"role": "user", "content": "Hi"}]


def test_options_of_the_program_are_defaults_of_its_gens(backend: ScriptedBackend) -> None:
    seen: list[Sampling] = []
    watching = ScriptedBackend(lambda p: seen.append(p.sampling) or "x")  # type: ignore[func-returns-value]

    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("a") + ab.gen("b", max_tokens=5, temperature=0.1, stop="b", top_k=3)

    program.run(backend=watching)
    program.run(backend=watching, max_new_tokens=7, temperature=0.5, stop=["a"], top_p=0.9, min_p=0.1)
    plain, own, inherited, overridden = seen
    assert (plain.max_tokens, plain.temperature, plain.stop) == (128, 1.0, ())
    assert (own.max_tokens, own.temperature, own.stop, own.top_k) == (5, 0.1, ("b",), 3)
    assert (inherited.max_tokens, inherited.temperature, inherited.stop, inherited.top_p) == (7, 0.5, ("a",), 0.9)
    assert (overridden.max_tokens, overridden.stop, overridden.min_p, overridden.top_k) == (5, ("b",), 0.1, 3)


def test_logprobs_are_asked_for_unless_declined(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=3)
    s += ab.gen("a") + ab.gen("b", return_logprob=False) + ab.gen("c", return_logprob=True, top_logprobs_num=1)
    meta = s.get_meta_info("a")
    assert s.logprob("a") == pytest.approx(sum(lp for lp, _, _ in meta["output_token_logprobs"]))
    assert s.logprob("a", mean=True) == pytest.approx(s.logprob("a") / len(s.tokens("a")))
    with pytest.raises(ab.ProgramError, match="'b' has no logprobs"):
        s.logprob("b")
    s += ab.gen("d", regex="[ab]{3}") + ab.gen("e", regex="[ab]{3}", return_logprob=True)
    with pytest.raises(ab.ProgramError, match="under a constraint they are not the default"):
        s.logprob("d")
    assert s.logprob("e") < 0
    assert s.get_meta_info("c")["output_top_logprobs"][0]


# ---------------------------------------------------------------- reading


def test_an_unknown_variable_names_those_that_exist(backend: ScriptedBackend) -> None:
    s = ab.state()
    s["a"] = 1
    with pytest.raises(KeyError, match=r"no variable 'b'; it has: 'a'"):
        s["b"]
    with pytest.raises(ab.UndefinedVariable):
        s.get_meta_info("a")
    assert "a" in s and "b" not in s


def test_a_failed_generation_raises_its_first_cause_wherever_it_is_read() -> None:
    backend = ScriptedBackend(lambda p: ValueError("the first cause"))
    s = ab.state(backend=backend)
    s += "x" + ab.gen("a") + ab.gen("b") + ab.select("c", ["x"])
    child = s.fork(1)[0]
    child += ab.gen("d")
    reads = [
        lambda: s["a"], lambda: s["b"], lambda: s["c"], lambda: child["d"], s.text, s.messages, s.sync, child.sync,
        lambda: s.get_meta_info("a"), lambda: s.logprob("b"), lambda: list(s.text_iter()), lambda: list(s.stream("a")),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(ValueError, match="the first cause"):
            read()
    assert isinstance(s.error(), ValueError) and isinstance(child.error(), ValueError)


def test_what_was_generated_before_a_failure_stays_readable() -> None:
    s = ab.state(backend=ScriptedBackend(["good", ValueError("bad")]))
    s += ab.gen("a") + ab.gen("b")
    assert isinstance(s.error(), ValueError) and s["a"] == "good"


def test_a_run_raises_at_its_end_what_nobody_read() -> None:
    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("a")

    with pytest.raises(ValueError, match="bad"):
        program.run(backend=ScriptedBackend([ValueError("bad")]))


def test_a_started_run_is_not_waited_for_and_raises_where_it_is_read() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "x"))

    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("a")

    states = [program(backend=backend) for _ in range(3)]
    assert not any(s.done() for s in states)
    gate.open()
    assert [s["a"] for s in states] == ["x"] * 3


def test_a_program_waits_at_its_end_for_those_it_started() -> None:
    @ab.function
    def inner(s: Any) -> None:
        s += ab.gen("a")

    @ab.function
    def outer(s: Any) -> None:
        s["kept"] = inner()

    with pytest.raises(ValueError, match="inside"):
        outer.run(backend=ScriptedBackend([ValueError("inside")]))


def test_text_read_in_pieces_adds_up_to_the_whole(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any) -> None:
        s += ab.user("Hi") + ab.assistant(ab.gen("a", max_tokens=3) + ", " + ab.select("b", ["x", "y"]))
        s += "tail" + ab.gen("c", max_tokens=3)

    for _ in range(5):
        state = program.run(stream=True, seed=1)
        pieces = list(state.text_iter())
        assert "".join(pieces) == state.text() and len(pieces) > 5
    late = program.run(stream=True, seed=1)
    late.sync()
    assert "".join(late.text_iter()) == late.text() and "".join(late.text_iter("c")) == late["c"]


def test_a_streaming_program_shows_variables_as_they_come_and_raises_its_own_errors() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply("one ", gate, "two"))

    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("a")
        s["a"]
        raise RuntimeError("the program's own")

    state = program.run(stream=True, backend=backend)
    pieces = state.text_iter("a")
    assert next(pieces) == "one "
    gate.open()
    assert list(pieces) == ["two"] and state["a"] == "one two"
    with pytest.raises(RuntimeError, match="the program's own"):
        state.sync()
    with pytest.raises(RuntimeError, match="the program's own"):
        list(state.text_iter())
    with pytest.raises(RuntimeError, match="the program's own"):
        state["never"]


def test_a_rollback_while_the_text_is_followed_goes_on_from_what_is_left() -> None:
    step, done = threading.Event(), threading.Event()
    backend = ScriptedBackend(["bad", "good"])

    @ab.function
    def program(s: Any) -> None:
        s += "A"
        mark = s.mark()
        s += ab.gen("x")
        s["x"]
        assert step.wait(10)
        s.rollback(mark)
        s += ab.gen("y")
        done.set()

    state = program.run(stream=True, backend=backend)
    pieces = state.text_iter()
    assert [next(pieces), next(pieces)] == ["A", "bad"]
    step.set()
    assert done.wait(10) and list(pieces) == ["good"] and state.text() == "Agood"


# ---------------------------------------------------------------- branching and undoing


def test_forks_share_the_past_and_go_their_own_way(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=3)
    s += "Root" + ab.gen("x")
    left, right = s.fork(2)
    left += " left" + ab.gen("y")
    right += " right"
    s += " on"
    assert left.text() == f"Root{s['x']} left{left['y']}" and right.text() == f"Root{s['x']} right"
    assert s.text() == f"Root{s['x']} on" and "y" not in s and left["x"] == s["x"]
    assert [left.index, right.index] == [0, 1] and s.is_ancestor_of(left) and not left.is_ancestor_of(right)


def test_a_group_is_indexed_iterated_measured_and_added_to(backend: ScriptedBackend) -> None:
    group = ab.state(max_tokens=2).fork(3)
    assert len(group) == 3 and [b.index for b in group] == [0, 1, 2] and group[1:] == [group[1], group[2]]
    group[1] += "one"
    group += ["a", "b", "c"]
    group += lambda i: str(i)
    group += ab.gen("x")
    assert [b.text()[: -len(b["x"])] for b in group] == ["a0", "oneb1", "c2"]
    assert group.values("x") == [b["x"] for b in group]
    with pytest.raises(ValueError, match="3 branches must have as many items, got 2"):
        group += ["a", "b"]
    with pytest.raises(TypeError, match="cannot be replaced"):
        group[0] = group[1]
    with pytest.raises(ValueError, match="children >= 0, got -1"):
        ab.state().fork(-1)
    assert len(ab.state().fork(0)) == 0
    with pytest.raises(ValueError, match='join mode must be "gather_variable"'):
        group.join("merge")  # type: ignore[arg-type]


def test_gathered_lists_are_aligned_by_branch(backend: ScriptedBackend) -> None:
    s = ab.state()
    group = s.fork(3)
    group[1]["only"] = "one"
    group[0]["some"] = group[2]["some"] = "x"
    group.join()
    assert s["only"] == [None, "one", None] and s["some"] == ["x", None, "x"]


def test_after_a_join_children_are_closed_and_still_readable(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=2)
    group = s.fork(2)
    group += "a" + ab.gen("x")
    group.join()
    assert group[0].closed and group[0]["x"] and group[0].text() == "a" + group[0]["x"]
    with pytest.raises(ab.StateClosed, match="its group was joined"):
        group[0] += "more"
    assert backend.open_branches() == 1


def test_a_join_takes_the_winners_text_variables_and_marks(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=2)
    s += "A"
    before = s.mark()
    s["v"] = "parent"
    first, second = s.fork(2)
    second += "B" + ab.gen("x")
    second["v"] = "child"
    inside = second.mark()
    second += "C"
    s.join(second)
    assert s.text() == f"AB{s['x']}C" and s["v"] == "child" and first.closed and second.closed
    s.rollback(inside)
    assert s.text() == f"AB{s['x']}"
    s.rollback(before)
    assert s.text() == "A" and "x" not in s and backend.open_branches() == 1
    s += ab.gen("y")
    assert s["y"]


def test_a_join_may_take_a_grandchild_and_drops_everything_else_below(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=2)
    children = list(s.fork(2))
    grand = [g for c in children for g in c.fork(2)]
    for i, g in enumerate(grand):
        g += str(i)
    great = grand[2].fork(1)[0]
    great += "!"
    s.join(grand[2])
    assert s.text() == "2" and backend.open_branches() == 2 and not great.closed and grand[3].closed
    s.join(great)
    assert s.text() == "2!" and backend.open_branches() == 1


def test_a_join_refuses_strangers_and_none_drops_all_children(backend: ScriptedBackend) -> None:
    s, other = ab.state(), ab.state()
    child = s.fork(1)[0]
    with pytest.raises(ab.ProgramError, match="forked from this one"):
        child.join(s)
    with pytest.raises(ab.ProgramError, match="forked from this one"):
        s.join(other)
    s.join(None)
    assert child.closed and not other.closed and not s.closed


def test_a_rollback_to_a_mark_of_another_branch_is_refused(backend: ScriptedBackend) -> None:
    s = ab.state()
    s += "A"
    left, right = s.fork(2)
    left += "B"
    mark = left.mark()
    right += "C"
    with pytest.raises(ab.ProgramError, match="not on the state's path"):
        right.rollback(mark)
    s_mark = s.mark()
    s += "D"
    later = s.mark()
    s.rollback(s_mark)
    with pytest.raises(ab.ProgramError, match="not on the state's path"):
        s.rollback(later)


def test_a_scope_holds_what_was_added_inside_and_survives_a_fork(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=2)
    s += "before"
    with s.var_scope("v"):
        s += "in " + ab.gen("x")
    s += "after"
    assert s["v"] == "in " + s["x"] and s.fork(1)[0]["v"] == s["v"]
    mark = s.mark()
    with pytest.raises(ab.ProgramError, match=r"past the beginning of var_scope\('w'\)"), s.var_scope("w"):
        s += "x"
        s.rollback(mark)
        s.rollback(mark)
        s._tail = mark.node.prev  # as a rollback to an older mark would
    assert "w" not in s


def test_an_error_in_a_scope_or_turn_is_the_programs_own(backend: ScriptedBackend) -> None:
    s = ab.state()
    with pytest.raises(KeyError), s.var_scope("v"):
        raise KeyError
    with pytest.raises(KeyError), s.user():
        raise KeyError
    assert "v" not in s


def test_samples_of_a_gen_are_released_and_the_first_one_stays(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=3)
    s += "A" + ab.gen("x", n=4)
    s.sync()
    assert len(s["x"]) == 4 and backend.open_branches() == 1
    assert s.text() == "A" + s["x"][0] and [m["completion_tokens"] for m in s.get_meta_info("x")] == [3] * 4


# ---------------------------------------------------------------- releasing


def test_dropping_a_state_releases_its_branch_without_waiting_for_the_collector(backend: ScriptedBackend) -> None:
    gc.disable()
    try:
        s = ab.state(max_tokens=2)
        s += "x" + ab.gen("y")
        group = s.fork(5)
        group += ab.gen("z")
        group.sync()
        ref = weakref.ref(group[0])
        assert backend.open_branches() == 6
        del group
        assert backend.open_branches() == 1 and ref() is None
        del s
        assert backend.open_branches() == 0
    finally:
        gc.enable()


def test_a_child_outlives_a_parent_that_was_dropped_while_it_generated() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "p") if not p.path else "c")
    s = ab.state(backend=backend)
    s += "A" + ab.gen("x")
    grandchild = s.fork(1)[0].fork(1)[0]
    grandchild += ab.gen("y")
    del s
    gc.collect()
    backend.settle()
    gate.open()
    assert grandchild["x"] == "p" and grandchild["y"] == "c" and grandchild.text() == "Apc"
    gc.collect()
    assert backend.open_branches() == 1


def test_an_exception_that_leaves_a_program_releases_all_its_branches(backend: ScriptedBackend) -> None:
    kept: list[Any] = []

    @ab.function
    def program(s: Any) -> None:
        kept.extend(s.fork(3))
        kept.append(s)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program.run()
    assert backend.open_branches() == 0 and all(s.closed for s in kept)


def test_closing_cancelling_and_dropping_are_idempotent_and_keep_what_was_read() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "x") if p.text else "first")
    with ab.state(backend=backend) as s:
        s += ab.gen("a")
        assert s["a"] == "first"
        child = s.fork(1)[0]
        child += ab.gen("b")
        s.cancel()
        s.cancel()
        with pytest.raises(ab.Cancelled):
            child["b"]
        child.drop()
        child.drop()
        child.close()
    s.close()
    assert s["a"] == "first" and s.text() == "first" and backend.open_branches() == 0
    with pytest.raises(ab.StateClosed, match="it was closed"):
        s.fork(2)


def test_a_value_that_was_asked_for_can_be_cancelled() -> None:
    backend = ScriptedBackend(lambda p: Reply(Gate()))
    s = ab.state(backend=backend)
    value = s.gen("x")
    value.cancel()
    with pytest.raises(ab.Cancelled, match="gen 'x' was cancelled"):
        value.result()
    assert backend.stats().result()["waiting_ops"] == 0


def test_a_wait_with_a_time_limit_ends_and_the_value_can_still_come() -> None:
    gate = Gate()
    s = ab.state(backend=ScriptedBackend(lambda p: Reply(gate, "x")))
    value = s.gen("x")
    for wait in (
        lambda: value.result(0.01),
        lambda: s.get_var("x", 0.01),
        lambda: s.sync(0.01),
        lambda: s.get_meta_info("x", 0.01),
    ):
        with pytest.raises(TimeoutError):
            wait()
    gate.open()
    assert value.result() == "x"


def test_a_lease_is_passed_on_and_a_wrong_one_refused(backend: ScriptedBackend) -> None:
    s = ab.state()
    s.lease(3.0).lease(0)
    assert backend.calls["lease"] == 2
    with pytest.raises(ValueError, match="seconds >= 0, got -1"):
        s.lease(-1)


# ---------------------------------------------------------------- functions


def test_arguments_options_and_bound_values_find_their_place(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any, a: int, temperature: str = "mine", *, seed: int = 0) -> Any:
        return a, temperature, seed

    assert program.run(1, seed=5, max_new_tokens=3).ret_value == (1, "mine", 5)  # its own names win
    assert program.bind(a=2).run(temperature="warm").ret_value == (2, "warm", 0)
    with pytest.raises(TypeError, match="no parameter 'b'; it has: a, temperature, seed"):
        program.bind(b=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
        program.run(1, topk=3)
    with pytest.raises(TypeError, match="first parameter is its state"):
        ab.function(lambda: None)
    with pytest.raises(TypeError, match="has no option 'topk'"):
        ab.state(topk=3)
    assert backend.open_branches() == 0


def test_seeds_make_runs_equal_and_different_ones_make_them_differ(backend: ScriptedBackend) -> None:
    @ab.function
    def inner(s: Any) -> None:
        s += ab.gen("y", max_tokens=6)

    @ab.function
    def program(s: Any) -> Any:
        s += "A" + ab.gen("x", max_tokens=6)
        return s["x"], inner()["y"], inner()["y"]

    one, again, other = (program.run(seed=n).ret_value for n in (1, 1, 2))
    assert one == again and one != other and one[1] != one[2]
    batch = [s["y"] for s in inner.run_batch([{}] * 4, seed=1)]
    assert batch == [s["y"] for s in inner.run_batch([{}] * 4, seed=1, num_threads=1)] and len(set(batch)) == 4


def test_without_any_backend_a_program_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.lang import program as module

    monkeypatch.setattr(module, "_default_backend", None)
    monkeypatch.setattr(module, "default_backend_factory", None)
    with pytest.raises(RuntimeError, match="call set_default_backend"):
        ab.state()
    made: list[ScriptedBackend] = []
    monkeypatch.setattr(module, "default_backend_factory", lambda: made.append(ScriptedBackend()) or made[-1])
    ab.state(), ab.state()
    assert len(made) == 1
    with pytest.raises(TypeError, match="is no backend"):
        ab.state(backend=object())

    class Runtime:
        endpoint = made[0]

    assert ab.as_backend(Runtime()) is made[0]


def test_reasoning_is_split_from_the_answer_by_the_models_tags() -> None:
    backend = ScriptedBackend(lambda p: "<think>hmm</think>\n\n42")
    s = ab.state(backend=backend)
    s += ab.separate_reasoning("Q: " + ab.gen("x"), model_type="qwen3")
    assert s["x"] == "42" and s["x_reasoning_content"] == "hmm" and s.text() == "Q: <think>hmm</think>\n\n42"
    for text, parts in [
        ("plain", ("", "plain")), ("<think>cut", ("cut", "")), ("no tag</think>a", ("no tag", "a")), ("", ("", "")),
    ]:  # fmt: skip
        from anabranch.lang.reasoning import split_reasoning

        assert split_reasoning(text, None) == parts
    s += ab.separate_reasoning(ab.gen("y"), model_type="martian")
    with pytest.raises(ab.Unsupported, match="knows no model_type 'martian'"):
        s["y"]


def test_pictures_are_refused_clearly() -> None:
    for refuse in (lambda: ab.image("x.png"), lambda: ab.video("x.mp4", 3)):
        with pytest.raises(ab.Unsupported, match="needs a vision model"):
            refuse()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ab.select("x", []), "at least one choice"),
        (lambda: ab.select("x", "abc"), "needs a list"),
        (lambda: ab.select("x", ["a", ""]), "string that is not empty"),
        (lambda: ab.select("x", ["a"], temperature=0.5), "temperature must be 0, got 0.5"),
        (lambda: ab.select("x", ["a"], choices_method="sum"), "choices_method must be"),
        (lambda: ab.gen(3), "name must be a string"),
        (lambda: ab.gen("x", regex="a", json_schema="{}"), "one of .*got regex and json_schema"),
        (lambda: ab.gen("x", stop=[1]), "stop must be a string or a list of strings"),
        (lambda: ab.gen("x", timeout=0), "timeout must be a number of seconds > 0"),
        (lambda: ab.gen("x", dtype=list), "dtype must be int, float, bool or str"),
        (lambda: ab.gen("x", json_schema="{"), "Expecting"),
        (lambda: ab.gen("x", type=set), "no JSON Schema for type"),
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError, ab.Unsupported), match=words):
        make()


def test_a_rule_of_ones_own_decides_a_select() -> None:
    class Longest(ab.ChoicesSamplingMethod):
        def __call__(self, *, choices: Any, input_token_logprobs: Any, **_: Any) -> Any:
            assert len(input_token_logprobs) == len(choices)
            return ab.ChoicesDecision(max(choices, key=len))

    class Unconditional(Longest):
        requires_unconditional_logprobs = True  # type: ignore[assignment]

        def __call__(self, *, unconditional_token_logprobs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            assert len(unconditional_token_logprobs) == 2
            return super().__call__(**kwargs)

    class Wrong(ab.ChoicesSamplingMethod):
        def __call__(self, **_: Any) -> Any:
            return ab.ChoicesDecision("other")

    backend = ScriptedBackend()
    s = ab.state(backend=backend)
    s += (
        "Q:"
        + ab.select("x", ["a", "bbb"], choices_method=Longest())
        + ab.select("y", ["cc", "d"], 0.0, Unconditional())
    )
    assert s["x"] == "bbb" and s["y"] == "cc" and s.text() == "Q:bbbcc" and s.get_meta_info("x")["scores"]
    assert s.get_meta_info("x")["best"] == 1 and s.tokens("x") == (token_id("bbb"),)
    s += ab.select("z", ["a"], choices_method=Wrong()) + " and on"
    with pytest.raises(ab.ProgramError, match="none of the choices"):
        print(s["z"])
    with pytest.raises(ab.ProgramError, match="none of the choices"):
        s += "a failed branch stays failed"
    assert backend.open_branches() == 1


class Last(ab.ChoicesSamplingMethod):
    def __call__(self, *, choices: Any, **_: Any) -> Any:
        return ab.ChoicesDecision(choices[-1])


def test_a_select_by_a_rule_of_ones_own_does_not_wait_and_what_follows_comes_in_order() -> None:
    gate = Gate()
    s = ab.state(backend=ScriptedBackend(lambda p: Reply(gate, "late") if p.text.endswith("?") else "end"))
    s += "first?" + ab.gen("first")
    group = s.fork(2)
    group += " " + ab.select("which", ["a", "b"], choices_method=Last()) + " then " + ab.gen("then")
    group += ab.select("again", ["c", "d"], choices_method=Last())
    streamed = group[0].stream(ab.gen("more"))
    assert not group[0].done() and not s.done()  # everything is sent; nobody has waited
    gate.open()
    assert list(streamed) == ["end"]
    assert [b.text() for b in group] == ["first?late b then enddend", "first?late b then endd"]
    group[1] += " x"
    twin = group[1].fork(1)[0]
    assert twin.text().endswith("endd x") and twin.explain().text == twin.text()
    s.join(group[1])
    assert s.text() == s.explain().text and s["which"] == "b"


def test_a_program_that_awaits_may_select_by_its_own_rule() -> None:
    @ab.function
    async def program(s: Any) -> Any:
        s += ab.user("Which?") + ab.assistant(ab.select("x", ["a", "b"], choices_method=Last()))
        async with asyncio.timeout(30):
            return await s.value("x"), await s.select("y", ["c", "d"], choices_method=Last())

    assert program.run(backend=ScriptedBackend()).ret_value == ("b", "d")


def test_what_waits_behind_an_undecided_select_ends_with_the_branch() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply(gate, "late"))
    s = ab.state(backend=backend)
    s += "?" + ab.gen("first") + ab.select("x", ["a"], choices_method=Last()) + ab.gen("after")
    after = s.value("after")
    s.cancel()
    with pytest.raises(ab.Cancelled):
        s.get_var("after", 30)
    with pytest.raises(ab.Cancelled):
        s.fork(1)
    s.close()
    assert after is not None and backend.open_branches() == 0


def test_the_choice_objects_decide_as_the_runtime_does() -> None:
    rows = [[-0.5, -0.5], [-0.1, -2.0, -0.1], [-0.4]]
    triples = [[(lp, 0, None) for lp in row] for row in rows]
    bare = [[(None, 0, None), (-1.0, 0, None)], [(None, 0, None), (-2.5, 0, None), (-0.1, 0, None)], [(None, 0, None)]]
    given: dict[str, Any] = {
        "choices": ["a", "b", "c"],
        "normalized_prompt_logprobs": [sum(r) / len(r) for r in rows],
        "input_token_logprobs": triples,
        "output_token_logprobs": [],
    }
    assert ab.token_length_normalized(**given).decision == "c"
    assert ab.greedy_token_selection(**given).decision == "b"
    assert ab.unconditional_likelihood_normalized(unconditional_token_logprobs=bare, **given).decision == "b"
    assert ab.likelihood(**given).decision == "c"
    with pytest.raises(ValueError, match="needs unconditional"):
        ab.unconditional_likelihood_normalized(**given)


def test_scripted_prompts_name_their_branch() -> None:
    seen: list[Prompt] = []
    backend = ScriptedBackend(lambda p: seen.append(p) or "x")  # type: ignore[func-returns-value]
    s = ab.state(backend=backend, seed=4)
    group = s.fork(2)
    group += "line\nlast" + ab.gen("x")
    group.join()
    assert [(p.path, p.seed, p.last_line) for p in seen] == [((0,), 4, "last"), ((1,), 4, "last")]
