"""The radix tree: tokens to pages, by token over pages.

A node is an edge: path positions [start, end) and the pages that back them. Its children are keyed by their first token,
so siblings differ in it. Token ids are compared exactly; there is no hash that stands for them.

A divergence can fall inside a page. Then two nodes on a path have an entry for the same page index, and the deeper
one's page holds the KV of the whole path inside that page: the page table of a path takes for each index the page of
the deepest node that has one. Two ways lead there: a *split* inside a page, after which both halves hold the very same
page, and a *copy on write*, after which the deeper node has its own.

```
page size 4      a b c d | e f g h | i j          one edge, 3 pages p0 p1 p2
split at 6       a b c d | e f          upper     p0 p1
                               g h | i j  lower      p1 p2        p1 is held twice
insert x y at 6                x y        child      q1           q1: the copy of p1's first half, then x y
```

A node's id names the *end* of its edge. A split gives the upper half the new id, so whoever sits at the end of a node
(a lock, a branch, a queue place) is not disturbed. An edge changes in two more ways: its unlocked tail is evicted, or
its one writer grows it, while nobody else remembers it. So what an idle branch once found in a node stays found, up to
the node's end, for as long as the node lives; branches rely on that to resume without a walk.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque

import numpy as np

from anabranch.radix.errors import LockError
from anabranch.radix.eviction import EvictionOrder, EvictionPolicy
from anabranch.radix.nodes import NONE, Nodes
from anabranch.radix.pages import PagePool
from anabranch.radix.store import TokenStore

MAX_GROWN_PAGES = 4096  # an edge with more pages is continued by a child: growing it would copy its page list
MAX_GHOSTS = 4096  # evictions remembered for `explain`

_PAGE = struct.Struct("=i")


class RadixTree:
    """Cached prefixes. Owns the nodes' references to pages; the manager owns those of attached branches."""

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.nodes = Nodes()
        self.order = EvictionOrder(self.nodes, policy)
        self.store = TokenStore(pool.num_pages, pool.page_size)
        self.roots: dict[bytes, int] = {}
        self.namespaces: dict[int, bytes] = {}
        self.children: dict[int, int] = {}  # node << 32 | first token -> child
        self.epoch = 0  # changes when a match may turn out differently
        self.num_tokens = 0  # on all edges
        self.num_pages = 0  # held by nodes
        self.num_locked = 0  # of these, protected by locks
        self.num_leased = 0  # of these, protected by leases
        self.num_leased_only = 0  # by leases and not by locks
        self.num_splits = 0
        self.num_evicted_pages = 0
        self.ghosts: deque[tuple[int, int, int]] = deque(maxlen=MAX_GHOSTS)  # (node, generation, token) once cached

    # ------------------------------------------------------------ reading

    def find_root(self, namespace: bytes) -> int | None:
        """The namespace's root, if anything is cached or attached there."""
        return self.roots.get(namespace)

    def open_root(self, namespace: bytes) -> int:
        """The namespace's root. It stays as long as it has children or a lock."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.nodes.alloc()
            self.roots[namespace] = root
            self.namespaces[root] = namespace
        return root

    def child(self, node: int, token: int) -> int | None:
        """The child whose edge begins with `token`."""
        return self.children.get(node << 32 | token)

    def num_node_pages(self, node: int) -> int:
        """Pages that the node has an entry for."""
        end = self.nodes.end[node]
        if not end:
            return 0
        return (end - 1) // self.page_size - self.nodes.start[node] // self.page_size + 1

    def num_own_pages(self, node: int) -> int:
        """Of these, the ones that no ancestor holds: what evicting the whole node frees."""
        return self.num_node_pages(node) - self.nodes.shares_first[node]

    def page_ids(self, node: int) -> np.ndarray:
        """The node's pages in order; read-only."""
        count = self.num_node_pages(node)
        if count > 1:
            return np.frombuffer(self.nodes.pages[node], np.int32, count)
        return np.array([self.nodes.first_page[node]][:count], np.int32)

    def page_of(self, node: int, position: int) -> int:
        """The node's page for a position of its edge."""
        index = position // self.page_size - self.nodes.start[node] // self.page_size
        return _PAGE.unpack_from(self.nodes.pages[node], 4 * index)[0] if index else self.nodes.first_page[node]

    def token_at(self, node: int, position: int) -> int:
        """The token at a position of the node's edge."""
        return self.store.at(self.page_of(node, position), position % self.page_size)

    def edge_tokens(self, node: int) -> np.ndarray:
        """All tokens of the node's edge."""
        start, end = self.nodes.start[node], self.nodes.end[node]
        return self.store.read(self.page_ids(node), start, end - start) if end else np.empty(0, np.int32)

    def common(self, node: int, position: int, tokens: np.ndarray) -> int:
        """How many of `tokens`, which follow `position`, agree with the rest of the node's edge."""
        nodes = self.nodes
        start = nodes.start[node]
        tokens = tokens[: nodes.end[node] - position]
        skipped = position // self.page_size - start // self.page_size
        if (position + len(tokens) - 1) // self.page_size == position // self.page_size:
            return self.store.common_in_page(self.page_of(node, position), position % self.page_size, tokens)
        pages = np.frombuffer(nodes.pages[node], np.int32, -1, 4 * skipped)
        return self.store.common(pages, position, tokens)

    def match(self, node: int, position: int, tokens: np.ndarray) -> tuple[int, int]:
        """Follow `tokens` from `position` on the edge of `node` as far as they are cached.

        Returns  (node, position): the match ends in that node, start < position <= end, or at a root
        Cost     one dictionary look-up and one vectorised comparison for each edge on the way
        """
        nodes, n, done = self.nodes, len(tokens), 0
        while done < n:
            if position == nodes.end[node]:
                child = self.children.get(node << 32 | int(tokens[done]))
                if child is None:
                    break
                node = child
            elif self.token_at(node, position) != tokens[done]:
                break
            agree = self.common(node, position, tokens[done:])
            position += agree
            done += agree
            if position < nodes.end[node]:
                break
        return node, position

    def continues(self, node: int, position: int, token: int) -> bool:
        """Whether `token` is cached after `position`, which lies on the edge of `node` or at its end."""
        if position == self.nodes.end[node]:
            return (node << 32 | token) in self.children
        return self.token_at(node, position) == token

    def ancestor_at(self, node: int, position: int) -> int:
        """The node of the path to `node` whose edge holds the token before `position`; the root for position 0."""
        nodes = self.nodes
        while position <= nodes.start[node] and nodes.parent[node] != NONE:
            node = nodes.parent[node]
        return node

    def fill_page_table(self, node: int, table: np.ndarray, first_index: int = 0) -> None:
        """Write the page table of the path to the end of `node`, from page index `first_index` to the end of `table`.

        Cost     one copy for each node of the path that has an entry there
        """
        nodes, size = self.nodes, self.page_size
        path = []
        while nodes.end[node] > first_index * size:
            path.append(node)
            node = nodes.parent[node]
        for node in reversed(path):  # so that the deepest entry for an index is written last
            index = nodes.start[node] // size
            pages = self.page_ids(node)
            begin, stop = max(first_index, index), min(index + len(pages), len(table))
            if begin < stop:
                table[begin:stop] = pages[begin - index : stop - index]

    # ------------------------------------------------------------ growing

    def split(self, node: int, at: int) -> int:
        """Cut the edge at path position `at`; returns the upper half, which gets the new id.

        Nothing is copied: a page that the cut falls into is held by both halves. Protection, and so the page counters,
        stay as they are: the halves are protected exactly as the whole was.
        """
        nodes, size = self.nodes, self.page_size
        start, parent = nodes.start[node], nodes.parent[node]
        assert start < at < nodes.end[node], f"cannot split [{start}, {nodes.end[node]}) at {at}"
        upper = nodes.alloc()
        first_token, next_token = self.token_at(node, start), self.token_at(node, at)
        pages, inside = self.page_ids(node), 1 if at % size else 0
        kept = at // size - start // size  # full pages of the upper half
        nodes.parent[upper], nodes.start[upper], nodes.end[upper] = parent, start, at
        self._set_pages(upper, pages[: kept + inside])
        nodes.shares_first[upper] = nodes.shares_first[node]
        nodes.uses[upper] = nodes.uses[node]
        nodes.pins[upper] = 1
        nodes.locked_children[upper] = 1 if self.is_locked(node) else 0
        nodes.leased_children[upper] = 1 if self.is_leased(node) else 0
        if inside:
            self.pool.retain_one(int(pages[kept]))
        nodes.parent[node], nodes.start[node] = upper, at
        self._set_pages(node, pages[kept:])
        nodes.shares_first[node] = inside
        self.children[parent << 32 | first_token] = upper
        self.children[upper << 32 | next_token] = node
        self.num_splits += 1
        return upper

    def add_child(self, parent: int, end: int, pages: np.ndarray, *, first_token: int, shares_first: bool) -> int:
        """A new leaf below the end of `parent`, up to path position `end`. The node takes over the caller's references.

        pages         int32, from the page of the parent's end on; their tokens are in the store already
        shares_first  whether an ancestor holds pages[0] too
        """
        nodes = self.nodes
        key = parent << 32 | first_token
        assert key not in self.children, f"node {parent} has a child at token {first_token} already"
        node = nodes.alloc()
        nodes.parent[node], nodes.start[node], nodes.end[node] = parent, nodes.end[parent], end
        self._set_pages(node, pages)
        nodes.shares_first[node] = shares_first
        self.children[key] = node
        nodes.pins[parent] += 1
        self.count_use(parent)
        self.num_pages += len(pages) - shares_first
        self.num_tokens += end - nodes.start[node]
        self.epoch += 1
        return node

    def can_grow(self, node: int) -> bool:
        """Whether the edge may be made longer in place by the one branch that has it locked.

        Not while an idle branch remembers it: that may remember a longer edge than there is now (see the top of this
        file), and what follows should be a node that can be dropped by itself.
        """
        nodes = self.nodes
        return (
            nodes.parent[node] != NONE
            and nodes.locks[node] == nodes.pins[node] == 1
            and not nodes.idle[node]
            and len(nodes.pages[node]) < 4 * MAX_GROWN_PAGES
        )

    def grow(self, node: int, end: int, pages: np.ndarray) -> None:
        """Make the leaf's edge longer, up to path position `end`; it takes over the caller's references to `pages`.

        pages    int32, those that the edge has no entry for yet; tokens are in the store already
        Cost     copies the edge's page list, which is at most MAX_GROWN_PAGES long
        """
        nodes = self.nodes
        self.num_tokens += end - nodes.end[node]
        if len(pages):
            self._set_pages(node, np.concatenate([self.page_ids(node), pages]))
            self.num_pages += len(pages)
            self.num_locked += len(pages)
        nodes.end[node] = end
        self.epoch += 1

    def count_use(self, node: int) -> None:
        """A branch came to the node's end, or forked off there."""
        if self.nodes.uses[node] < 255:
            self.nodes.uses[node] += 1

    # ------------------------------------------------------------ protection

    def is_locked(self, node: int) -> bool:
        """Whether a lock protects the node: its own, or that of a descendant."""
        return self.nodes.locks[node] > 0 or self.nodes.locked_children[node] > 0

    def is_leased(self, node: int) -> bool:
        """Whether a lease protects the node."""
        return self.nodes.leases[node] > 0 or self.nodes.leased_children[node] > 0

    def is_evictable(self, node: int) -> bool:
        """Whether the node is a leaf that nothing protects."""
        nodes = self.nodes
        return not nodes.pins[node] and nodes.parent[node] != NONE

    def lock(self, node: int) -> None:
        """Protect the path to the node. Walks up to the first ancestor that is protected already."""
        for changed in self._protect(self.nodes.locks, self.nodes.locked_children, node):
            pages = self.num_own_pages(changed)
            self.num_locked += pages
            if self.is_leased(changed):
                self.num_leased_only -= pages

    def unlock(self, node: int) -> None:
        """Take back one lock; the node counts as used now.

        Raises   LockError if the node is not locked
        """
        for changed in self._unprotect(self.nodes.locks, self.nodes.locked_children, node):
            pages = self.num_own_pages(changed)
            self.num_locked -= pages
            if self.is_leased(changed):
                self.num_leased_only += pages
        self._settle_order(node)

    def lease(self, node: int) -> None:
        """Protect the path to the node, counted apart from locks."""
        for changed in self._protect(self.nodes.leases, self.nodes.leased_children, node):
            pages = self.num_own_pages(changed)
            self.num_leased += pages
            if not self.is_locked(changed):
                self.num_leased_only += pages

    def unlease(self, node: int) -> None:
        """Take back one lease.

        Raises   LockError if the node is not leased
        """
        for changed in self._unprotect(self.nodes.leases, self.nodes.leased_children, node):
            pages = self.num_own_pages(changed)
            self.num_leased -= pages
            if not self.is_locked(changed):
                self.num_leased_only -= pages
        self._settle_order(node)

    def _protect(self, counts: array[int], children: array[int], node: int) -> list[int]:
        """Count one more protection of `node`; returns the nodes that were not protected before."""
        self.nodes.pins[node] += 1
        counts[node] += 1
        if counts[node] > 1 or children[node]:
            return []
        parents, changed = self.nodes.parent, [node]
        node = parents[node]
        while node != NONE:
            children[node] += 1
            if children[node] > 1 or counts[node]:
                break
            changed.append(node)
            node = parents[node]
        return changed

    def _unprotect(self, counts: array[int], children: array[int], node: int) -> list[int]:
        """Count one protection of `node` less; returns the nodes that are not protected any more."""
        if counts[node] < 1:
            raise LockError(f"node {node} is not protected: each lock and lease is taken back once")
        self.nodes.pins[node] -= 1
        counts[node] -= 1
        if counts[node] or children[node]:
            return []
        parents, changed = self.nodes.parent, [node]
        node = parents[node]
        while node != NONE:
            children[node] -= 1
            if children[node] or counts[node]:
                break
            changed.append(node)
            node = parents[node]
        return changed

    def _set_pages(self, node: int, pages: np.ndarray) -> None:
        self.nodes.first_page[node] = pages[0]
        self.nodes.pages[node] = pages.tobytes() if len(pages) > 1 else b""

    def _settle_order(self, node: int) -> None:
        if self.nodes.parent[node] != NONE:
            self.order.touch(node)
        else:
            self._drop_empty_root(node)

    def _drop_empty_root(self, root: int) -> None:
        if not self.nodes.pins[root]:
            del self.roots[self.namespaces.pop(root)]
            self.nodes.free(root)

    # ------------------------------------------------------------ evicting

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free."""
        return self.num_pages - self.num_locked - self.num_leased_only

    def evict(self, num_pages: int) -> int:
        """Free pages from the tails of unprotected leaves, in the policy's order: `num_pages` exactly, or all there are.

        Returns  pages freed
        Cost     amortised constant for each page
        """
        order, freed = self.order, 0
        while freed < num_pages:
            node = order.head()
            if node is None:
                break
            if not self.is_evictable(node):
                order.unlink(node)
                continue
            order.advance(node)
            own = self.num_own_pages(node)
            if num_pages - freed < own:
                self._shorten(node, num_pages - freed)
                freed = num_pages
            else:
                self._remove(node)
                freed += own
        self.num_evicted_pages += freed
        return freed

    def discard(self, node: int) -> int:
        """Remove the path to the node from its end up to where somebody else needs it; returns pages freed.

        Who does is whoever has it locked or leased, and whoever has tokens that go on from there.
        """
        freed = 0
        while self.is_evictable(node):
            freed += self.num_own_pages(node)
            node, leaf = self.nodes.parent[node], node
            self._remove(leaf)
        return freed

    def supersede(self, node: int) -> None:
        """Send the node to the head of the eviction order, unless somebody else may want it."""
        if self.is_evictable(node) and not self.nodes.idle[node]:
            self.order.supersede(node)

    def _shorten(self, node: int, num_pages: int) -> None:
        """Evict whole pages from the tail; at least one page of the edge's own stays."""
        nodes, size = self.nodes, self.page_size
        pages = self.page_ids(node)
        kept = len(pages) - num_pages
        end = (nodes.start[node] // size + kept) * size
        self.ghosts.append((node, nodes.generation[node], self.token_at(node, end)))
        freed = self.pool.release(pages[kept:])
        assert freed == num_pages, f"evicting {num_pages} pages freed {freed}: one of {pages[kept:].tolist()} is held"
        if 8 * kept < len(nodes.pages[node]):  # copying the list at each page would be quadratic
            nodes.pages[node] = nodes.pages[node][: 4 * kept]
        self.num_tokens -= nodes.end[node] - end
        self.num_pages -= num_pages
        nodes.end[node] = end
        self.epoch += 1

    def _remove(self, node: int) -> None:
        """Evict the whole leaf; its parent may become a leaf."""
        nodes = self.nodes
        start, parent = nodes.start[node], nodes.parent[node]
        own = self.num_own_pages(node)
        first_token = self.token_at(node, start)
        if (nodes.end[node] - 1) // self.page_size == start // self.page_size:
            freed = self.pool.release_one(nodes.first_page[node])
        else:
            freed = self.pool.release(self.page_ids(node))
            nodes.pages[node] = b""
        assert freed == own, f"evicting node {node} freed {freed} pages instead of {own}: one of them is held elsewhere"
        del self.children[parent << 32 | first_token]
        self.ghosts.append((parent, nodes.generation[parent], first_token))
        self.num_tokens -= nodes.end[node] - start
        self.num_pages -= own
        self.epoch += 1
        self.order.unlink(node)
        nodes.free(node)
        nodes.pins[parent] -= 1
        if not nodes.pins[parent]:
            if nodes.parent[parent] == NONE:
                self._drop_empty_root(parent)
            else:
                self.order.expose(parent)
