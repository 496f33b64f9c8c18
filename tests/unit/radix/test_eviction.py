from __future__ import annotations

import random

import numpy as np
import pytest

from anabranch.radix.branch import Branch
from anabranch.radix.eviction import LRU, SUPERSEDED, CostAware, EvictionOrder, EvictionPolicy
from anabranch.radix.invariants import check
from anabranch.radix.manager import KVManager
from anabranch.radix.nodes import Nodes


def order_of(policy: EvictionPolicy, num_nodes: int) -> tuple[Nodes, EvictionOrder, list[int]]:
    nodes = Nodes()
    order = EvictionOrder(nodes, policy)
    return nodes, order, [nodes.alloc() for _ in range(num_nodes)]


def test_the_order_of_use_is_kept_through_random_touches() -> None:
    rng = random.Random(1)
    _, order, ids = order_of(LRU(), 20)
    expected: list[int] = []
    for _ in range(500):
        node = rng.choice(ids)
        if node in expected:
            expected.remove(node)
        match rng.choice(["touch", "supersede", "unlink", "touch"]):
            case "touch":
                order.touch(node)
                expected.append(node)
            case "supersede":
                order.supersede(node)
                expected.insert(0, node)
            case "unlink":
                order.unlink(node)
        superseded = [n for n in order.members() if order._nodes.queue_class[n] == SUPERSEDED]
        assert order.head() == (order.members()[0] if expected else None)
        assert sorted(order.members()) == sorted(expected)
        assert [n for n in order.members() if n not in superseded] == [n for n in expected if n not in superseded]


def test_superseded_leaves_go_before_everything_else() -> None:
    for policy in (LRU(), CostAware()):
        _, order, (old, middle, new) = order_of(policy, 3)
        for node in (old, middle, new):
            order.touch(node)
        order.supersede(new)
        assert order.head() == new


def test_a_parent_that_was_not_used_since_goes_to_the_head_when_it_becomes_a_leaf() -> None:
    _, order, (parent, other) = order_of(LRU(), 2)
    order.touch(other)
    order.expose(parent)
    assert order.members() == [parent, other]


def test_a_parent_keeps_the_place_of_its_own_last_use() -> None:
    _, order, (parent, other) = order_of(LRU(), 2)
    order.touch(other)
    order.touch(parent)
    order.expose(parent)
    assert order.members() == [other, parent]


def test_cost_aware_keeps_the_deep_and_the_awaited_longer() -> None:
    nodes, order, (shallow, deep, awaited) = order_of(CostAware(linear_context=1000), 3)
    nodes.end[shallow], nodes.end[deep], nodes.end[awaited] = 10, 20_000, 10
    nodes.idle[awaited] = 3
    for node in (deep, awaited, shallow):  # so LRU would take the shallow one last
        order.touch(node)
    assert order.head() == shallow


def test_cost_aware_ages_what_is_never_used_again() -> None:
    nodes, order, (precious, *others) = order_of(CostAware(linear_context=1000), 400)
    nodes.end[precious] = 50_000
    order.touch(precious)
    for survived, node in enumerate(others):
        order.touch(node)
        victim = order.head()
        assert victim is not None
        order.advance(victim)
        order.unlink(victim)
        if victim == precious:
            assert survived > 10, "it was worth no more than the rest"
            return
    raise AssertionError("it stayed for ever")


def run_prompt(m: KVManager, tokens: list[int]) -> Branch:
    branch = m.open(b"")
    m.append(branch, tokens)
    m.attach(branch)
    assert m.reserve(branch, len(branch)) is not None
    m.commit(branch, len(branch))
    m.detach(branch)
    return branch


def hits_of_a_mixed_trace(policy: str) -> int:
    """A shared prompt that comes back now and then, in a flood of prompts that never do."""
    rng = np.random.default_rng(5)
    m = KVManager(64, 4, policy=policy)
    shared, hits = rng.integers(0, 1000, 64).tolist(), 0
    for i in range(400):
        if i % 20 < 3:
            branch = run_prompt(m, [*shared, *rng.integers(0, 1000, 8).tolist()])
        else:
            branch = run_prompt(m, rng.integers(0, 1000, 40).tolist())
        m.release(branch)
        check(m)
    hits = m.stats()["hit_tokens"]
    assert isinstance(hits, int)
    return hits


def test_cost_aware_saves_more_than_lru_when_a_flood_passes_a_prompt_that_comes_back() -> None:
    assert hits_of_a_mixed_trace("cost") > 1.1 * hits_of_a_mixed_trace("lru")


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_dropped_losers_are_evicted_before_older_work(policy: str) -> None:
    m = KVManager(12, 4, policy=policy)
    old = run_prompt(m, list(range(100, 116)))
    trunk = run_prompt(m, list(range(16)))
    loser = m.fork(trunk, 1)[0]
    m.append(loser, [70, 71, 72, 73])
    m.attach(loser)
    assert m.reserve(loser, 20) is not None
    m.commit(loser, 20)
    m.release(loser, superseded=True)
    assert m.num_free() == 3
    run_prompt(m, list(range(200, 216)))
    check(m)
    assert (m.lookup(old), m.lookup(trunk)) == (15, 15)


def test_what_a_sibling_still_waits_on_is_not_sent_ahead() -> None:
    m = KVManager(12, 4)
    old = run_prompt(m, list(range(100, 116)))
    trunk = run_prompt(m, list(range(16)))
    first, second = m.fork(trunk, 2)
    m.release(first, superseded=True)
    m.tree.evict(4)
    assert m.lookup(old) == 0 and m.lookup(second) == 15
