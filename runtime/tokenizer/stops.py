"""Where a text stops: stop strings and patterns over text that arrives in pieces, in linear time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.runtime.tokenizer.stop_regex import StopRegex


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Characters [begin, end) of the whole text are the stop. `stop` is the string, or the source of the pattern."""

    stop: str
    begin: int
    end: int


class StopStrings:
    """Aho-Corasick automaton over stop strings: the same for every request that has them.

    The first stop to be complete wins; of those complete at the same character, the one that begins first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self.stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._longest: list[str | None] = [None]  # the longest stop that ends in this state
        self._depth = [0]  # characters that this state remembers: what must be held back
        for stop in self.stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._longest.append(None)
                self._depth.append(self._depth[state] + 1)
            state = self._next[state][character]
        self._longest[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                queue.append(child)
                fallback = self._fallback[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(character, 0)
                self._longest[child] = self._longest[child] or self._longest[self._fallback[child]]

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def complete(self, state: int) -> str | None:
        """The longest stop that ends here."""
        return self._longest[state]

    def depth(self, state: int) -> int:
        """How many of the last characters may still become a stop."""
        return self._depth[state]


class StopMatcher:
    """One text as it arrives. `push` returns what can no longer be part of a stop, and the match that ends the text.

    `keep_stop` leaves the stop itself in the text. After a match nothing more is read.
    """

    def __init__(self, strings: StopStrings, regexes: Sequence[StopRegex] = (), *, keep_stop: bool = False) -> None:
        self._strings = strings
        self._state = 0
        self._regexes = [regex.search() for regex in regexes]
        self._keep_stop = keep_stop
        self._held = ""  # text that is not emitted yet
        self._emitted = 0  # characters before it
        self.match: StopMatch | None = None

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """Text that is settled, and the match if the text stops in this piece. Cost linear in the piece."""
        if self.match is not None:
            return "", self.match
        begin = self._emitted + len(self._held)
        self._held += text
        self.match = self._find(text, begin)
        if self.match is not None:
            return self._cut(self.match), self.match
        keep = max([self._strings.depth(self._state), *(regex.pending(begin + len(text)) for regex in self._regexes)])
        return self._release(len(self._held) - keep), None

    def finish(self) -> tuple[str, StopMatch | None]:
        """The text ended: what was held back is settled, unless a pattern that could have grown is complete."""
        if self.match is not None:
            return "", self.match
        found = [match for regex in self._regexes if (match := regex.at_end()) is not None]
        if found:
            stop, begin, end = min(found, key=lambda match: match[1])
            self.match = StopMatch(stop, begin, end)
            return self._cut(self.match), self.match
        return self._release(len(self._held)), None

    def _find(self, text: str, begin: int) -> StopMatch | None:
        if not self._strings.stops and not self._regexes:
            return None
        for at, character in enumerate(text, begin):
            self._state = self._strings.step(self._state, character)
            stop = self._strings.complete(self._state)
            if stop is not None:
                return StopMatch(stop, at + 1 - len(stop), at + 1)
            for regex in self._regexes:
                found = regex.step(character)
                if found is not None:
                    return StopMatch(*found)
        return None

    def _cut(self, match: StopMatch) -> str:
        end = match.end if self._keep_stop else match.begin
        return self._release(end - self._emitted)

    def _release(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._emitted += len(text)
        return text
