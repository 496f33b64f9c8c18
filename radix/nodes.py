"""Tree nodes as columns: a node is an index, and each of its fields one entry of a flat array.

A Python object per node would cost several hundred bytes and a visit by each garbage collection. The columns cost
about seventy bytes a node and the collector sees none of them. Freed ids are reused; `generation` tells a reused id
apart.
"""

from __future__ import annotations

from array import array

NONE = -1
FIRST_CAPACITY = 64


class Nodes:
    """The columns. Everything is by node id; `alloc` gives a cleared node, `free` takes it back."""

    __slots__ = (
        "_free",
        "_used",
        "end",
        "first_page",
        "generation",
        "idle",
        "leased_children",
        "leases",
        "locked_children",
        "locks",
        "next",
        "pages",
        "parent",
        "pins",
        "previous",
        "queue_class",
        "queue_key",
        "shares_first",
        "start",
        "uses",
    )

    def __init__(self) -> None:
        self.parent = array("i")  # NONE for a root
        self.start = array("i")  # first path position of the edge; equals the parent's end
        self.end = array("i")  # one past its last
        self.first_page = array("i")
        self.pins = array("i")  # children + locks + leases; a node without any can be evicted
        self.locks = array("i")  # attached branches that end here, and copies in flight from here
        self.locked_children = array("i")  # children that are protected by locks
        self.leases = array("i")
        self.leased_children = array("i")
        self.idle = array(
            "i"
        )  # open branches that are not attached and remember the node; it may be evicted all the same
        self.generation = array("i")  # grows each time the id is freed
        self.previous = array("i")  # neighbours in the eviction order; `next` is NONE while not in it
        self.next = array("i")
        self.queue_key = array("d")
        self.queue_class = array("b")
        self.shares_first = array("b")  # 1: an ancestor holds the first page too (the edge begins inside it)
        self.uses = array("B")  # how often a branch came here or forked off here, saturating
        self.pages: list[bytes] = []  # int32 page ids of the edge, in order, if it has more than one
        self._free = array("i")
        self._used = 0  # ids below this have been handed out at least once

    def __len__(self) -> int:
        """Nodes in use."""
        return self._used - len(self._free)

    def alloc(self) -> int:
        """The id of a cleared node."""
        if self._free:
            node = self._free.pop()
            self._clear(node)
            return node
        if self._used == len(self.parent):
            self._grow()
        self._used += 1
        return self._used - 1

    def free(self, node: int) -> None:
        """Let the id be used again. Its fields are cleared when it is: whoever evicts should not wait for that memory."""
        self.generation[node] += 1
        self._free.append(node)

    def num_children(self, node: int) -> int:
        """How many edges hang at the node's end."""
        return self.pins[node] - self.locks[node] - self.leases[node]

    def ids(self) -> list[int]:
        """All nodes in use, ascending. Walks every column entry: for checks and dumps."""
        unused = set(self._free)
        return [node for node in range(self._used) if node not in unused]

    def _clear(self, node: int) -> None:
        self.parent[node] = NONE
        self.end[node] = self.start[node] = 0
        self.pins[node] = self.idle[node] = 0
        self.pages[node] = b""
        self.uses[node] = self.shares_first[node] = 0

    def _grow(self) -> None:
        capacity = len(self.parent)
        more = max(FIRST_CAPACITY, capacity // 4)
        for name in self.__slots__:
            column = getattr(self, name)
            if name in ("_free", "_used"):
                continue
            if name == "pages":
                column.extend([b""] * more)
            else:
                blank = NONE if name in ("next", "previous", "parent") else 0
                column.extend(array(column.typecode, [blank]) * more)
