"""A branch as the tokenizer process knows it: its tokens, the text that waits to become tokens, and its operations.

Tokens are kept as a chain of immutable runs, so that a fork shares them and costs the same at any length. Ids travel and rest
packed (`messages.ints`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.messages import Error, Span, as_ints, ints
from anabranch.runtime.tokenizer.turns import ChatTurns
from anabranch.runtime.tokenizer.vocabulary import Part, Vocabulary

if TYPE_CHECKING:
    from anabranch.runtime.tokenizer.requests import Operation

Origin = Literal["cached", "computed", "generated", "forced", "pending"]
MAX_MARKS = 65_536
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, stop) of a branch, all of one origin; `before` is the run that ends where this one starts."""

    before: Run | None
    start: int
    ids: bytes
    origin: Origin
    op: int | None

    @property
    def stop(self) -> int:
        return self.start + len(self.ids) // ID_BYTES


class TokenLog:
    """The tokens that the scheduler knows a branch to have. Copying it is O(1)."""

    __slots__ = ("_tail",)

    def __init__(self, tail: Run | None = None) -> None:
        self._tail = tail

    def __len__(self) -> int:
        return self._tail.stop if self._tail is not None else 0

    def copy(self) -> TokenLog:
        return TokenLog(self._tail)

    def append(self, ids: bytes, origin: Origin, op: int | None) -> None:
        if ids:
            self._tail = Run(self._tail, len(self), ids, origin, op)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        run = self._tail
        while run is not None and run.start >= length:
            run = run.before
        if run is not None and run.stop > length:
            run = Run(run.before, run.start, run.ids[: (length - run.start) * ID_BYTES], run.origin, run.op)
        self._tail = run

    def since(self, start: int) -> bytes:
        """The ids from a position on."""
        parts = []
        for run in self._backwards():
            if run.stop <= start:
                break
            parts.append(run.ids[max(0, start - run.start) * ID_BYTES :])
        return b"".join(reversed(parts))

    def spans(self) -> list[Span]:
        """Where the tokens came from, neighbours of one origin and operation joined."""
        spans: list[Span] = []
        for run in reversed(list(self._backwards())):
            last = spans[-1] if spans else None
            if last is not None and (last.origin, last.op) == (run.origin, run.op):
                spans[-1] = Span(last.start, run.stop, run.origin, run.op)
            else:
                spans.append(Span(run.start, run.stop, run.origin, run.op))
        return spans

    def _backwards(self) -> Iterator[Run]:
        run = self._tail
        while run is not None:
            yield run
            run = run.before


@dataclass(frozen=True, slots=True)
class Place:
    """A marked end of a branch: its length, and where it was in its conversation."""

    length: int
    turns: ChatTurns | None


@dataclass(eq=False, slots=True)
class Program:
    """A client's label for branches that belong together, and the id minted for it."""

    client: int
    label: int
    program_id: int
    num_branches: int = 0


@dataclass(eq=False, slots=True)
class Branch:
    """One branch of one client.

    log      tokens that the scheduler has
    inherited   how many of them came with the fork that made the branch
    ready    ids that go with the next request
    pieces   text that is tokenized when it is needed, and ids in between
    holds    operations of other branches that still need this one
    """

    client: int
    label: int
    branch_id: int
    program: Program
    namespace: bytes
    seed: int
    priority: int
    turns: ChatTurns | None
    log: TokenLog = field(default_factory=TokenLog)
    inherited: int = 0
    ready: bytes = b""
    pieces: list[Part | bytes] = field(default_factory=list)
    pieces_bytes: int = 0  # of the texts among them
    pieces_ids: int = 0  # how many ids stand in between
    marks: dict[int, Place] = field(default_factory=dict)
    queue: deque[Operation] = field(default_factory=deque)
    failed: Error | None = None
    is_born: bool = True  # False until the fork that makes it has been carried out
    parent: Branch | None = None  # until then
    is_closing: bool = False  # its handle is gone; it ends with the last operation that others need
    is_closed: bool = False
    holds: int = 0
    superseded: bool = False

    @property
    def length(self) -> int:
        """Tokens, without the text that is still pending."""
        return len(self.log) + len(self.ready) // ID_BYTES

    @property
    def is_empty(self) -> bool:
        return not self.length and not self.pieces

    def add_text(self, text: str, *, control: bool = False) -> None:
        if text:
            self.pieces.append(Part(text, control))
            self.pieces_bytes += len(text)  # at least; the check that counts bytes is made where text comes in

    def add_ids(self, ids: bytes) -> None:
        if ids:
            self.pieces.append(ids)
            self.pieces_ids += len(ids) // ID_BYTES

    def last_ids(self, count: int) -> tuple[int, ...]:
        """The last known ids, for what depends on what stands before."""
        if len(self.ready) >= count * ID_BYTES:
            return tuple(as_ints(self.ready[-count * ID_BYTES :]).tolist())
        missing = count - len(self.ready) // ID_BYTES
        ids = self.log.since(max(0, len(self.log) - missing)) + self.ready
        return tuple(as_ints(ids).tolist())

    def cut(self, place: Place) -> bool:
        """Back to a place. True if the scheduler's part of the branch is cut, too."""
        self.pieces.clear()
        self.pieces_bytes = self.pieces_ids = 0
        self.turns = place.turns.copy() if place.turns is not None else None
        self.marks = {mark: at for mark, at in self.marks.items() if at.length <= place.length}
        keep = place.length - len(self.log)
        self.ready = self.ready[: max(0, keep) * ID_BYTES]
        if keep < 0:
            self.log.cut(place.length)
            self.inherited = min(self.inherited, place.length)
        return keep < 0

    def mark(self, mark: int) -> None:
        assert not self.pieces, "a mark stands between tokens: seal the branch first"
        if len(self.marks) >= MAX_MARKS:
            raise InvalidRequest(f"the branch has {MAX_MARKS} marks already; roll back, or open another branch")
        self.marks[mark] = Place(self.length, self.turns.copy() if self.turns is not None else None)

    def inherit(self, parent: Branch) -> None:
        """Become a copy of the parent: its tokens, marks, place in the conversation, and failure."""
        self.log, self.ready = parent.log.copy(), parent.ready
        self.inherited = len(self.log)
        self.pieces, self.pieces_bytes, self.pieces_ids = list(parent.pieces), parent.pieces_bytes, parent.pieces_ids
        self.marks = dict(parent.marks)
        self.turns = parent.turns.copy() if parent.turns is not None else None
        self.failed = parent.failed


def encode_pieces(
    vocabulary: Vocabulary, pieces: list[Part | bytes], *, at_start: bool, previous: int | None
) -> bytes:
    """Ids of text and ids in order; neighbouring text is tokenized as one. Pure, so it may run on another thread."""
    encoded: list[bytes] = []
    texts: list[Part] = []

    def flush() -> None:
        nonlocal at_start, previous
        if texts:
            ids = vocabulary.encode(texts, at_start=at_start, previous=previous)
            texts.clear()
            add(ints(ids))

    def add(ids: bytes) -> None:
        nonlocal at_start, previous
        if ids:
            encoded.append(ids)
            at_start, previous = False, int(as_ints(ids[-ID_BYTES:])[0])

    for piece in pieces:
        if isinstance(piece, Part):
            texts.append(piece)
        else:
            flush()
            add(piece)
    flush()
    return b"".join(encoded)

