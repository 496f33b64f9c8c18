from __future__ import annotations

import numpy as np
import pytest

from anabranch.radix.errors import LockError
from anabranch.radix.eviction import LRU
from anabranch.radix.pages import PagePool
from anabranch.radix.tree import RadixTree


def grown(tree: RadixTree, parent: int, tokens: list[int]) -> int:
    """A child of `parent` with these tokens and pages of its own; the first begins with a copy of the parent's tail."""
    start = tree.nodes.end[parent]
    inside, size = start % tree.page_size, tree.page_size
    pages = tree.pool.alloc(-(-(inside + len(tokens)) // size))
    assert pages is not None
    above = tree.store.read(tree.page_ids(parent)[-1:], start - inside, inside).tolist() if inside else []
    tree.store.write(pages, start - inside, np.array(above + tokens, np.int32))
    node = tree.add_child(parent, start + len(tokens), pages, first_token=tokens[0], shares_first=False)
    tree.order.touch(node)
    return node


def new_tree(num_pages: int = 64, page_size: int = 4) -> tuple[RadixTree, int]:
    tree = RadixTree(PagePool(num_pages, page_size), LRU())
    return tree, tree.open_root(b"")


def matched(tree: RadixTree, tokens: list[int], namespace: bytes = b"") -> int:
    return tree.match(tree.open_root(namespace), 0, np.array(tokens, np.int32))[1]


def table_of(tree: RadixTree, node: int) -> list[int]:
    table = np.full(-(-tree.nodes.end[node] // tree.page_size), -1, np.int32)
    tree.fill_page_table(node, table)
    return table.tolist()


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_match_is_by_token_whatever_the_page_size(page_size: int) -> None:
    tree, root = new_tree(page_size=page_size)
    grown(tree, root, list(range(10, 33)))
    for length in range(24):
        assert matched(tree, [*range(10, 10 + length), 99]) == min(length, 23)
    assert matched(tree, list(range(10, 40))) == 23


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_split_copies_nothing_and_changes_no_match(page_size: int, at: int) -> None:
    tree, root = new_tree(page_size=page_size)
    node = grown(tree, root, list(range(12)))
    free, before = tree.pool.num_free, table_of(tree, node)
    upper = tree.split(node, at)
    assert tree.pool.num_free == free and table_of(tree, node) == before
    assert table_of(tree, upper) == before[: -(-at // page_size)]
    assert matched(tree, list(range(12))) == 12 and matched(tree, [*range(at), 99]) == at
    assert (tree.edge_tokens(upper).tolist(), tree.edge_tokens(node).tolist()) == (list(range(at)), list(range(at, 12)))
    held_twice = [page for page in before if tree.pool.refs(page) == 2]
    assert held_twice == ([before[at // page_size]] if at % page_size else [])
    assert tree.num_pages == len(before), "a page held by both halves counts once"


def test_the_deepest_entry_for_a_page_index_is_in_the_table() -> None:
    tree, root = new_tree()
    parent = grown(tree, root, [0, 1, 2, 3, 4, 5])
    child = grown(tree, parent, [7, 8, 9])
    upper, lower = table_of(tree, parent), table_of(tree, child)
    assert lower[0] == upper[0] and lower[1] != upper[1] and len(lower) == 3


def test_namespaces_share_nothing() -> None:
    tree, root = new_tree()
    grown(tree, root, [1, 2, 3])
    assert matched(tree, [1, 2, 3], b"other") == 0
    grown(tree, tree.open_root(b"other"), [1, 2, 9])
    assert matched(tree, [1, 2, 3]) == 3 and matched(tree, [1, 2, 3], b"other") == 2


def test_an_emptied_namespace_leaves_nothing_behind() -> None:
    tree, root = new_tree()
    grown(tree, root, [1, 2, 3])
    nodes = len(tree.nodes)
    grown(tree, tree.open_root(b"gone"), [1, 2, 3])
    tree.order.touch(tree.child(root, 1) or 0)  # so that the other's leaf is the victim
    assert tree.evict(1) == 1
    assert set(tree.roots) == {b""} and len(tree.nodes) == nodes


def test_a_locked_leaf_survives_the_eviction_of_everything() -> None:
    """Evictable and protected pages always add up to the tree's."""
    tree, root = new_tree()
    trunk = grown(tree, root, [1, 2, 3, 4, 5])
    kept, lost = grown(tree, trunk, [6, 7]), grown(tree, trunk, [8, 9])
    tree.lock(kept)
    assert tree.num_evictable + tree.num_locked == tree.num_pages
    freed = tree.evict(1000)
    assert freed == 1 and matched(tree, [1, 2, 3, 4, 5, 6, 7]) == 7 and matched(tree, [1, 2, 3, 4, 5, 8]) == 5
    assert tree.num_evictable == 0 and tree.num_locked == tree.num_pages
    tree.unlock(kept)
    assert tree.num_locked == 0 and tree.num_evictable == tree.num_pages
    assert tree.evict(1000) == 3 and lost not in tree.children.values() and tree.pool.num_free == 64


@pytest.mark.parametrize("kind", ["lock", "lease"])
def test_unlocking_twice_raises_and_the_count_stays_at_zero(kind: str) -> None:
    tree, root = new_tree()
    node = grown(tree, root, [1, 2, 3])
    take, give_back = getattr(tree, kind), getattr(tree, "un" + kind)
    take(node)
    give_back(node)
    with pytest.raises(LockError, match="taken back once"):
        give_back(node)
    take(node)
    assert tree.num_evictable == 0, "one lock after a refused unlock still protects"


def test_a_lock_walks_up_to_the_first_protected_ancestor_only() -> None:
    tree, root = new_tree()
    path = [root]
    for i in range(10):
        path.append(grown(tree, path[-1], [i, 50 + i]))
    tree.lock(path[8])
    counts = list(tree.nodes.locked_children)
    tree.lock(path[10])
    changed = [node for node in path if tree.nodes.locked_children[node] != counts[node]]
    assert changed == [path[8], path[9]]
    assert tree.nodes.locks[path[8]] == tree.nodes.locks[path[10]] == 1 and not tree.nodes.locks[path[9]]


def test_a_lock_below_a_split_protects_both_halves() -> None:
    tree, root = new_tree()
    node = grown(tree, root, list(range(10)))
    tree.lock(node)
    tree.split(node, 6)
    assert tree.evict(1000) == 0 and tree.num_locked == 3
    tree.unlock(node)
    assert tree.num_locked == 0 and tree.evict(1000) == 3


@pytest.mark.parametrize("wanted", range(1, 6))
def test_eviction_takes_exactly_the_pages_it_needs_from_the_tail(wanted: int) -> None:
    tree, root = new_tree()
    node = grown(tree, root, list(range(18)))
    assert tree.evict(wanted) == wanted and tree.pool.num_free == 64 - 5 + wanted
    assert matched(tree, list(range(18))) == (5 - wanted) * 4
    assert (node in tree.children.values()) == (wanted < 5)


def test_an_edge_does_not_grow_while_others_hold_or_remember_it() -> None:
    tree, root = new_tree()
    node = grown(tree, root, list(range(16)))
    tree.lock(node)
    assert tree.can_grow(node)
    for take, give_back in ((tree.lock, tree.unlock), (tree.lease, tree.unlease)):
        take(node)
        assert not tree.can_grow(node)
        give_back(node)
    tree.nodes.idle[node] += 1
    assert not tree.can_grow(node)
    tree.nodes.idle[node] -= 1
    grown(tree, node, [7])
    assert not tree.can_grow(node)


def test_evicting_the_lower_half_keeps_the_page_that_the_upper_half_needs() -> None:
    tree, root = new_tree()
    node = grown(tree, root, list(range(8)))
    upper = tree.split(node, 6)
    assert tree.num_own_pages(node) == 0
    tree.lock(upper)
    assert tree.evict(1000) == 0 and matched(tree, list(range(8))) == 6
    tree.unlock(upper)
    assert tree.evict(1000) == 2


class OneBucket(dict):  # type: ignore[type-arg]
    """A dictionary in which all keys hash alike, so that only their equality tells them apart."""

    class Key(int):
        def __hash__(self) -> int:
            return 7

    def get(self, key: int, default: int | None = None) -> int | None:
        return super().get(self.Key(key), default)

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return super().__contains__(self.Key(key))

    def __setitem__(self, key: int, value: int) -> None:
        super().__setitem__(self.Key(key), value)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(self.Key(key))


def test_prompts_whose_hashes_are_all_equal_stay_apart() -> None:
    tree, root = new_tree(num_pages=1000)
    tree.children = OneBucket()
    prompts = [[7, *(int(digit) for digit in f"{i:06b}")] for i in range(50)]
    for prompt in prompts:
        node, position = tree.match(root, 0, np.array(prompt, np.int32))
        if position < tree.nodes.end[node]:
            node = tree.split(node, position)
        grown(tree, node, prompt[position:])
    for prompt in prompts:
        assert matched(tree, prompt) == 7
        assert matched(tree, [*prompt[:-1], 2]) == 6


def test_namespaces_whose_hashes_are_all_equal_stay_apart() -> None:
    class Name(bytes):
        def __hash__(self) -> int:
            return 7

    names = [Name(b"tenant %d" % i) for i in range(50)]
    tree = RadixTree(PagePool(1000, 4), LRU())
    for i, name in enumerate(names):
        grown(tree, tree.open_root(name), [i, 1, 2, 3, 4])
    for i, name in enumerate(names):
        assert matched(tree, [i, 1, 2, 3, 4], name) == 5
        assert matched(tree, [(i + 1) % 50, 1, 2, 3, 4], name) == 0
