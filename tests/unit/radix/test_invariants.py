"""A checker that cannot fail proves nothing: each kind of damage is found, by the rule that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.radix import cached, compute

from anabranch.radix.branch import Branch, Tail
from anabranch.radix.invariants import RULES, check
from anabranch.radix.manager import KVManager


def busy_manager() -> tuple[KVManager, Branch, Branch]:
    """Some of everything: a split, a copy, a claim, a lease, an idle leaf, two namespaces, own pages."""
    m = KVManager(40, 4, lease_share=0.5)
    trunk = cached(m, list(range(10)))
    writer, copier = m.fork(trunk, 2)
    for token, branch in enumerate((writer, copier), 50):
        m.append(branch, [token])
        m.attach(branch)
        compute(m, branch)
        m.publish(branch)
    m.append(writer, [60])
    assert m.reserve(writer, 12) is not None
    assert writer.tail == Tail.CLAIMED and copier.tail == Tail.SHARED
    m.release(cached(m, [*range(6), 70, 71, 72, 73, 74]))
    assert m.lease(cached(m, [1, 2, 3], b"other"), None, 0.0)
    owner = m.open(b"other")
    m.append(owner, list(range(200, 209)))
    m.attach(owner)
    compute(m, owner)
    check(m)
    return m, writer, owner


def leaf(m: KVManager) -> int:
    return next(node for node in m.tree.order.members() if m.tree.is_evictable(node))


def damage_counter(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.tree.num_locked += 1


def leak_a_page(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.pool.alloc_one()


def hold_a_page_too_often(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.pool.retain_one(int(writer.page_table[0]))


def list_a_free_page_twice(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.pool._free[0] = m.pool._free[1]


def misfile_a_child(m: KVManager, writer: Branch, owner: Branch) -> None:
    key = next(iter(m.tree.children))
    m.tree.children[key + 1] = m.tree.children.pop(key)


def leave_an_empty_root(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.tree.open_root(b"nobody")


def change_a_token(m: KVManager, writer: Branch, owner: Branch) -> None:
    nodes = m.tree.nodes
    node = next(n for n in m.tree.children.values() if nodes.start[n] % 4 and not nodes.shares_first[n])
    m.tree.store._flat[m.tree.page_of(node, nodes.start[node]) * 4] += 1


def forget_that_a_page_is_shared(m: KVManager, writer: Branch, owner: Branch) -> None:
    nodes = m.tree.nodes
    node = next(n for n in m.tree.children.values() if nodes.shares_first[n])
    nodes.shares_first[node] = 0


def miscount_tokens(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.tree.num_tokens -= 1


def lock_without_an_owner(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.tree.lock(leaf(m))


def lose_a_protected_child(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.tree.nodes.locked_children[m.tree.nodes.parent[writer.node]] += 1


def shrink_the_lease_budget(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.leases.budget = 0


def lose_a_leaf(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.tree.order.unlink(leaf(m))


def claim_twice(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.claims[leaf(m)] = owner


def write_into_a_shared_page(m: KVManager, writer: Branch, owner: Branch) -> None:
    other = next(branch for branch in m.attached if branch.tail == Tail.SHARED)
    other.reserved += 1


def write_below_the_end_of_a_node(m: KVManager, writer: Branch, owner: Branch) -> None:
    writer.computed -= 2


def lose_a_table_entry(m: KVManager, writer: Branch, owner: Branch) -> None:
    writer.entries(0)[0] = 39


def own_a_page_of_the_tree(m: KVManager, writer: Branch, owner: Branch) -> None:
    m.pool.retain_one(int(writer.page_table[1]))
    m.pool.release_one(int(owner.page_table[-1]))
    owner.entries(0)[-1] = writer.page_table[1]


def swap_a_branchs_tokens(m: KVManager, writer: Branch, owner: Branch) -> None:
    writer.log._segment.buffer[:] = 9


def move_a_branch_to_another_namespace(m: KVManager, writer: Branch, owner: Branch) -> None:
    owner.namespace = b""


DAMAGE: list[tuple[Callable[[KVManager, Branch, Branch], None], str]] = [
    (damage_counter, "every_page_is_free_cached_locked_or_in_use"),
    (leak_a_page, "every_page_is_free_cached_locked_or_in_use"),
    (hold_a_page_too_often, "reference_counts_are_exact"),
    (list_a_free_page_twice, "each_free_page_is_in_the_free_list_once"),
    (misfile_a_child, "every_edge_hangs_at_the_end_of_its_parent"),
    (leave_an_empty_root, "roots_live_as_long_as_they_are_needed"),
    (change_a_token, "a_page_holds_the_whole_path_inside_it"),
    (forget_that_a_page_is_shared, "a_page_is_held_along_one_path"),
    (miscount_tokens, "counters_of_the_tree_are_exact"),
    (lock_without_an_owner, "every_lock_and_lease_has_an_owner"),
    (lose_a_protected_child, "protection_reaches_the_root"),
    (shrink_the_lease_budget, "leases_stay_within_their_budget"),
    (lose_a_leaf, "every_evictable_leaf_is_in_the_order"),
    (claim_twice, "a_leaf_has_at_most_one_writer"),
    (write_into_a_shared_page, "a_leaf_has_at_most_one_writer"),
    (write_below_the_end_of_a_node, "a_written_slot_is_read_by_its_writer_only"),
    (lose_a_table_entry, "a_page_table_is_the_path_and_then_the_branch_s_own"),
    (own_a_page_of_the_tree, "a_page_table_is_the_path_and_then_the_branch_s_own"),
    (swap_a_branchs_tokens, "a_branch_agrees_with_its_path"),
    (move_a_branch_to_another_namespace, "a_branch_agrees_with_its_path"),
]


@pytest.mark.parametrize(("damage", "rule"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_damage_is_found_by_the_rule_that_names_it(
    damage: Callable[[KVManager, Branch, Branch], None], rule: str
) -> None:
    m, writer, owner = busy_manager()
    damage(m, writer, owner)
    with pytest.raises(AssertionError):
        next(candidate for candidate in RULES if candidate.__name__ == rule)(m)
    with pytest.raises(AssertionError, match=r"tree|page|free"):
        check(m)


def test_every_rule_is_a_sentence_and_can_fail() -> None:
    for rule in RULES:
        assert rule.__doc__ and rule.__doc__.endswith("."), rule.__name__
    assert {rule for _, rule in DAMAGE} == {rule.__name__ for rule in RULES}


def test_a_check_changes_nothing_and_a_failure_shows_the_tree() -> None:
    m, _, _ = busy_manager()
    before = (m.stats(), m.tree.order.members())
    check(m)
    assert (m.stats(), m.tree.order.members()) == before
    m.tree.num_tokens += 1
    with pytest.raises(AssertionError, match=r"namespace b'other'"):
        check(m)
