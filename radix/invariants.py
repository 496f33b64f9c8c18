"""Every rule of the cache, each a sentence and a few lines. `check` runs them all; it reads and never repairs.

Callable in production: it takes O(nodes + pages) and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise

import numpy as np

from anabranch.radix.branch import Branch, Tail
from anabranch.radix.explain import dump
from anabranch.radix.manager import KVManager
from anabranch.radix.nodes import NONE


def check(m: KVManager) -> None:
    """Raise AssertionError with the name of the first rule that does not hold, what is wrong, and the tree."""
    for rule in RULES:
        try:
            rule(m)
        except AssertionError as error:
            raise AssertionError(f"{rule.__name__}: {rule.__doc__}\n{error}\n{dump(m)}") from error


def every_page_is_free_cached_locked_or_in_use(m: KVManager) -> None:
    """Free, cached, locked and in-use pages are what the counters say, and add up to all pages."""
    nodes, in_tree, locked = m.tree.nodes, set[int](), set[int]()
    for node in _edges(m):
        pages = m.tree.page_ids(node).tolist()
        in_tree.update(pages)
        if nodes.locks[node] or nodes.leases[node] or nodes.locked_children[node] or nodes.leased_children[node]:
            locked.update(pages)
    owned = {page for branch in m.attached for page in _own_pages(branch)}
    counted = (int((m.pool.counts() == 0).sum()), len(in_tree - locked), len(locked), len(owned - in_tree))
    claimed = (m.num_free(), m.num_cached(), m.num_locked(), m.num_in_use())
    assert counted == claimed, f"(free, cached, locked, in use) are {counted}, the counters say {claimed}"
    assert sum(claimed) == m.pool.num_pages, f"{claimed} do not add up to {m.pool.num_pages}"


def reference_counts_are_exact(m: KVManager) -> None:
    """A page's count is the number of nodes and branches that hold it; 0 means free."""
    by_nodes = chain.from_iterable(m.tree.page_ids(node).tolist() for node in _edges(m))
    holders = Counter(chain(by_nodes, *(_own_pages(branch) for branch in m.attached)))
    counts = m.pool.counts()
    wrong = {
        page: (int(counts[page]), holders[page]) for page in range(m.pool.num_pages) if counts[page] != holders[page]
    }
    assert not wrong, f"page: (count, holders) is wrong: {wrong}"


def each_free_page_is_in_the_free_list_once(m: KVManager) -> None:
    """The free list holds exactly the pages with count 0, each once."""
    listed = sorted(m.pool.free_pages().tolist())
    free = np.flatnonzero(m.pool.counts() == 0).tolist()
    assert listed == free, f"listed {listed}, but free are {free}"


def every_edge_hangs_at_the_end_of_its_parent(m: KVManager) -> None:
    """An edge is not empty, begins where its parent ends, and is filed under its parent and its first token."""
    tree, nodes = m.tree, m.tree.nodes
    filed = {child: key for key, child in tree.children.items()}
    edges = _edges(m)
    assert sorted(filed) == edges, f"filed are {sorted(filed)}, but the edges are {edges}"
    for node in edges:
        parent, start = nodes.parent[node], nodes.start[node]
        assert start == nodes.end[parent] < nodes.end[node], f"node {node} is [{start}, {nodes.end[node]})"
        key = parent << 32 | tree.token_at(node, start)
        assert filed[node] == key, f"node {node} is filed under {filed[node]}, not {key}"
    children = Counter(nodes.parent[node] for node in edges)
    wrong = [node for node in nodes.ids() if _is_node(m, node) and nodes.num_children(node) != children[node]]
    assert not wrong, f"nodes {wrong} have another number of children than they say"


def roots_live_as_long_as_they_are_needed(m: KVManager) -> None:
    """Each namespace has one root, and a root has a child or a lock."""
    nodes = m.tree.nodes
    assert {root: name for name, root in m.tree.roots.items()} == m.tree.namespaces, "roots and namespaces differ"
    for root in m.tree.namespaces:
        assert nodes.parent[root] == NONE and not nodes.end[root], f"root {root} is an edge"
        assert nodes.pins[root], f"root {root} is not needed"


def a_page_holds_the_whole_path_inside_it(m: KVManager) -> None:
    """Where an edge begins inside a page, its page holds its ancestors' tokens in the slots before."""
    tree, nodes, size = m.tree, m.tree.nodes, m.page_size
    for node in _edges(m):
        inside = nodes.start[node] % size
        if inside:
            parent, first = nodes.parent[node], nodes.start[node] - inside
            here = tree.store.read(tree.page_ids(node), first, inside)
            above = tree.store.read(tree.page_ids(parent)[-1:], first, inside)
            assert (here == above).all(), f"node {node} begins with {here}, its parent {parent} ends with {above}"


