"""One operation of a branch: its record, from the moment it is asked for to its one answer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from anabranch.runtime.messages import (
    Append,
    Close,
    Error,
    Explain,
    Fork,
    Generate,
    GetTokens,
    Join,
    Lease,
    Mark,
    Prefill,
    Rollback,
    Score,
)
from anabranch.runtime.tokenizer.branches import Branch
from anabranch.runtime.tokenizer.events import Assembler

Steps = Generator[None, None, None]


@dataclass(eq=False, slots=True)
class Barrier:
    """Stands in the queue of a branch that a join of another branch needs: what was asked of it before comes first."""

    join: Operation


Body = Append | Generate | Prefill | Score | Fork | Mark | Rollback | Join | Lease | Explain | GetTokens | Close | Barrier


@dataclass(eq=False, slots=True)
class Operation:
    """`steps` runs as a generator: it yields while something that it asked for (`outstanding`) has no result yet.

    body         the message that asked for it
    op           the client's label; None where there is nothing to answer
    outstanding  ids of jobs, requests and queries without a result; `results` has those that came
    requests     those of `outstanding` that the scheduler runs
    needs        joins: branches whose barriers have not been reached; barriers: the branch whose join they wait for
    barriers     joins: the barriers
    children     forks: the branches to be born
    doom         why it will not run; the client has been told, and the branch fails when its turn comes
    """

    branch: Branch
    body: Body
    op: int | None = None
    deadline: float | None = None
    steps: Steps | None = None
    outstanding: set[int] = field(default_factory=set)
    requests: set[int] = field(default_factory=set)
    results: dict[int, Any] = field(default_factory=dict)
    assembler: Assembler | None = None
    needs: set[Branch] = field(default_factory=set)
    barriers: list[Operation] = field(default_factory=list)
    sources: tuple[Branch, ...] = ()
    winner: Branch | None = None
    dropped: tuple[Branch, ...] = ()
    children: tuple[Branch, ...] = ()
    problem: Error | None = None  # found when it was asked for; raised when its turn comes
    doom: Error | None = None
    is_running: bool = False
    is_cancelled: bool = False
    is_done: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether branches other than its own depend on it."""
        return isinstance(self.body, Barrier) or any(not child.is_closed for child in self.children)

    @property
    def is_waiting(self) -> bool:
        return bool(self.outstanding or self.needs)
