"""Which cached page goes first: the order of the leaves, and the policies that set it.

The order is a handful of linked lists, one per *class* of leaf, each in order of use. A touch moves a node to the end
of its class; the victim is the least of the heads. So every operation costs the same however many leaves there are,
and nothing is ever sorted or scanned.

Inner and protected nodes may stand in a list too. They are skipped for good when they reach the head, which is
paid for by the touch that put them there; a parent that becomes a leaf while it stands in a list keeps the place
that its own last use earned, and one that does not was last used before everything that does: it goes to the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from anabranch.radix.nodes import NONE, Nodes

SUPERSEDED = 0  # the class that always goes first


class EvictionPolicy(Protocol):
    """Ranks leaves. Classes run from 1 to `num_classes - 1`; class 0 holds what is superseded and goes first."""

    num_classes: int

    def rank(self, depth: int, idle: int, uses: int) -> int:
        """The class of a leaf that is being put in order.

        depth    path position of its end, in tokens
        idle     open branches that ended here and may come back
        uses     how often it was used, up to 255
        """
        ...

    def worth(self, queue_class: int) -> float:
        """How much the clock must advance before a leaf of this class goes ahead of a new one of worth 0."""
        ...

    def keeps(self, uses: int) -> bool:
        """Whether a parent whose last child was evicted is ranked anew rather than being next."""
        ...


class LRU:
    """Least recently used first."""

    num_classes = 2

    def rank(self, depth: int, idle: int, uses: int) -> int:
        return 1

    def worth(self, queue_class: int) -> float:
        return 1.0

    def keeps(self, uses: int) -> bool:
        return False


class CostAware:
    """Least recompute cost times expected reuse first, with ageing.

    GreedyDual: each leaf gets the clock plus its worth when it is used, and an eviction moves the clock to what it took.
    Worth is quantised to half powers of two so that each class is in order by itself.

    The cost of a page grows with its position, since attention to everything before it is recomputed with it;
    `linear_context` is the context length at which attention costs as much as the rest of the model. Reuse is
    expected from branches that are open and idle there, and from how often the leaf was used before.

    Source   Cao and Irani 1997 (GreedyDual-Size); Cherkasova 1998 (with frequency)
    """

    num_classes = 24

    def __init__(self, linear_context: int = 8192) -> None:
        self.linear_context = linear_context

    def rank(self, depth: int, idle: int, uses: int) -> int:
        cost = 1.0 + depth / self.linear_context
        reuse = 1.0 + 2.0 * min(idle, 16) + min(uses, 32)
        return min(1 + int(2.0 * math.log2(cost * reuse)), self.num_classes - 1)

    def worth(self, queue_class: int) -> float:
        return 2.0 ** (0.5 * (queue_class - 1))

    def keeps(self, uses: int) -> bool:
        return uses > 2


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "cost": CostAware}


class EvictionOrder:
    """The linked lists, kept in the `next` and `previous` columns of the nodes.

    Node ids 0 .. num_classes - 1 are the sentinels of the lists: allocate nothing before this object exists.
    """

    __slots__ = ("_is_ranked", "_next", "_nodes", "_previous", "clock", "policy")

    def __init__(self, nodes: Nodes, policy: EvictionPolicy) -> None:
        self._nodes = nodes
        self.policy = policy
        self.clock = 0.0
        self._is_ranked = policy.num_classes > 2  # with one class beside the superseded, its list alone is the order
        for queue_class in range(policy.num_classes):
            sentinel = nodes.alloc()
            assert sentinel == queue_class, "the sentinels must be the first nodes"
            nodes.next[sentinel] = nodes.previous[sentinel] = sentinel
        self._next = nodes.next
        self._previous = nodes.previous

    def touch(self, node: int) -> None:
        """The node was used now: to the end of its class."""
        nodes = self._nodes
        queue_class = self.policy.rank(nodes.end[node], nodes.idle[node], nodes.uses[node])
        nodes.queue_key[node] = self.clock + self.policy.worth(queue_class)
        self._link(node, queue_class, self._previous[queue_class])

    def supersede(self, node: int) -> None:
        """Nobody is expected to want the node again: before everything else."""
        self._link(node, SUPERSEDED, SUPERSEDED)

    def expose(self, node: int) -> None:
        """The node lost its last child to eviction and may be evicted itself now."""
        nodes = self._nodes
        if self._next[node] != NONE:
            return
        if self.policy.keeps(nodes.uses[node]):
            self.touch(node)
            return
        queue_class = self.policy.rank(nodes.end[node], nodes.idle[node], nodes.uses[node])
        nodes.queue_key[node] = self.clock
        self._link(node, queue_class, queue_class)

    def unlink(self, node: int) -> None:
        """Take the node out of the order, if it is in it."""
        after = self._next[node]
        if after == NONE:
            return
        before = self._previous[node]
        self._next[before] = after
        self._previous[after] = before
        self._next[node] = NONE

    def head(self) -> int | None:
        """The node to evict next, if it can be evicted at all."""
        first = self._next[SUPERSEDED]
        if first != SUPERSEDED:
            return first
        keys = self._nodes.queue_key
        best: int | None = None
        for sentinel in range(1, self.policy.num_classes):
            first = self._next[sentinel]
            if first != sentinel and (best is None or keys[first] < keys[best]):
                best = first
        return best

    def advance(self, node: int) -> None:
        """The node is being evicted: what is used from now on is newer than it."""
        nodes = self._nodes
        if self._is_ranked and nodes.queue_class[node] != SUPERSEDED:
            self.clock = max(self.clock, nodes.queue_key[node])

    def members(self) -> list[int]:
        """Every node in the order, class by class, next victim first. For checks and dumps."""
        found = []
        for sentinel in range(self.policy.num_classes):
            node = self._next[sentinel]
            while node != sentinel:
                found.append(node)
                node = self._next[node]
        return found

    def _link(self, node: int, queue_class: int, before: int) -> None:
        """Put the node behind `before`, out of wherever it was."""
        if before == node:
            before = self._previous[node]
        self.unlink(node)
        after = self._next[before]
        self._next[before] = node
        self._previous[node] = before
        self._next[node] = after
        self._previous[after] = node
        self._nodes.queue_class[node] = queue_class
