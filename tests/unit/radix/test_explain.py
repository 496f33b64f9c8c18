from __future__ import annotations

from support.radix import cached

from anabranch.radix.explain import dump
from anabranch.radix.manager import KVManager


def reason(m: KVManager, tokens: list[int], namespace: bytes = b"", *, all_namespaces: bool = False) -> str:
    branch = m.open(namespace)
    m.append(branch, tokens)
    return m.explain(branch, all_namespaces=all_namespaces)


def test_why_a_token_is_not_cached_is_said_in_words() -> None:
    m = KVManager(16, 4)
    done = cached(m, list(range(12)))
    assert reason(m, []) == "the branch has no tokens"
    assert "all 12 tokens are cached; the last one is computed again" in reason(m, list(range(12)))
    assert "never seen: nothing is cached in this namespace" in reason(m, [1], b"new")
    assert "5 of 7 tokens are cached; token 5 (id 99) diverges at 5" in reason(m, [0, 1, 2, 3, 4, 99, 6])
    assert "goes on with id 5" in reason(m, [0, 1, 2, 3, 4, 99, 6])
    assert "never seen: the cached sequence ends there" in reason(m, [*range(12), 50])
    cached(m, [*range(12), 60])
    assert "diverges at 12: 1 other continuations" in reason(m, [*range(12), 50])
    m.release(done)


def test_an_evicted_token_is_told_from_one_that_was_never_seen() -> None:
    m = KVManager(16, 4)
    done = cached(m, list(range(12)))
    m.tree.evict(1)
    assert "8 of 12 tokens are cached; token 8 (id 8) was evicted" in reason(m, list(range(12)))
    assert "was evicted: this branch once had KV for 12 tokens" in m.explain(done)
    m.flush()
    assert "was evicted: this branch once had KV for 12 tokens" in m.explain(done)


def test_another_namespace_is_mentioned_to_operators_only() -> None:
    m = KVManager(16, 4)
    cached(m, [1, 2, 3, 4], b"tenant a")
    assert "tenant" not in reason(m, [1, 2, 3], b"tenant b") and "another" not in reason(m, [1, 2, 3], b"tenant b")
    assert "another namespace has 3 tokens of it" in reason(m, [1, 2, 3], b"tenant b", all_namespaces=True)


def test_explaining_changes_nothing() -> None:
    m = KVManager(16, 4)
    cached(m, list(range(12)))
    before = (m.stats(), m.tree.order.members())
    reason(m, [0, 1, 2, 99])
    assert (m.stats(), m.tree.order.members()) == before


def test_a_dump_shows_ranges_pages_and_protection_and_stays_short() -> None:
    m = KVManager(400, 1)
    branch = cached(m, [5, 6, 7])
    m.attach(branch)
    text = dump(m)
    assert "[0, 3)" in text and "locks 1" in text and ": 5 6 7" in text and "branch at node" in text
    for i in range(30):
        cached(m, [i + 10])
    assert len(dump(m, max_lines=10).splitlines()) <= 13 and "nodes in all" in dump(m, max_lines=10)
