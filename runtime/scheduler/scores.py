"""Scoring choices: one row of a forward over the trie of all of them, and its results mapped back.

A node of the trie is a token whose *children's* logprobs are wanted, so the last token of a choice needs no node. What
choices have in common is computed once. A trie that would fill more than its share of a step is cut into groups of
neighbouring choices, each a row of its own in a later step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from anabranch.runtime.messages import ScoreTree, ints


@dataclass(slots=True)
class Trie:
    """Part of the trie: parents[i] < i is a node's parent, -1 the prompt; targets are (node or -1, token id)."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    target_nodes: list[int] = field(default_factory=list)
    target_token_ids: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)  # choice -> target of each of its tokens

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def message(self, row: int) -> ScoreTree:
        return ScoreTree(
            row=row,
            parents=ints(self.parents),
            target_nodes=ints(self.target_nodes),
            target_token_ids=ints(self.target_token_ids),
        )


class _Builder:
    """Adds choices in lexicographic order, so that what they share is on the path of the one before."""

    def __init__(self) -> None:
        self.trie = Trie()
        self._path: list[tuple[int, int]] = []  # (token, node or -1 if there is none yet) of the choice before
        self._targets: list[int] = []  # of the same choice

    def num_new_nodes(self, choice: tuple[int, ...]) -> int:
        shared = self._num_shared(choice)
        last_is_node = bool(self._path) and shared == len(self._path) and self._path[-1][1] < 0
        return max(0, len(choice) - 1 - shared) + (1 if last_is_node and shared < len(choice) else 0)

    def add(self, index: int, choice: tuple[int, ...]) -> None:
        shared = self._num_shared(choice)
        del self._path[shared:], self._targets[shared:]
        for token in choice[shared:]:
            parent = self._node_of_last()
            self.trie.target_nodes.append(parent)
            self.trie.target_token_ids.append(token)
            self._targets.append(len(self.trie.target_nodes) - 1)
            self._path.append((token, -1))
        self.trie.places[index] = list(self._targets)

    def _num_shared(self, choice: tuple[int, ...]) -> int:
        shared = 0
        for (token, _), wanted in zip(self._path, choice):
            if token != wanted:
                break
            shared += 1
        return shared

    def _node_of_last(self) -> int:
        """The node of the path's last token, made when something hangs below it for the first time."""
        if not self._path:
            return -1
        token, node = self._path[-1]
        if node < 0:
            parent = self._path[-2][1] if len(self._path) > 1 else -1
            node = len(self.trie.token_ids)
            self.trie.token_ids.append(token)
            self.trie.parents.append(parent)
            self._path[-1] = (token, node)
        return node


def build_tries(choices: list[tuple[int, ...]], max_nodes: int) -> list[Trie]:
    """The trie of the choices, cut into groups of at most `max_nodes` nodes (one choice alone may have more)."""
    builders: list[_Builder] = []
    for index in sorted(range(len(choices)), key=lambda i: choices[i]):
        choice = choices[index]
        if not builders or builders[-1].trie.num_nodes + builders[-1].num_new_nodes(choice) > max_nodes:
            builders.append(_Builder())
        builders[-1].add(index, choice)
    return [builder.trie for builder in builders]


class ScoreTask:
    """The choices of one request, the tries still to be computed, and what is known so far."""

    def __init__(self, choices: list[tuple[int, ...]], max_nodes: int) -> None:
        self.choices = choices
        self.tries = build_tries(choices, max_nodes)
        self.num_done = 0
        self._logprobs: list[tuple[float, ...]] = [()] * len(choices)
        self._is_greedy: list[tuple[bool, ...]] = [()] * len(choices)

    @property
    def trie(self) -> Trie:
        """The next one to compute."""
        return self.tries[self.num_done]

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.tries)

    @property
    def is_last(self) -> bool:
        return self.num_done == len(self.tries) - 1

    def take(self, logprobs: bytes, is_greedy: bytes) -> None:
        """The worker's answer for the present trie: f32 and 0 | 1 for each target."""
        trie = self.trie
        values = np.frombuffer(logprobs, "<f4").tolist()
        greedy = np.frombuffer(is_greedy, np.uint8) if len(is_greedy) == len(values) else np.frombuffer(is_greedy, "<i4")
        assert len(values) == len(trie.target_nodes) == len(greedy), f"{len(values)} scores, {len(trie.target_nodes)} targets"
        for index, places in trie.places.items():
            self._logprobs[index] = tuple(values[place] for place in places)
            self._is_greedy[index] = tuple(bool(greedy[place]) for place in places)
        self.num_done += 1

    def result(self) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[bool, ...], ...]]:
        return tuple(self._logprobs), tuple(self._is_greedy)
