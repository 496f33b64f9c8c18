"""The search kit against scripted models whose best path is known."""

from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang.testing import Prompt, Reply, ScriptedBackend


def digits(prompt: Prompt) -> Any:
    """Each branch writes the digit of its place among its siblings: 0, 1, 2 ... (scratch forks of judges count too)."""
    if prompt.choices:
        value = sum(int(c) for c in prompt.text if c.isdigit())
        return Reply(scores={"Yes": [-1.0 / (1 + value)], "No": [-1.0]})
    return f" {prompt.path[-1] % 10}"


def total(branch: Any) -> float:
    return sum(int(c) for c in branch.text() if c.isdigit())


@pytest.fixture
def s() -> Any:
    state = ab.state(backend=ScriptedBackend(digits))
    state += "go:"
    return state


STEP = ab.gen("x")


def test_best_of_n_keeps_the_best_and_drops_the_others(s: Any) -> None:
    assert ab.best_of_n(s, STEP, 4, total) is s and s.text() == "go: 3"
    assert s._program.backend.open_branches() == 1


def test_a_vote_takes_the_majority_and_the_likeliest_of_it() -> None:
    words = ["a", "B", "b", "c", "b"]
    logprobs = [-0.1, -0.5, -0.2, -0.1, -0.9]
    s = ab.state(backend=ScriptedBackend(lambda p: Reply(words[p.path[-1]], logprob=logprobs[p.path[-1]])))
    vote = ab.self_consistency(s, STEP, "x", 5, normal=str.lower)
    assert vote.answer == "b" and vote.counts == {"a": 1, "b": 3, "c": 1} and vote.share == 0.6
    assert s["x"] == "b" and s.logprob("x") == -0.2
    tied = ab.state(backend=ScriptedBackend(lambda p: str(p.path[-1])))
    assert ab.self_consistency(tied, STEP, "x", 3).answer == "0"  # the first of equals


def test_speculation_keeps_what_passes_and_undoes_what_does_not() -> None:
    s = ab.state(backend=ScriptedBackend(["bad", "worse", "good", "no", "no"]))
    s += "A"
    assert ab.speculate(s, STEP, lambda b: b["x"] == "good", tries=5) and s.text() == "Agood"
    assert not ab.speculate(s, ab.gen("y"), lambda b: b["y"] == "yes", tries=2)
    assert s.text() == "Agood" and "y" not in s


def test_a_beam_finds_the_best_path_of_its_width_and_stops_what_is_done(s: Any) -> None:
    levels: list[list[float]] = []
    ab.beam(
        s, STEP, total, width=2, branching=3, depth=3, on_level=lambda _, pairs: levels.append([v for v, _ in pairs])
    )
    assert s.text() == "go: 2 2 2" and [len(level) for level in levels] == [3, 6, 6] and levels[2] == [6, 5, 5, 4, 4, 3]
    assert s._program.backend.open_branches() == 1
    t = ab.state(backend=ScriptedBackend(digits))
    ab.beam(t, STEP, total, width=2, branching=3, depth=9, done=lambda b: total(b) >= 4)
    assert t.text() == " 2 1 2"  # " 2 2" was done with 4 and stayed as it was; this one went on, to 5


def test_a_judge_is_asked_for_all_branches_before_the_first_answer_is_read_and_leaves_no_trace(s: Any) -> None:
    judge = ab.Judge(" ok?")
    ab.best_of_n(s, STEP, 3, judge)
    assert s.text() == "go: 2" and "verdict" not in s
    backend = s._program.backend
    assert backend.open_branches() == 1 and backend.calls["score"] == 3
    shown = s.tree()
    assert "●" in shown and shown.count("├─") + shown.count("└─") == 3  # scratch branches are not drawn


def test_tree_of_thought_follows_the_best_first_and_goes_back_where_it_must() -> None:
    visited: list[str] = []

    def solved(branch: Any) -> bool:
        visited.append(branch.text())
        return branch.text() == " 1 2"

    s = ab.state(backend=ScriptedBackend(digits))
    assert ab.tree_of_thought(s, STEP, total, branching=3, depth=2, solved=solved)
    assert s.text() == " 1 2"
    assert visited == ["", " 2", " 2 2", " 2 1", " 2 0", " 1", " 1 2"]
    t = ab.state(backend=ScriptedBackend(digits))
    assert not ab.tree_of_thought(t, STEP, total, branching=3, depth=2, threshold=1.5)
    assert t.text() == " 2 2" and t._program.backend.open_branches() == 1
    already = ab.state(backend=ScriptedBackend(digits))
    assert (
        ab.tree_of_thought(already, STEP, total, branching=2, depth=2, solved=lambda b: True) and already.text() == ""
    )


def test_mcts_visits_the_rewarding_branch_most_and_keeps_counts_exact(s: Any) -> None:
    root = ab.mcts(s, STEP, total, iterations=40, branching=3, depth=2, exploration=1.0)
    assert s.text() == "go: 2 2" and root.visits == 40
    for node in root.walk():
        if node.children:
            children = sum(c.visits for c in node.children)
            assert node.visits - 1 <= children <= node.visits
    best = max(root.children, key=lambda c: c.visits)
    assert best.visits > root.visits / 3 and best.value >= max(c.value for c in root.children) - 1e-9
    assert s._program.backend.open_branches() == 1


def test_mcts_rolls_out_on_a_branch_that_leaves_no_trace() -> None:
    s = ab.state(backend=ScriptedBackend(digits))
    ab.mcts(s, STEP, total, iterations=6, branching=2, depth=1, rollout=" roll" + ab.gen("r"))
    assert s.text() in (" 0", " 1") and "r" not in s


def test_subtasks_are_appended_in_order_and_a_debate_goes_in_rounds() -> None:
    backend = ScriptedBackend(lambda p: f"<{p.path[-1] if p.path else 'end'}>")
    s = ab.state(backend=backend)
    s += "Q"
    ab.branch_solve_merge(s, ["a" + ab.gen("a"), lambda b: b.__iadd__("b")], "M" + ab.gen("m"))
    assert s.text() == "Qa<0>bM<end>"
    t = ab.state(backend=ScriptedBackend(lambda p: "!"))
    ab.debate(t, [" A" + ab.gen("a"), " B" + ab.gen("b")], " judge", rounds=2)
    assert t.text() == " A! B! A! B! judge" and t._program.backend.open_branches() == 1
