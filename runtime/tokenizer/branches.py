"""A branch as the tokenizer knows it: an ordered queue of operations over tokens and text that is not tokenized yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from anabranch.radix.tokens import TokenLog
from anabranch.runtime.messages import (
    Append,
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
    Span,
)
from anabranch.runtime.tokenizer.answers import Answer
from anabranch.runtime.tokenizer.turns import ChatTurns
from anabranch.runtime.tokenizer.vocabulary import Part

Operation = Append | Generate | Prefill | Score | Fork | Mark | Rollback | Join | Lease | Explain | GetTokens
Awaited = Generate | Prefill | Score | Explain | GetTokens  # the client waits for a result of its own


@dataclass(slots=True)
class Running:
    """The operation at work on a branch. `request_ids` are the scheduler's; a job off the loop has none yet."""

    op: Awaited | Fork | Append | Mark | Join
    request_ids: set[int] = field(default_factory=set)
    answer: Answer | None = None
    is_cancelled: bool = False
    prompt_len: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a mark remembers."""

    length: int
    turns: ChatTurns | None
    spans: tuple[Span, ...]


@dataclass(slots=True, eq=False)
class Branch:
    """`log` holds every token, sent or not; the last `num_unsent` of them the scheduler has not seen.

    A branch with an `error` is failed: what comes to it fails with the same first cause, until it is closed.
    """

    branch_id: int
    client: int
    label: int
    program_id: int
    program: int  # the client's label
    namespace: bytes
    seed: int
    log: TokenLog
    turns: ChatTurns | None
    num_unsent: int = 0
    pending: list[Part | tuple[int, ...]] = field(default_factory=list)
    pending_bytes: int = 0
    queue: deque[Operation] = field(default_factory=deque)
    running: Running | None = None
    marks: dict[int, Snapshot] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    error: Error | None = None
    closed: bool = False
    close_when_unpinned: bool = False
    num_pins: int = 0  # queued joins that name this branch
    waiters: list[Branch] = field(default_factory=list)  # branches whose join waits for this one to be idle
    waits_for: Branch | None = None

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.queue

    @property
    def num_sent(self) -> int:
        return self.log.length - self.num_unsent

    def last_id(self) -> int | None:
        return self.log.at(self.log.length - 1) if self.log.length else None