def a_page_is_held_along_one_path(m: KVManager) -> None:
    """The nodes that hold a page lie on one path; all but the topmost hold it as their first page, and say so."""
    nodes, holders = m.tree.nodes, dict[int, list[int]]()
    for node in _edges(m):
        for page in m.tree.page_ids(node).tolist():
            holders.setdefault(page, []).append(node)
    for page, held_by in holders.items():
        held_by.sort(key=lambda node: nodes.start[node], reverse=True)
        for node, above in pairwise(held_by):
            assert above in _ancestors(m, node), f"page {page} is held by nodes {held_by}, which are on no path"
            assert nodes.shares_first[node] and m.tree.page_of(node, nodes.start[node]) == page, (
                f"node {node} holds page {page} of node {above} and does not say so"
            )
        top = held_by[-1]
        first = m.tree.page_of(top, nodes.start[top])
        assert not (nodes.shares_first[top] and first == page), f"node {top} shares page {page} with nobody above it"


def counters_of_the_tree_are_exact(m: KVManager) -> None:
    """The tree's totals are what its nodes add up to."""
    tree, nodes = m.tree, m.tree.nodes
    edges = _edges(m)
    locked = [node for node in edges if tree.is_locked(node)]
    leased = [node for node in edges if tree.is_leased(node)]
    counted = {
        "num_tokens": sum(nodes.end[node] - nodes.start[node] for node in edges),
        "num_pages": sum(map(tree.num_own_pages, edges)),
        "num_locked": sum(map(tree.num_own_pages, locked)),
        "num_leased": sum(map(tree.num_own_pages, leased)),
        "num_leased_only": sum(map(tree.num_own_pages, set(leased) - set(locked))),
    }
    said = {name: getattr(tree, name) for name in counted}
    assert counted == said, f"counted {counted}, the tree says {said}"


def every_lock_and_lease_has_an_owner(m: KVManager) -> None:
    """A node's locks are the branches attached there and the copies in flight from there; its leases are in the list."""
    nodes = m.tree.nodes
    locks = Counter(chain((branch.node for branch in m.attached), m.holds))
    leases = Counter(m.leases.nodes())
    for node in nodes.ids():
        if _is_node(m, node):
            assert nodes.locks[node] == locks[node], f"node {node}: {nodes.locks[node]} locks, {locks[node]} owners"
            assert nodes.leases[node] == leases[node], (
                f"node {node}: {nodes.leases[node]} leases, {leases[node]} owners"
            )


def protection_reaches_the_root(m: KVManager) -> None:
    """A node knows how many of its children are protected, by locks and by leases."""
    nodes, locked, leased = m.tree.nodes, Counter[int](), Counter[int]()
    for node in _edges(m):
        locked[nodes.parent[node]] += m.tree.is_locked(node)
        leased[nodes.parent[node]] += m.tree.is_leased(node)
    for node in nodes.ids():
        if _is_node(m, node):
            said = (nodes.locked_children[node], nodes.leased_children[node])
            assert said == (locked[node], leased[node]), f"node {node} says {said}, not {locked[node], leased[node]}"


def leases_stay_within_their_budget(m: KVManager) -> None:
    """Leases protect no more pages than their budget."""
    assert m.tree.num_leased <= m.leases.budget, (
        f"{m.tree.num_leased} pages are leased, the budget is {m.leases.budget}"
    )


def every_evictable_leaf_is_in_the_order(m: KVManager) -> None:
    """The eviction order has each evictable leaf once, and no node that is not in the tree."""
    order, edges = m.tree.order.members(), _edges(m)
    assert len(order) == len(set(order)), f"a node is twice in {order}"
    assert set(order) <= set(edges), f"nodes {set(order) - set(edges)} are in the order and not in the tree"
    missing = {node for node in edges if m.tree.is_evictable(node)} - set(order)
    assert not missing, f"leaves {missing} can never be evicted"


def a_leaf_has_at_most_one_writer(m: KVManager) -> None:
    """Only the branch that claimed a leaf writes past its end, and it is attached there or writes elsewhere."""
    claimed = {branch.node: branch for branch in m.attached if branch.tail == Tail.CLAIMED}
    assert claimed == m.claims, f"claims are {list(m.claims)}, but branches claimed {list(claimed)}"
    for branch in m.attached:
        if branch.tail == Tail.SHARED:
            assert branch.reserved == branch.computed, f"a branch at node {branch.node} writes into a shared page"


