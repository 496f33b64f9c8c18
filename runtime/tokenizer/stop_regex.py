"""Stop patterns as automata: each character costs at most one look at each state, whatever the pattern (Thompson 1968).

The syntax is Python's. What no automaton can do (back references, look-around, atomic groups) is refused. A pattern
stops the text at the first character that completes it, so laziness and greed make no difference.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from re import _constants as op  # type: ignore[attr-defined]  # Python's own parser: the syntax is exactly Python's
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from anabranch.runtime.errors import InvalidRequest

MAX_PATTERN_CHARS = 2048
MAX_STATES = 4096

CharTest = Callable[[str], bool]
Assertion = Callable[[str, str], bool]  # (character before or "", character after or "")

_CATEGORIES: dict[Any, CharTest] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    op.CATEGORY_WORD: lambda c: _is_word(c),
    op.CATEGORY_NOT_WORD: lambda c: not _is_word(c),
}


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


_ASSERTIONS: dict[Any, Assertion] = {
    op.AT_BEGINNING: lambda before, after: before == "",
    op.AT_BEGINNING_STRING: lambda before, after: before == "",
    op.AT_BEGINNING_LINE: lambda before, after: before in ("", "\n"),
    op.AT_END: lambda before, after: after == "",
    op.AT_END_STRING: lambda before, after: after == "",
    op.AT_END_LINE: lambda before, after: after in ("", "\n"),
    op.AT_BOUNDARY: lambda before, after: _is_word(before) != _is_word(after),
    op.AT_NON_BOUNDARY: lambda before, after: _is_word(before) == _is_word(after),
}


@dataclass(slots=True)
class _State:
    """Goes to `free` without a character; to `target` with one that passes `test`, or where `assertion` holds."""

    test: CharTest | None = None
    assertion: Assertion | None = None
    target: int = -1
    free: list[int] = field(default_factory=list)


class StopRegex:
    """A compiled pattern, shared by all searches for it. Raises InvalidRequest if no automaton can match it."""

    def __init__(self, pattern: str, param: str = "stop_regex") -> None:
        self.pattern, self._param = pattern, param
        if len(pattern) > MAX_PATTERN_CHARS:
            raise self._refusal(f"has {len(pattern)} characters; the limit is {MAX_PATTERN_CHARS}")
        self.states: list[_State] = []
        try:
            tree = parser.parse(pattern)
            self.start = self._state()
            self.accept = self._sequence(tree, self.start, tree.state.flags)
        except re.error as fault:
            raise self._refusal(f"is not a valid pattern: {fault}") from None
        except (RecursionError, OverflowError):
            raise self._refusal("is nested too deeply") from None
        if self.accept in self.closure({self.start: 0}, None):
            raise self._refusal("matches the empty text, so it would stop everything")

    def search(self) -> "Search":
        return Search(self)

    def closure(self, begins: dict[int, int], around: tuple[str, str] | None) -> dict[int, int]:
        """All states reachable without a character, with their smallest begins; assertions look at `around`."""
        reached: dict[int, int] = {}
        stack = sorted(begins.items(), key=lambda item: -item[1])  # the smallest begin is expanded first
        while stack:
            index, begin = stack.pop()
            if index in reached:
                continue
            reached[index] = begin
            state = self.states[index]
            stack += [(target, begin) for target in state.free]
            if state.assertion is not None and around is not None and state.assertion(*around):
                stack.append((state.target, begin))
        return reached

    # ---------------------------------------------------------------- building

    def _refusal(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param} {self.pattern[:80]!r} {problem}", param=self._param)

    def _state(self) -> int:
        if len(self.states) >= MAX_STATES:
            raise self._refusal(f"needs more than {MAX_STATES} states; use fewer or smaller repetitions")
        self.states.append(_State())
        return len(self.states) - 1

    def _sequence(self, nodes: Any, at: int, flags: int) -> int:
        for kind, value in nodes:
            at = self._node(kind, value, at, flags)
        return at

    def _node(self, kind: Any, value: Any, at: int, flags: int) -> int:
        """Add what matches one node behind state `at`; returns the state after it."""
        match kind:
            case op.LITERAL | op.NOT_LITERAL | op.ANY | op.IN:
                return self._character(_char_test(kind, value, flags), at)
            case op.AT:
                if flags & re.MULTILINE:
                    value = {op.AT_BEGINNING: op.AT_BEGINNING_LINE, op.AT_END: op.AT_END_LINE}.get(value, value)
                self.states[at].assertion, self.states[at].target = _ASSERTIONS[value], (end := self._state())
                return end
            case op.SUBPATTERN:
                _, add, drop, nodes = value
                return self._sequence(nodes, at, (flags | add) & ~drop)
            case op.BRANCH:
                end = self._state()
                for nodes in value[1]:
                    begin = self._state()
                    self.states[at].free.append(begin)
                    self.states[self._sequence(nodes, begin, flags)].free.append(end)
                return end
            case op.MAX_REPEAT | op.MIN_REPEAT:
                least, most, nodes = value
                return self._repeat(least, most, nodes, at, flags)
            case _:
                name = str(kind).lower().replace("_", " ")
                raise self._refusal(f"uses {name}, which cannot be matched in linear time and is not supported")

    def _character(self, test: CharTest, at: int) -> int:
        end = self._state()
        self.states[at].test, self.states[at].target = test, end
        return end

    def _repeat(self, least: int, most: Any, nodes: Any, at: int, flags: int) -> int:
        for _ in range(least):
            at = self._sequence(nodes, self._after(at), flags)
        if most is op.MAXREPEAT:
            loop, end = self._after(at), self._state()
            self.states[self._sequence(nodes, self._after(loop), flags)].free.append(loop)
            self.states[loop].free.append(end)
            return end
        ends = [at]
        for _ in range(most - least):
            at = self._sequence(nodes, self._after(at), flags)
            ends.append(at)
        end = self._state()
        for index in ends:
            self.states[index].free.append(end)
        return end

    def _after(self, at: int) -> int:
        """A fresh state behind `at`, so that a loop never returns into a state that others use."""
        fresh = self._state()
        self.states[at].free.append(fresh)
        return fresh


class Search:
    """A pattern looked for in one text, character by character."""

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        self._live: dict[int, int] = {}  # state -> where the text that led to it began
        self._before = ""
        self._at = 0

    def step(self, character: str) -> tuple[str, int, int] | None:
        """Read one character. (pattern, begin, end) if the pattern is complete before or after it."""
        regex = self._regex
        threads = regex.closure(
            self._live | {regex.start: self._live.get(regex.start, self._at)}, (self._before, character)
        )
        if threads.get(regex.accept, self._at) < self._at:
            return regex.pattern, threads[regex.accept], self._at
        self._at += 1
        self._before = character
        moved: dict[int, int] = {}
        for index, begin in threads.items():
            state = regex.states[index]
            if state.test is not None and state.test(character):
                moved[state.target] = min(begin, moved.get(state.target, begin))
        self._live = regex.closure(moved, None)
        found = self._live.get(regex.accept)
        return None if found is None else (regex.pattern, found, self._at)

    def pending(self, length: int) -> int:
        """How many of the last characters may still become a match."""
        return length - min(self._live.values(), default=length)

    def at_end(self) -> tuple[str, int, int] | None:
        """A match that the end of the text completes ("$")."""
        threads = self._regex.closure(self._live, (self._before, ""))
        begin = threads.get(self._regex.accept)
        return None if begin is None else (self._regex.pattern, begin, self._at)


def _char_test(kind: Any, value: Any, flags: int) -> CharTest:
    if kind is op.ANY:
        return (lambda c: True) if flags & re.DOTALL else (lambda c: c != "\n")
    items = value if kind is op.IN else [(op.LITERAL, value)]
    negated = kind is op.NOT_LITERAL or (items and items[0][0] is op.NEGATE)
    tests = [_item_test(item, argument, flags) for item, argument in items if item is not op.NEGATE]

    def test(c: str) -> bool:
        variants = {c, c.lower(), c.upper()} if flags & re.IGNORECASE else (c,)
        return any(one(variant) for one in tests for variant in variants) is not negated

    return test


def _item_test(kind: Any, value: Any, flags: int) -> CharTest:
    if kind is op.CATEGORY:
        category = _CATEGORIES[value]
        if not flags & re.ASCII:
            return category
        positive = value in (op.CATEGORY_DIGIT, op.CATEGORY_SPACE, op.CATEGORY_WORD)
        return lambda c: category(c) if c.isascii() else not positive
    low, high = (value, value) if kind is op.LITERAL else value
    return lambda c: len(c) == 1 and low <= ord(c) <= high
