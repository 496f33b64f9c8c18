"""What each branch of a program did and cost: a tree of small records that outlives the branches themselves."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Status = Literal["open", "won", "lost", "joined", "closed", "failed"]
_ids = itertools.count(1)
PREVIEW = 72  # characters of a branch's latest text that are kept for display


@dataclass(slots=True)
class Usage:
    """What operations cost, summed. Tokens, pages and steps; see `runtime/messages.py` Usage for each."""

    operations: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0
    forced_tokens: int = 0
    copied_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    unfed_tokens: int = 0  # last tokens of generations: sampled, and computed only if something follows
    cold_tokens: int = 0  # what the branches would have computed, each on its own and without a cache

    def add(self, usage: Mapping[str, Any]) -> None:
        self.operations += 1
        self.unfed_tokens += bool(usage.get("completion_tokens"))
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + int(usage.get(name, 0) or 0))

    def merge(self, other: "Usage") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @classmethod
    def of(cls, states: "Iterable[Any]") -> "Usage":
        """What several runs have cost together: of `run_batch`, for example. Failures and saved states cost nothing."""
        total = cls()
        for state in states:
            if callable(getattr(state, "usage", None)):
                total.merge(state.usage())
        return total

    @property
    def total_computed(self) -> int:
        """Tokens that went through the model: prompts, generated ones, and what had to be computed again."""
        return self.computed_tokens + self.completion_tokens - self.unfed_tokens + self.recomputed_tokens

    @property
    def stateless_tokens(self) -> int:
        """What separate calls, each with its whole prompt and no cache, would have computed."""
        return self.prompt_tokens + self.completion_tokens - self.unfed_tokens

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def saved(self) -> float:
        """The share of the cold work that sharing avoided."""
        return max(0.0, 1 - self.total_computed / self.cold_tokens) if self.cold_tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.total_computed} tokens computed instead of {self.cold_tokens} by each branch alone "
            f"({self.saved:.0%} saved) or {self.stateless_tokens} by each call alone; "
            f"{self.hit_rate:.0%} of prompt tokens from cache, {self.copied_pages} pages copied"
        )


SUMMED = tuple(f.name for f in fields(Usage) if f.name not in ("operations", "unfed_tokens", "cold_tokens"))


class BranchRecord:
    """One branch. `path` is its place: () the root, (2, 0) the first child of the root's third fork child."""

    __slots__ = (
        "__weakref__",
        "children",
        "cold_length",
        "error",
        "fork_node",
        "id",
        "is_scratch",
        "label",
        "last_fork_op",
        "last_op",
        "length",
        "path",
        "preview",
        "running",
        "state",
        "status",
        "usage",
    )  # fmt: skip

    def __init__(self, path: tuple[int, ...] = (), label: str = "") -> None:
        self.id = next(_ids)
        self.path = path
        self.label = label
        self.status: Status = "open"
        self.children: list[BranchRecord] = []
        self.usage = Usage()
        self.length = 0  # tokens, as of the last finished operation
        self.cold_length = 0  # how many of them the model had to read
        self.last_op = 0
        self.last_fork_op = -1  # the last operation begun before the last fork; -1 if it never forked
        self.running = 0
        self.is_scratch = False  # asked and dropped within one operation: not drawn
        self.preview = ""
        self.error = ""
        self.state: weakref.ref[Any] | None = None

    def fork(self, n: int) -> "list[BranchRecord]":
        first = len(self.children)
        children = [BranchRecord((*self.path, first + i)) for i in range(n)]
        for child in children:
            child.length = self.length
        self.children.extend(children)
        self.last_fork_op = self.last_op
        return children

    def take_over(self, winner: "BranchRecord") -> None:
        """A join: this branch has the winner's tokens now. Marks the way down to it."""
        self.length = max(self.length, winner.length)
        self.cold_length = max(self.cold_length, winner.cold_length)
        record = self
        for index in winner.path[len(self.path) :]:
            record = record.children[index]
            record.status = "won"

    def shown_status(self) -> str:
        if self.status == "open" and self.state is not None and self.state() is None:
            return "dropped"
        if self.status == "open" and self.running:
            return "running"
        return self.status

    def walk(self) -> "Iterator[BranchRecord]":
        stack = [self]
        while stack:
            record = stack.pop()
            yield record
            stack.extend(reversed(record.children))

    def total(self) -> Usage:
        """This branch and everything below it."""
        total = Usage()
        for record in self.walk():
            total.merge(record.usage)
        total.cold_tokens = self.cold_tokens()
        return total

    def cold_tokens(self) -> int:
        """Tokens of every end of the tree, each computed from its first token: no sharing between branches at all.

        A branch is an end where it worked on after its last fork, or never forked. A join's winner is no end: its
        tokens are its parent's, which goes on.
        """
        tokens = 0
        for record in self.walk():
            went_on = record.last_op > record.last_fork_op
            if went_on and record.status != "won":
                tokens += record.cold_length
        return tokens