def a_written_slot_is_read_by_its_writer_only(m: KVManager) -> None:
    """No node and no other branch reads a slot that an attached branch may write."""
    readers = dict[int, list[int]]()
    for node in _edges(m):
        for page in m.tree.page_ids(node)[-1:].tolist():
            readers.setdefault(page, []).append(node)
    inner = {page for node in _edges(m) for page in m.tree.page_ids(node)[:-1].tolist()}
    written = Counter[int]()
    for branch in m.attached:
        if branch.reserved == branch.computed:
            continue
        pages = branch.entries(branch.computed // m.page_size, -(-branch.reserved // m.page_size)).tolist()
        written.update(pages)
        assert not inner & set(pages), (
            f"a branch at node {branch.node} writes full pages {inner & set(pages)} of the tree"
        )
        for page in pages:
            for node in readers.get(page, ()):
                assert m.tree.nodes.end[node] <= branch.computed, f"page {page} is written and read by node {node}"
    twice = [page for page, writers in written.items() if writers > 1]
    assert not twice, f"pages {twice} have more than one writer"


def a_page_table_is_the_path_and_then_the_branch_s_own(m: KVManager) -> None:
    """An attached branch reads the pages of its path, and from `own` on pages that nobody else holds."""
    for branch in m.attached:
        path = np.empty(-(-m.tree.nodes.end[branch.node] // m.page_size), np.int32)
        m.tree.fill_page_table(branch.node, path)
        shared = min(branch.own, len(path))
        assert (branch.entries(0, shared) == path[:shared]).all(), f"the table of the branch at {branch.node} is stale"
        assert branch.own - shared <= (branch.tail == Tail.CLAIMED), f"nobody holds entries [{shared}, {branch.own})"
        held = [page for page in _own_pages(branch) if m.pool.refs(page) != 1]
        assert not held, f"own pages {held} of the branch at node {branch.node} have other holders"
        spare = branch.num_pages - max(branch.own, -(-branch.reserved // m.page_size))
        assert spare <= 0, f"the branch at node {branch.node} keeps {spare} pages that it has not reserved"
        covered = branch.num_pages * m.page_size
        assert branch.computed <= branch.reserved <= covered, (
            f"computed {branch.computed} <= reserved {branch.reserved} <= {covered} covered by the table"
        )


def a_branch_agrees_with_its_path(m: KVManager) -> None:
    """An attached branch has the tokens of the path to its node, in its own namespace."""
    for branch in m.attached:
        node, end = branch.node, m.tree.nodes.end[branch.node]
        assert branch.attached and not branch.closed and end <= len(branch), f"a branch of {len(branch)} sits at {end}"
        tokens = branch.tokens(0, end)
        while node not in m.tree.namespaces:
            edge = m.tree.edge_tokens(node)
            start = m.tree.nodes.start[node]
            assert (edge == tokens[start : start + len(edge)]).all(), f"a branch at {branch.node} disagrees at {node}"
            node = m.tree.nodes.parent[node]
        assert m.tree.namespaces[node] == branch.namespace, f"a branch of {branch.namespace!r} is in another namespace"


RULES: tuple[Callable[[KVManager], None], ...] = (
    every_page_is_free_cached_locked_or_in_use,
    reference_counts_are_exact,
    each_free_page_is_in_the_free_list_once,
    every_edge_hangs_at_the_end_of_its_parent,
    roots_live_as_long_as_they_are_needed,
    a_page_holds_the_whole_path_inside_it,
    a_page_is_held_along_one_path,
    counters_of_the_tree_are_exact,
    every_lock_and_lease_has_an_owner,
    protection_reaches_the_root,
    leases_stay_within_their_budget,
    every_evictable_leaf_is_in_the_order,
    a_leaf_has_at_most_one_writer,
    a_written_slot_is_read_by_its_writer_only,
    a_page_table_is_the_path_and_then_the_branch_s_own,
    a_branch_agrees_with_its_path,
)


def _is_node(m: KVManager, node: int) -> bool:
    """Whether the id is a node of the tree, and not a sentinel of the eviction order."""
    return node >= m.tree.order.policy.num_classes


def _edges(m: KVManager) -> list[int]:
    """All nodes but roots, ascending."""
    return [node for node in m.tree.nodes.ids() if _is_node(m, node) and node not in m.tree.namespaces]


def _own_pages(branch: Branch) -> list[int]:
    return branch.entries(branch.own).tolist()


def _ancestors(m: KVManager, node: int) -> list[int]:
    parents, found = m.tree.nodes.parent, []
    while parents[node] != NONE:
        node = parents[node]
        found.append(node)
    return found
