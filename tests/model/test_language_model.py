"""Random programs on the scripted backend against an oracle of plain strings.

At each moment the text that a state tells, the text that the backend's branch holds, and the oracle's string are the
same; variables are what they were when their branch was forked, rolled back or joined; and no branch is open that
nobody holds.
"""

import gc
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.lang import api as ab
from anabranch.lang.testing import Prompt, ScriptedBackend

words = st.sampled_from(["", " a", " b", " c d", "x"])
names = st.sampled_from(["u", "v"])
places = st.integers(0, 9)


@dataclass
class Expected:
    """One branch in the oracle."""

    text: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    marks: list[tuple[Any, str, dict[str, str]]] = field(default_factory=list)

    def fork(self) -> "Expected":
        return Expected(self.text, dict(self.variables), list(self.marks))


def script(prompt: Prompt) -> str:
    return f" <{len(prompt.text) % 7}>" if not prompt.choices else prompt.choices[len(prompt.text) % 2]


class Pair:
    def __init__(self, state: Any, expected: Expected) -> None:
        self.state, self.expected = state, expected

    def check(self) -> None:
        assert self.state.text() == self.expected.text
        assert self.state.variables() == self.expected.variables
        assert self.state.explain().text == self.expected.text


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.backend = ScriptedBackend(script)
        self.alive: list[Pair] = []

    def pick(self, which: int) -> Pair:
        return self.alive[which % len(self.alive)]

    @initialize()
    def begin(self) -> None:
        self.alive.append(Pair(ab.state(backend=self.backend), Expected()))

    @rule(which=places, word=words)
    def add_text(self, which: int, word: str) -> None:
        pair = self.pick(which)
        pair.state += word
        pair.expected.text += word

    @rule(which=places, name=names)
    def generate(self, which: int, name: str) -> None:
        pair = self.pick(which)
        pair.state += ab.gen(name)
        made = f" <{len(pair.expected.text) % 7}>"
        pair.expected.text += made
        pair.expected.variables[name] = made

    @rule(which=places, name=names)
    def choose(self, which: int, name: str) -> None:
        pair = self.pick(which)
        pair.state += ab.select(name, [" yes", " no"])
        made = [" yes", " no"][len(pair.expected.text) % 2]
        pair.expected.text += made
        pair.expected.variables[name] = made

    @rule(which=places, name=names, value=words)
    def set_variable(self, which: int, name: str, value: str) -> None:
        pair = self.pick(which)
        pair.state[name] = value
        pair.expected.variables[name] = value

    @rule(which=places)
    def mark(self, which: int) -> None:
        pair = self.pick(which)
        pair.expected.marks.append((pair.state.mark(), pair.expected.text, dict(pair.expected.variables)))

    @rule(which=places, data=st.data())
    def roll_back(self, which: int, data: st.DataObject) -> None:
        pair = self.pick(which)
        if pair.expected.marks:
            which = data.draw(st.integers(0, len(pair.expected.marks) - 1))
            mark, text, variables = pair.expected.marks[which]
            pair.state.rollback(mark)
            pair.expected.text, pair.expected.variables = text, dict(variables)
            del pair.expected.marks[which + 1 :]

    @rule(which=places, width=st.integers(1, 3))
    def fork(self, which: int, width: int) -> None:
        pair = self.pick(which)
        self.alive += [Pair(s, pair.expected.fork()) for s in pair.state.fork(width)]

    @rule(which=places, data=st.data())
    def join_a_winner(self, which: int, data: st.DataObject) -> None:
        pair = self.pick(which)
        below = [p for p in self.alive if pair.state.is_ancestor_of(p.state) and not p.state.closed]
        if not below:
            return
        winner = data.draw(st.sampled_from(below))
        pair.state.join(winner.state)
        won = winner.expected
        pair.expected.text, pair.expected.variables, pair.expected.marks = (
            won.text,
            dict(won.variables),
            list(won.marks),
        )
        self.forget_closed()

    @rule(which=places, texts=st.lists(words, min_size=1, max_size=3), generated=st.booleans())
    def join_by_appending(self, which: int, texts: list[str], generated: bool) -> None:
        pair = self.pick(which)
        group = pair.state.fork(len(texts))
        group += list(texts)
        begun = pair.expected.text
        for i, text in enumerate(texts):
            if generated:
                group[i] += ab.gen("inner")
                text += f" <{len(begun + text) % 7}>"
            pair.expected.text += text
        group.join("concate_and_append")

    @rule(which=places, width=st.integers(1, 3))
    def join_by_gathering(self, which: int, width: int) -> None:
        pair = self.pick(which)
        group = pair.state.fork(width)
        group += ab.gen("gathered")
        group.join()
        made = [f" <{len(pair.expected.text) % 7}>"] * width
        pair.expected.variables.setdefault("gathered", made)  # type: ignore[arg-type]

    @rule(which=places)
    @precondition(lambda self: len(self.alive) > 1)
    def drop(self, which: int) -> None:
        self.alive.pop(which % len(self.alive))

    def forget_closed(self) -> None:
        self.alive = [p for p in self.alive if not p.state.closed]

    @invariant()
    def every_text_and_variable_is_as_expected(self) -> None:
        for pair in self.alive:
            pair.check()

    @invariant()
    def every_open_branch_is_held_by_a_live_state(self) -> None:
        assert self.backend.open_branches() == len(self.alive)

    def teardown(self) -> None:
        self.alive.clear()
        gc.collect()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
