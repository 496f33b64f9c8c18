"""A live sequence: its tokens, and while it runs the pages that hold its KV.

Tokens are always there. Pages are held only while the branch is *attached*; between operations everything lives in the
tree, and the branch remembers where it ended there, so that it comes back without a walk from the root.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from anabranch.radix.nodes import NONE
from anabranch.radix.tokens import TokenLog

MAX_VERSIONS = 16  # table changes remembered one by one; older ones are answered for by the least of them


class Tail(IntEnum):
    """What the page is that an attached branch would write its next KV into."""

    SHARED = 0  # the tree's: to be claimed or copied before the first write
    ALIGNED = 1  # there is none: the next position begins a page
    CLAIMED = 2  # the tree's, and this branch is its one writer, past everything that others read
    PRIVATE = 3  # the branch's own


class Branch:
    """One sequence. Made by `KVManager.open` and `fork`, and changed by the manager only.

    computed       positions below it have KV, while attached
    reserved       positions below it may be written, while attached
    table_version  grows when an entry of the page table changes that was there before, or goes away
    stable_pages   entries that no change has touched since the branch was attached; see `stable_since`
    """

    __slots__ = (
        "_pages",
        "_versions",
        "attached",
        "closed",
        "computed",
        "generation",
        "is_counted",
        "is_inside_edge",
        "log",
        "memo",
        "memo_epoch",
        "namespace",
        "node",
        "num_pages",
        "own",
        "peak",
        "position",
        "reserved",
        "stable_pages",
        "table_version",
        "tail",
    )

    def __init__(self, namespace: bytes, log: TokenLog) -> None:
        self.namespace = namespace
        self.log = log
        self.attached = False
        self.closed = False
        self.computed = 0
        self.reserved = 0
        # Where it is in the tree. Attached: it locks `node`, and its tree part ends where that node ends. Otherwise:
        # `node`, if still of this generation, agrees with the tokens up to the lesser of `position` and the node's end.
        self.node = NONE
        self.generation = 0
        self.position = 0
        self.is_counted = False  # in the `idle` column of its node
        self.memo = 0  # result of the last look-up, good while the tree is at `memo_epoch`
        self.memo_epoch = -1
        self.is_inside_edge = False  # the last look-up ended before the end of its edge
        self.peak = 0  # longest prefix that ever had KV: tells "evicted" from "never computed"
        # The page table, while attached: num_pages entries, those from `own` on held by this branch and nobody else.
        self._pages: np.ndarray | None = None
        self.num_pages = 0
        self.own = 0
        self.tail = Tail.SHARED
        self.table_version = 0
        self.stable_pages = 0
        self._versions: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.log.length

    def tokens(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Token ids [start, stop), int32, read-only. Copy what must outlive the next append or rollback."""
        length = self.log.length
        view = self.log.read(max(0, start), length if stop is None else min(stop, length)).view()
        view.flags.writeable = False
        return view

    @property
    def page_table(self) -> np.ndarray:
        """[num_pages] int32 page ids, read-only; valid until the manager changes the branch."""
        assert self._pages is not None, "a branch that is not attached has no page table"
        view = self._pages[: self.num_pages]
        view.flags.writeable = False
        return view

    def stable_since(self, version: int) -> int:
        """How many leading entries of the table are as they were at `version`: what a copy made then may keep."""
        stable = self.num_pages
        if self._versions and self._versions[0][0] > version + 1:
            stable = min(stable, self.stable_pages)
        return min([stable, *(kept for changed, kept in self._versions if changed > version)])

    # ------------------------------------------------------------ the page table, for the manager

    def begin_table(self, num_pages: int) -> np.ndarray:
        """An empty table with room for `num_pages` entries, all of them in use; the caller fills them."""
        self._pages = np.empty(num_pages + 8, np.int32)
        self.num_pages = num_pages
        self.own = num_pages
        self._versions.clear()
        self.table_version += 1
        self.stable_pages = num_pages + 2**30  # nothing has changed yet
        self._versions.append((self.table_version, 0))
        return self._pages

    def entries(self, start: int, stop: int | None = None) -> np.ndarray:
        """A view of table entries, to read or write."""
        assert self._pages is not None
        return self._pages[start : self.num_pages if stop is None else stop]

    def extend_table(self, pages: np.ndarray) -> None:
        """Add entries at the end. Amortised O(new)."""
        assert self._pages is not None
        total = self.num_pages + len(pages)
        if total > len(self._pages):
            grown = np.empty(max(total, 2 * len(self._pages)), np.int32)
            grown[: self.num_pages] = self._pages[: self.num_pages]
            self._pages = grown
        self._pages[self.num_pages : total] = pages
        self.num_pages = total

    def cut_table(self, num_pages: int) -> None:
        """Drop entries from the end; what comes in their place later is a change."""
        if num_pages < self.num_pages:
            self.num_pages = num_pages
            self.table_changed(num_pages)

    def table_changed(self, first_index: int) -> None:
        """Entries from `first_index` on are not what they were."""
        self.table_version += 1
        self.stable_pages = min(self.stable_pages, first_index)
        self._versions.append((self.table_version, first_index))
        if len(self._versions) > MAX_VERSIONS:
            del self._versions[0]

    def take_over(self, other: Branch) -> None:
        """Become what `other` is; the other is closed and empty."""
        version = max(self.table_version, other.table_version)
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))
        self.table_version = version + 1
        self.stable_pages = 0
        self._versions = [(self.table_version, 0)]
        other.log = TokenLog()
        other.node = NONE
        other.is_counted = other.attached = False
        other.closed = True
        other.end_table()

    def end_table(self) -> None:
        """The branch holds no pages any more."""
        self._pages = None
        self.num_pages = self.own = self.computed = self.reserved = 0
        self.tail = Tail.SHARED
