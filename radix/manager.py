"""The scheduler's one door to the cache: branches in, pages and page tables out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anabranch.radix import explain
from anabranch.radix.branch import Branch, Tail
from anabranch.radix.errors import BranchError, CacheSizeError
from anabranch.radix.eviction import POLICIES, EvictionPolicy
from anabranch.radix.leases import Leases
from anabranch.radix.nodes import NONE
from anabranch.radix.pages import PagePool
from anabranch.radix.placement import Placement
from anabranch.radix.publish import publish
from anabranch.radix.tokens import TokenLog
from anabranch.radix.tree import RadixTree


class Copies(NamedTuple):
    """Pages to copy before the step's forward: page `src[i]` over page `dst[i]`. int32, equally long."""

    src: np.ndarray
    dst: np.ndarray


_NO_PAGES = np.empty(0, np.int32)
NO_COPIES = Copies(_NO_PAGES, _NO_PAGES)


class KVManager:
    """Pages, tree, branches and leases of one KV pool.

    A branch is *open*, and some of the time *attached*: its path is locked, and it may reserve pages, write them (the
    worker does) and commit them. Everything else lies in the tree. Steps reach the worker in the order they were
    planned, so a page that is given back may be handed out at once. The source of a copy is the exception: it stays
    until `settle`.

    num_pages    pages of the pool
    page_size    tokens a page
    policy       "lru", "cost", or an object of your own
    lease_share  the share of the pool that leases may protect
    Raises       CacheSizeError
    """

    def __init__(
        self, num_pages: int, page_size: int, *, policy: EvictionPolicy | str = "lru", lease_share: float = 0.25
    ) -> None:
        if not 0 <= lease_share <= 1:
            raise CacheSizeError(f"lease_share must be in [0, 1], got {lease_share}")
        if isinstance(policy, str):
            if policy not in POLICIES:
                known = ", ".join(sorted(POLICIES))
                raise CacheSizeError(f"policy must be one of {known}, or an object, got {policy!r}")
            policy = POLICIES[policy]()
        self.pool = PagePool(num_pages, page_size)
        self.page_size = page_size
        self.tree = RadixTree(self.pool, policy)
        self.placement = Placement(self.tree)
        self.leases = Leases(self.tree, int(lease_share * num_pages))
        self.attached: dict[Branch, None] = {}  # in the order they were attached
        self.claims: dict[int, Branch] = {}  # leaf -> the one branch that may write past its end in its last page
        self.holds: list[int] = []  # nodes locked because a planned copy reads from them
        self.num_copies = 0
        self.num_hit_tokens = 0
        self.num_matched_tokens = 0  # what the hits are a share of

    # ------------------------------------------------------------ branches

    def open(self, namespace: bytes) -> Branch:
        """A branch without tokens. Equal namespaces share a cache; others never see each other's."""
        return Branch(namespace, TokenLog())

    def append(self, branch: Branch, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens that have no KV yet. Amortised O(new).

        Raises   TokenError if one is outside [0, 2**31); BranchError if the branch is closed
        """
        if branch.closed:
            raise BranchError("the branch is closed")
        branch.log.append(token_ids)
        branch.memo_epoch = -1

    def fork(self, branch: Branch, n: int) -> list[Branch]:
        """`n` idle branches with the same tokens and the same cached prefix. Copies nothing; O(n), whatever the length.

        An attached branch publishes first, so that its children find what it has committed.
        """
        self._must_be_open(branch)
        if branch.attached:
            publish(self, branch)
        return [self._child_of(branch) for _ in range(n)]

    def rollback(self, branch: Branch, length: int, *, superseded: bool = True) -> None:
        """Drop tokens and KV from `length` on. An attached branch stays attached, with `computed` at most `length`.

        superseded   nobody is expected to want what was dropped: it is evicted before anything else
        """
        self._must_be_open(branch)
        if not 0 <= length <= len(branch):
            raise BranchError(f"cannot roll back a branch of {len(branch)} tokens to {length}")
        if branch.attached:
            self._rollback_attached(branch, length, superseded)
        elif superseded and length < len(branch):
            self._rollback_idle(branch, length)
        branch.log.truncate(length)
        branch.position = min(branch.position, length)
        branch.memo_epoch = -1
        branch.peak = min(branch.peak, length)

    def release(self, branch: Branch, *, superseded: bool = False) -> None:
        """Close the branch. What it had computed stays cached; superseded, it is evicted before anything else."""
        if branch.closed:
            return
        if branch.attached:
            self.detach(branch)
        self.leases.end(branch)
        node = self.placement.living_node(branch)
        self.placement.stop_counting(branch)
        if node != NONE and self.tree.nodes.parent[node] != NONE:
            if superseded and branch.position >= self.tree.nodes.end[node]:
                self.tree.supersede(node)
            elif not superseded and self.tree.is_evictable(node):
                self.tree.order.touch(node)  # ranked anew, now that one less may come back for it
        branch.log.close()
        branch.node = NONE
        branch.closed = True

    def adopt(self, branch: Branch, winner: Branch) -> None:
        """`branch` becomes what `winner` is: tokens, KV, attachment and lease. The winner is closed. O(1).

        Raises   BranchError if they are of different namespaces
        """
        self._must_be_open(branch)
        self._must_be_open(winner)
        if branch is winner:
            return
        if branch.namespace != winner.namespace:
            raise BranchError("a branch cannot adopt one of another namespace: its KV may not be shared")
        if branch.attached:
            self.detach(branch)
        self.placement.stop_counting(branch)
        branch.log.close()
        self.leases.move(winner, branch)
        branch.take_over(winner)
        if branch.attached:
            del self.attached[winner]
            self.attached[branch] = None
            if self.claims.get(branch.node) is winner:
                self.claims[branch.node] = branch

    # ------------------------------------------------------------ running

    def lookup(self, branch: Branch) -> int:
        """Tokens of the branch that are cached now, at most all but the last.

        Cost     O(1) while the tree has not changed, or only elsewhere; otherwise O(what is cached in addition)
        """
        if branch.memo_epoch == self.tree.epoch:
            return branch.memo
        if branch.attached:
            return branch.computed
        if branch.memo_epoch < 0 or not self.placement.is_unchanged(branch):
            self._must_be_open(branch)
            self.placement.find(branch)
        branch.memo = max(0, min(branch.position, len(branch) - 1))
        branch.memo_epoch = self.tree.epoch
        return branch.memo

    def attach(self, branch: Branch) -> int:
        """Lock the longest cached prefix and start from it; returns `branch.computed`, at most `len(branch) - 1`.

        Cost     O(what is matched beyond the branch's own place) + one copy a node of the path, for the page table
        """
        self._must_be_open(branch)
        if branch.attached:
            raise BranchError("the branch is attached already")
        tree, size = self.tree, self.page_size
        node, position = self.placement.find(branch)
        if node == NONE:
            node = tree.open_root(branch.namespace)
        elif position < tree.nodes.end[node]:
            node = tree.split(node, position)
        self.placement.stop_counting(branch)
        tree.lock(node)
        tree.count_use(node)
        self.leases.end(branch)
        branch.node = node
        branch.attached = True
        branch.computed = branch.reserved = max(0, min(position, len(branch) - 1))
        tree.fill_page_table(node, branch.begin_table(-(-position // size)))
        branch.tail = Tail.ALIGNED if position == branch.computed and position % size == 0 else Tail.SHARED
        branch.memo_epoch = -1
        self.attached[branch] = None
        self.num_hit_tokens += branch.computed
        self.num_matched_tokens += len(branch)
        return branch.computed

    def can_reserve(self, branch: Branch, upto: int) -> int:
        """How many pages `reserve` would lack; 0 means that it will succeed. Changes nothing."""
        tree = self.tree
        available = self.pool.num_free + tree.num_evictable + tree.num_leased_only
        return max(0, self._num_new_pages(branch, upto) - available)

    def reserve(self, branch: Branch, upto: int) -> Copies | None:
        """Make positions [computed, upto) writable. Evicts if it must, and demotes leases before it gives up.

        Returns  the page to copy before the step's forward, if the branch must leave a page that others read; None for
                 a shortage of pages, and then nothing has changed
        Cost     O(new pages)
        """
        if upto <= branch.reserved:
            return NO_COPIES
        if branch.tail != Tail.SHARED and upto <= branch.num_pages * self.page_size:
            branch.reserved = upto
            return NO_COPIES
        assert branch.attached, "only an attached branch can reserve pages"
        must_copy = self._must_copy(branch)  # decided before making room, which may turn the node into a leaf
        new = max(0, -(-upto // self.page_size) - branch.num_pages)
        if not self._make_room(new + must_copy):
            return None
        copies = NO_COPIES
        if must_copy:
            copies = self._leave_shared_page(branch)
        elif branch.tail == Tail.SHARED:
            self.claims[branch.node] = branch
            branch.tail = Tail.CLAIMED
        if new:
            pages = self.pool.alloc(new)
            assert pages is not None
            branch.extend_table(pages)
        branch.reserved = upto
        return copies

    def commit(self, branch: Branch, upto: int) -> None:
        """The step that wrote KV for positions below `upto` has returned."""
        assert branch.computed <= upto <= branch.reserved, (
            f"committed {upto}, outside of what was reserved: [{branch.computed}, {branch.reserved}]"
        )
        branch.computed = upto

    def publish(self, branch: Branch) -> None:
        """Hand what is committed to the tree, so that others can use it, and go on. O(what is new)."""
        publish(self, branch)

    def trim(self, branch: Branch) -> None:
        """Give back reserved pages that lie wholly past the known and the committed tokens."""
        kept = max(branch.computed, min(branch.reserved, len(branch)))
        branch.reserved = kept
        self.drop_pages_from(branch, -(-kept // self.page_size))

    def detach(self, branch: Branch) -> None:
        """Publish and let go: the branch holds no page and no lock afterwards. It may be attached again."""
        assert branch.attached, "the branch is not attached"
        branch.reserved = branch.computed = min(branch.computed, len(branch))
        publish(self, branch)
        self.drop_pages_from(branch, branch.own)
        self.drop_claim(branch)
        branch.attached = False
        del self.attached[branch]
        branch.end_table()
        nodes = self.tree.nodes
        branch.generation, branch.position = nodes.generation[branch.node], nodes.end[branch.node]
        self.placement.start_counting(branch)
        branch.peak = max(branch.peak, branch.position)
        self.tree.unlock(branch.node)

    def discard(self, branch: Branch) -> None:
        """Detach without publishing, and remove the branch's path from the tree as far up as nobody else needs it.

        For KV that cannot be trusted, of which nobody can say where the fault began. The branch keeps its tokens.
        """
        branch.computed = branch.reserved = min(branch.computed, self.tree.nodes.end[branch.node])
        self.detach(branch)
        self.tree.discard(branch.node)

    def settle(self) -> None:
        """The copies asked for so far have been planned: their sources need not stay any longer."""
        holds, self.holds = self.holds, []
        for node in holds:
            self.tree.unlock(node)

    # ------------------------------------------------------------ leases

    def lease(self, branch: Branch, until: float | None, now: float) -> bool:
        """Keep the cached prefix of an idle branch until a time, or until it is attached.

        Returns  False if the time is past, nothing is cached, or the path alone is over the budget
        """
        self._must_be_open(branch)
        if branch.attached:
            raise BranchError("an attached branch needs no lease: detach it first")
        self.leases.expire(now)
        if until is not None and until <= now:
            self.leases.end(branch)
            return False
        node, position = self.placement.find(branch)
        if not position:
            return False
        if position < self.tree.nodes.end[node]:
            node = self.tree.split(node, position)
            self.placement.move(branch, node, position)
        return self.leases.grant(branch, node, until)

    def expire(self, now: float) -> None:
        """End the leases whose time has come."""
        self.leases.expire(now)

    # ------------------------------------------------------------ state

    @property
    def epoch(self) -> int:
        """Changes when the tree changes in a way that may change a look-up."""
        return self.tree.epoch

    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self.pool.num_free

    def num_cached(self) -> int:
        """Pages that only the tree holds and that may be evicted."""
        return self.tree.num_evictable

    def num_locked(self) -> int:
        """Pages of the tree that a lock or a lease protects."""
        return self.tree.num_locked + self.tree.num_leased_only

    def num_in_use(self) -> int:
        """Pages that only attached branches hold."""
        return self.pool.num_pages - self.pool.num_free - self.tree.num_pages

    def flush(self) -> int:
        """Evict whatever may be evicted; returns pages freed."""
        return self.tree.evict(self.pool.num_pages + 1)

    def fragmentation(self) -> float:
        """Token slots that are allocated and hold nothing anybody needs, over all allocated: gaps and duplicates."""
        allocated = (self.pool.num_pages - self.pool.num_free) * self.page_size
        ends = self.tree.nodes.end
        used = self.tree.num_tokens + sum(max(0, b.computed - ends[b.node]) for b in self.attached)
        return (allocated - used) / allocated if allocated else 0.0

    def explain(self, branch: Branch, *, all_namespaces: bool = False) -> str:
        """Why the first token that is not cached is not.

        all_namespaces   also say whether another namespace has it: for operators, never for a tenant
        """
        return explain.why_miss(self, branch, all_namespaces=all_namespaces)

    def stats(self) -> dict[str, int | float]:
        """Counters and sizes, all of them O(1) but `fragmentation`, which is O(attached branches)."""
        tree = self.tree
        return {
            "num_pages": self.pool.num_pages,
            "page_size": self.page_size,
            "num_free": self.num_free(),
            "num_cached": self.num_cached(),
            "num_locked": self.num_locked(),
            "num_in_use": self.num_in_use(),
            "num_leased": tree.num_leased,
            "num_leases": len(self.leases),
            "num_demoted_leases": self.leases.num_demoted,
            "num_nodes": len(tree.nodes) - tree.order.policy.num_classes,
            "num_namespaces": len(tree.roots),
            "num_attached": len(self.attached),
            "cached_tokens": tree.num_tokens,
            "hit_tokens": self.num_hit_tokens,
            "matched_tokens": self.num_matched_tokens,
            "evictions": tree.num_evicted_pages,
            "splits": tree.num_splits,
            "copies": self.num_copies,
            "fragmentation": self.fragmentation(),
            "epoch": tree.epoch,
        }

    # ------------------------------------------------------------ for `publish`

    def drop_claim(self, branch: Branch) -> None:
        """The branch does not write into the tree's page any more."""
        if branch.tail == Tail.CLAIMED:
            assert self.claims.pop(branch.node) is branch
            branch.tail = Tail.SHARED

    def drop_pages_from(self, branch: Branch, index: int) -> None:
        """Release the branch's own pages from that table index on."""
        index = max(index, branch.own)
        if index < branch.num_pages:
            self.pool.release(branch.entries(index))
            branch.cut_table(index)

    def move_lock(self, branch: Branch, node: int) -> None:
        """The attached branch ends at another node from now on."""
        if node != branch.node:
            self.drop_claim(branch)
            self.tree.lock(node)
            self.tree.unlock(branch.node)
            branch.node = node

    # ------------------------------------------------------------ inside

    def _must_be_open(self, branch: Branch) -> None:
        if branch.closed:
            raise BranchError("the branch is closed")

    def _child_of(self, branch: Branch) -> Branch:
        child = Branch(branch.namespace, branch.log.fork())
        child.peak = branch.peak
        if branch.attached:
            nodes = self.tree.nodes
            child.node, child.generation = branch.node, nodes.generation[branch.node]
            child.position = nodes.end[branch.node]
            child.peak = max(child.peak, branch.computed)
        else:
            child.node, child.generation, child.position = branch.node, branch.generation, branch.position
            child.is_inside_edge = branch.is_inside_edge
            child.memo, child.memo_epoch = branch.memo, branch.memo_epoch
        self.placement.start_counting(child)
        return child

    def _num_new_pages(self, branch: Branch, upto: int) -> int:
        """Pages that `reserve` must allocate."""
        if upto <= branch.reserved:
            return 0
        return max(0, -(-upto // self.page_size) - branch.num_pages) + self._must_copy(branch)

    def _must_copy(self, branch: Branch) -> bool:
        """Whether the branch must leave the tree's page before it writes.

        It may claim the page instead if it goes on where a leaf ends and nobody else has claimed that: all who hold the
        page end at or before the leaf's end, so they never read what is written past it.
        """
        if branch.tail != Tail.SHARED:
            return False
        nodes, node = self.tree.nodes, branch.node
        return branch.computed != nodes.end[node] or nodes.num_children(node) > 0 or node in self.claims

    def _leave_shared_page(self, branch: Branch) -> Copies:
        """Copy on write: the table's last entry becomes a page of the branch's own."""
        index = branch.computed // self.page_size
        assert index == branch.num_pages - 1, "only the last page of a path can be written on"
        entry = branch.entries(index, index + 1)
        source = entry.copy()
        page_id = self.pool.alloc_one()
        assert page_id is not None
        entry[0] = page_id
        branch.own = index
        branch.tail = Tail.PRIVATE
        branch.table_changed(index)
        if branch.computed % self.page_size == 0:  # nothing of the old page is needed
            return NO_COPIES
        self.tree.lock(branch.node)
        self.holds.append(branch.node)
        self.num_copies += 1
        return Copies(source, entry.copy())

    def _make_room(self, num_pages: int) -> bool:
        """Have that many free pages, by evicting and then by demoting leases; False, and nothing done, if it cannot be."""
        tree, short = self.tree, num_pages - self.pool.num_free
        if short <= 0:
            return True
        if short > tree.num_evictable + tree.num_leased_only:
            return False
        while short > tree.num_evictable:
            self.leases.demote_oldest()
        freed = tree.evict(short)
        assert freed == short, f"{short} pages should have been evictable, got {freed}"
        return True

    def _rollback_attached(self, branch: Branch, length: int, superseded: bool) -> None:
        tree, size, old = self.tree, self.page_size, branch.node
        branch.peak = max(branch.peak, branch.computed)
        if length >= tree.nodes.end[old]:  # all of it is the branch's own
            if length < branch.computed:
                branch.computed = branch.reserved = length
                self.drop_pages_from(branch, -(-length // size))
            return
        self.pool.release(branch.entries(branch.own))
        self.drop_claim(branch)
        node = tree.ancestor_at(old, length)
        if 0 < length < tree.nodes.end[node]:
            node = tree.split(node, length)
        self.move_lock(branch, node)
        if superseded:
            tree.supersede(old)
        num_pages = -(-length // size)
        first = min(branch.own, length // size)  # the entry of a page that is cut may be that of a deeper node
        branch.num_pages = branch.own = num_pages
        tree.fill_page_table(node, branch.entries(0), first)
        branch.table_changed(first)
        branch.computed = branch.reserved = length
        branch.tail = Tail.SHARED if length % size else Tail.ALIGNED

    def _rollback_idle(self, branch: Branch, length: int) -> None:
        """Send what an idle branch drops to the head of the eviction order."""
        tree = self.tree
        node, position = self.placement.find(branch)
        if node == NONE or position <= length:
            return
        if position < tree.nodes.end[node]:
            return  # somebody else's tokens follow
        self.placement.stop_counting(branch)
        upper = tree.ancestor_at(node, length)
        if upper == node and length > tree.nodes.start[node]:
            upper = tree.split(node, length)
        tree.supersede(node)
        branch.node, branch.generation = upper, tree.nodes.generation[upper]
        branch.position = length
        self.placement.start_counting(branch)
