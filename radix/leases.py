"""Leases: an idle branch keeps its path for a while, within a budget.

A lease is a promise with three ends: its time, the branch coming back, and the budget. When the budget is used up, or
running work needs the pages, the oldest lease is demoted: its path becomes ordinary cached KV. Nothing is pinned for
ever.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from anabranch.radix.branch import Branch
from anabranch.radix.nodes import NONE
from anabranch.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class Lease:
    """The path to `node` is protected until `until`; None means until another end comes."""

    serial: int
    node: int
    until: float | None


class Leases:
    """All leases of one tree, oldest first."""

    __slots__ = ("_by_branch", "_ends", "_owners", "_serial", "_tree", "budget", "num_demoted")

    def __init__(self, tree: RadixTree, budget: int) -> None:
        self._tree = tree
        self.budget = budget  # pages
        self.num_demoted = 0
        self._by_branch: dict[Branch, Lease] = {}
        self._owners: dict[int, Branch] = {}  # by serial, in the order of granting
        self._ends: list[tuple[float, int]] = []  # a heap of (until, serial); serials that are gone are skipped
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_branch)

    def __contains__(self, branch: Branch) -> bool:
        return branch in self._by_branch

    def nodes(self) -> list[int]:
        """The node of each lease."""
        return [lease.node for lease in self._by_branch.values()]

    def grant(self, branch: Branch, node: int, until: float | None) -> bool:
        """Protect the path to `node` for an idle branch; False if that path alone is over the budget.

        A lease that the branch has already is replaced in any case.

        Cost     O(nodes on the path)
        """
        self.end(branch)
        if self._path_pages(node) > self.budget:
            return False
        self._serial += 1
        self._by_branch[branch] = Lease(self._serial, node, until)
        self._owners[self._serial] = branch
        self._tree.lease(node)
        if until is not None:
            heapq.heappush(self._ends, (until, self._serial))
        while self._tree.num_leased > self.budget:
            self.demote_oldest()
        return True

    def end(self, branch: Branch) -> None:
        """The branch came back or is gone; nothing happens if it has no lease."""
        lease = self._by_branch.pop(branch, None)
        if lease is not None:
            del self._owners[lease.serial]
            self._tree.unlease(lease.node)

    def demote_oldest(self) -> None:
        """Make the path of the lease that was granted first ordinary cached KV."""
        self.num_demoted += 1
        self.end(next(iter(self._owners.values())))

    def move(self, old: Branch, new: Branch) -> None:
        """`new` takes over the lease of `old`, and loses its own."""
        self.end(new)
        lease = self._by_branch.pop(old, None)
        if lease is not None:
            self._by_branch[new] = lease
            self._owners[lease.serial] = new

    def expire(self, now: float) -> None:
        """End every lease whose time has come."""
        while self._ends and self._ends[0][0] <= now:
            _, serial = heapq.heappop(self._ends)
            if serial in self._owners:
                self.end(self._owners[serial])
        if len(self._ends) > 64 + 2 * len(self._owners):  # mostly leases that ended before their time
            self._ends = [(until, serial) for until, serial in self._ends if serial in self._owners]
            heapq.heapify(self._ends)

    def _path_pages(self, node: int) -> int:
        pages, parents = 0, self._tree.nodes.parent
        while node != NONE:
            pages += self._tree.num_own_pages(node)
            node = parents[node]
        return pages
