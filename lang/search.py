"""Search over branches, as small functions over the language. Read them, copy them, change them.

A `step` is what to do on a branch: an expression, or a function of the branch. A `score` says how good a branch is: a
variable's name (the mean logprob of its tokens), a `Judge` (the model's own opinion), or a function of the branch. All
branches of a level are sent before the first is read, so they run together; every token is computed once; what loses
leaves the cache at once.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.lang.choices import likelihood
from anabranch.lang.ir import Expr
from anabranch.lang.primitives import select
from anabranch.lang.state import State

Step = Expr | str | Callable[[State], Any]


@dataclass(frozen=True, slots=True)
class Judge:
    """The model's own opinion of a branch: how likely it finds `good` rather than `bad` after `question`, from 0 to 1.

    `question` is asked on a scratch fork of each branch, all at once, and leaves no trace.
    """

    question: "Step"
    good: str = "Yes"
    bad: str = "No"

    def ask(self, branch: State) -> State:
        scratch = branch.fork(1)[0]
        scratch._record.is_scratch = True
        take(scratch, self.question)
        scratch += select("verdict", [self.good, self.bad], choices_method=likelihood)
        return scratch

    def read(self, scratch: State) -> float:
        good, bad = scratch.get_meta_info("verdict")["scores"]
        scratch.drop()
        return 1 / (1 + math.exp(bad - good))


Score = str | Judge | Callable[[State], float]


def take(branch: State, step: Step) -> State:
    """Do one step on a branch."""
    if isinstance(step, Expr | str):
        branch += step
    else:
        step(branch)
    return branch


def rate(branches: Sequence[State], score: Score) -> list[float]:
    """The score of each branch. Judges are all asked before the first answer is read."""
    if isinstance(score, str):
        return [b.logprob(score, mean=True) for b in branches]
    if isinstance(score, Judge):
        scratches = [score.ask(b) for b in branches]
        return [score.read(scratch) for scratch in scratches]
    return [float(score(b)) for b in branches]


def ranked(branches: Sequence[State], score: Score) -> list[tuple[float, State]]:
    """(score, branch), best first; among equals in the order of the branches. Scores show in `tree()`."""
    pairs = list(zip(rate(branches, score), branches, strict=True))
    for value, branch in pairs:
        branch.annotate(f"{value:.3g}")
    return sorted(pairs, key=lambda pair: -pair[0])


def grow(branches: Sequence[State], step: Step, width: int) -> list[State]:
    """`width` children of each branch, each one step further. Nothing is waited for."""
    return [take(child, step) for branch in branches for child in branch.fork(width)]


# ---------------------------------------------------------------- one level


def best_of_n(s: State, step: Step, n: int, score: Score) -> State:
    """Take `step` n times side by side; `s` becomes the one with the highest score."""
    return s.join(ranked(grow([s], step, n), score)[0][1])


@dataclass(frozen=True, slots=True)
class Vote:
    """`answer` won with `counts[answer]` of the votes."""

    answer: Any
    counts: dict[Any, int]

    @property
    def share(self) -> float:
        return self.counts[self.answer] / sum(self.counts.values())


def self_consistency(
    s: State, step: Step, name: str, n: int, *, normal: Callable[[Any], Any] = lambda value: value
) -> Vote:
    """Take `step` n times, vote over variable `name` (made comparable by `normal`); `s` becomes the likeliest of the
    majority, or its first where no logprobs were asked for (under a constraint they are not by default).
    """
    branches = grow([s], step, n)
    answers = [normal(b[name]) for b in branches]
    counts = Counter(answers)
    answer = max(counts, key=lambda a: (counts[a], -answers.index(a)))
    voters = [b for b, a in zip(branches, answers, strict=True) if a == answer]
    has_logprobs = all("output_token_logprobs" in b.get_meta_info(name) for b in voters)
    s.join(max(voters, key=lambda b: b.logprob(name, mean=True)) if has_logprobs else voters[0])
    return Vote(answer, dict(counts))


def speculate(s: State, step: Step, check: Callable[[State], bool], *, tries: int = 1) -> bool:
    """Try `step`; where `check` says no, roll back as if it had not been, up to `tries` times. Whether one was kept."""
    mark = s.mark()
    for _ in range(tries):
        if check(take(s, step)):
            return True
        s.rollback(mark)
    return False


def branch_solve_merge(s: State, subtasks: Sequence[Step], merge: Step) -> State:
    """Do every subtask on a branch of its own, append what each wrote to `s` in order (token by token), and `merge`."""
    group = s.fork(len(subtasks))
    for branch, subtask in zip(group, subtasks, strict=True):
        take(branch, subtask)
    group.join("concate_and_append")
    return take(s, merge)


def debate(s: State, speakers: Sequence[Step], judge: Step, *, rounds: int = 1) -> State:
    """In each round every speaker speaks without hearing the others of that round; all then hear everything; `judge`
    ends it.
    """
    for _ in range(rounds):
        branch_solve_merge(s, speakers, "")
    return take(s, judge)


# ---------------------------------------------------------------- several levels


def beam(
    s: State, step: Step, score: Score, *, width: int, branching: int, depth: int,
    done: Callable[[State], bool] = lambda branch: False,
    on_level: Callable[[int, list[tuple[float, State]]], None] | None = None,
) -> State:  # fmt: skip
    """Level by level: `branching` children of each kept branch, of which the best `width` are kept. `s` becomes the
    best.

    A branch for which `done` holds stays in the beam as it is. `on_level(level, pairs)` sees each level, best first, as
    (score, branch), before the losers among them are dropped.
    """
    kept: list[tuple[float, State]] = []
    frontier = [s]
    for level in range(depth):
        finished = [(value, b) for value, b in kept if done(b)]
        pairs = sorted([*finished, *ranked(grow(frontier, step, branching), score)], key=lambda pair: -pair[0])
        if on_level is not None:
            on_level(level, pairs)
        kept = pairs[:width]
        for _, loser in pairs[width:]:
            loser.drop()
        frontier = [b for _, b in kept if not done(b)]
        if not frontier:
            break
    return s.join(kept[0][1])


def tree_of_thought(
    s: State, step: Step, score: Score, *, branching: int, depth: int, threshold: float = -math.inf,
    solved: Callable[[State], bool] = lambda branch: False,
) -> bool:  # fmt: skip
    """Depth first, best child first; children below `threshold` are not followed. Backtracks; whether a solution was
    found.

    `s` becomes the first branch that is `solved`, or else the best of the deepest that were reached.
    """
    best: tuple[int, float, State] | None = None

    def explore(branch: State, level: int) -> State | None:
        nonlocal best
        if solved(branch):
            return branch
        if level == depth:
            return None
        for value, child in ranked(grow([branch], step, branching), score):
            if best is None or (level + 1, value) > best[:2]:
                best = (level + 1, value, child)
            if value >= threshold and (found := explore(child, level + 1)) is not None:
                return found
        return None

    found = explore(s, 0)
    if found is not s and (chosen := found or (best and best[2])):
        s.join(chosen)
    return found is not None


@dataclass(slots=True, eq=False)
class Node:
    """A node of Monte-Carlo tree search. `value` is the mean reward of the rollouts through it."""

    state: State
    depth: int
    visits: int = 0
    reward: float = 0.0
    children: "list[Node]" = field(default_factory=list)

    @property
    def value(self) -> float:
        return self.reward / self.visits if self.visits else 0.0

    def best_child(self, exploration: float) -> "Node":
        """By upper confidence bound; the first of equals. A child that was never visited comes first."""
        return max(self.children, key=lambda c: c._bound(self.visits, exploration))

    def _bound(self, parent_visits: int, exploration: float) -> float:
        if not self.visits:
            return math.inf
        return self.value + exploration * math.sqrt(math.log(parent_visits) / self.visits)

    def walk(self) -> "Iterator[Node]":
        yield self
        for child in self.children:
            yield from child.walk()


def mcts(
    s: State, step: Step, reward: Score, *, iterations: int, branching: int, depth: int, exploration: float = 1.4,
    rollout: Step | None = None,
) -> Node:  # fmt: skip
    """Monte-Carlo tree search: select by confidence bound, expand by `branching` steps, roll out, back up the reward.

    The reward of a node is `reward` of a branch of it on which `rollout` was done (without `rollout`: of the node
    itself). `s` becomes the path of most visited children. Returns the root, for looking at the tree; its states are
    closed.
    """
    root = Node(s, 0)
    for _ in range(iterations):
        path = [root]
        while path[-1].children:
            path.append(path[-1].best_child(exploration))
        leaf = path[-1]
        if leaf.depth < depth and (leaf.visits or leaf is root):
            leaf.children = [Node(c, leaf.depth + 1) for c in grow([leaf.state], step, branching)]
            path.append(leaf.children[0])
        gained = _roll_out(path[-1].state, rollout, reward)
        for node in path:
            node.visits += 1
            node.reward += gained
    best = root
    while best.children:
        best = max(best.children, key=lambda c: c.visits)
    if best is not root:
        s.join(best.state)
    return root


def _roll_out(branch: State, rollout: Step | None, reward: Score) -> float:
    if rollout is None:
        return rate([branch], reward)[0]
    group = branch.fork(1)
    try:
        return rate([take(group[0], rollout)], reward)[0]
    finally:
        group.drop()
