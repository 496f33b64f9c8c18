from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from support.radix import cached, compute

from anabranch.radix.errors import BranchError, CacheSizeError, RadixError
from anabranch.radix.explain import dump
from anabranch.radix.invariants import check
from anabranch.radix.manager import KVManager
from anabranch.radix.placement import Placement


def test_a_hit_on_the_whole_prompt_still_leaves_one_token_to_compute() -> None:
    for length in (1, 4, 8, 9):
        m = KVManager(16, 4)
        cached(m, list(range(length)))
        again = m.open(b"")
        m.append(again, list(range(length)))
        assert m.lookup(again) == m.attach(again) == length - 1
        shared = again.page_table.tolist()
        compute(m, again)
        assert again.page_table[:-1].tolist() == shared[:-1], "full pages before the last token are shared"
        assert again.page_table[-1] != shared[-1], "the recomputed token must not be written into a shared page"


def test_an_empty_branch_has_nothing_cached_and_can_be_attached() -> None:
    m = KVManager(4, 4)
    branch = m.open(b"")
    assert m.lookup(branch) == 0 and m.attach(branch) == 0 and len(branch.page_table) == 0
    check(m)
    m.release(branch)
    check(m)
    assert not m.tree.roots


def test_a_conversation_that_comes_back_goes_on_in_its_last_page_without_a_copy() -> None:
    m = KVManager(64, 4)
    chat = m.open(b"")
    for turn in range(10):
        m.append(chat, [turn, 1, 2, 3, 4, 5, 6])
        m.attach(chat)
        compute(m, chat, len(chat) - 1)  # the last sampled token has no KV yet
        m.detach(chat)
    assert m.num_copies == 0 and m.num_cached() == -(-69 // 4), "one page for every four tokens, and none twice"
    assert len(m.tree.children) == 1, "the chat grew in one edge"


def test_the_first_of_two_that_go_on_from_a_page_claims_it_and_the_other_copies() -> None:
    m = KVManager(32, 4)
    trunk = cached(m, [0, 1, 2, 3, 4, 5])
    left, right = m.fork(trunk, 2)
    m.append(left, [10]), m.append(right, [20])
    m.attach(left), m.attach(right)
    tail = int(left.page_table[-1])
    assert compute(m, left) == ([], [])
    assert compute(m, right) == ([tail], [int(right.page_table[-1])])
    assert left.page_table[-1] == tail != right.page_table[-1]
    assert right.stable_pages == 1, "all but the page that was copied is as before"
    for branch in (left, right):
        m.detach(branch)
    check(m)
    assert m.num_cached() == 3 and m.num_copies == 1


def test_a_claim_ends_with_the_branch_and_passes_on() -> None:
    m = KVManager(32, 4)
    trunk = cached(m, [0, 1, 2, 3, 4, 5])
    first, second = m.fork(trunk, 2)
    m.append(first, [7])
    m.attach(first)
    m.reserve(first, 7)
    m.release(first)  # aborted before anything was committed
    check(m)
    m.append(second, [8])
    m.attach(second)
    assert compute(m, second) == ([], [])


def test_the_source_of_a_copy_stays_until_it_is_settled() -> None:
    m = KVManager(3, 4)
    trunk = cached(m, [0, 1, 2, 3, 4, 5])
    again = m.fork(trunk, 1)[0]
    m.attach(again)
    copies = m.reserve(again, 6)
    assert copies is not None and len(copies.src) == 1
    m.release(again, superseded=True)
    m.release(trunk)
    check(m)
    assert m.flush() == 0 and m.pool.refs(int(copies.src[0])) == 1
    m.settle()
    check(m)
    assert m.flush() == 2 and m.num_free() == 3


def test_fork_shares_full_pages_and_costs_no_page() -> None:
    m = KVManager(32, 4)
    trunk = m.open(b"")
    m.append(trunk, list(range(10)))
    m.attach(trunk)
    compute(m, trunk)
    free = m.num_free()
    children = m.fork(trunk, 5)
    assert m.num_free() == free
    for child in children:
        assert m.attach(child) == 9 and child.page_table.tolist() == trunk.page_table.tolist()
    check(m)


def count_calls(action: Callable[[], object]) -> int:
    """Calls that an action makes, of Python and C functions: a measure of work that no busy machine can disturb."""
    calls = 0

    def tracer(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(tracer)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("action", ["fork", "extend", "look up"])
def test_work_does_not_depend_on_how_long_the_branch_is(action: str) -> None:
    calls = []
    for length in (1_008, 20_000):
        m = KVManager(4_000, 16)
        branch = cached(m, np.random.default_rng(0).integers(0, 1000, length).tolist())
        m.append(branch, [1] * 200)
        m.attach(branch)
        m.reserve(branch, len(branch))
        match action:
            case "fork":
                calls.append(count_calls(lambda m=m, branch=branch: m.fork(branch, 4)))
            case "extend":
                m.commit(branch, len(branch))
                calls.append(count_calls(lambda m=m, branch=branch: m.publish(branch)))
            case "look up":
                child = m.fork(branch, 1)[0]
                calls.append(count_calls(lambda m=m, child=child: m.lookup(child)))
    assert calls[0] == calls[1]


def test_a_prompt_in_chunks_touches_only_what_is_new() -> None:
    m = KVManager(200, 16)
    branch = m.open(b"")
    m.append(branch, list(range(3000)))
    m.attach(branch)
    matched = []
    m.tree.match, plain = lambda *a: (matched.append(len(a[2])), plain(*a))[1], m.tree.match  # type: ignore[method-assign]
    for upto in range(100, 3001, 100):
        m.reserve(branch, upto)
        m.commit(branch, upto)
        m.publish(branch)
    assert matched == [100] * 30


def test_duplicates_are_given_back_and_the_table_switches_to_the_trees_pages() -> None:
    m = KVManager(32, 4)
    first, second = m.open(b""), m.open(b"")
    for branch in (first, second):
        m.append(branch, list(range(10)))
        m.attach(branch)
        compute(m, branch)
    assert m.num_in_use() == 6
    m.publish(first)
    version = second.table_version
    m.publish(second)
    check(m)
    assert second.page_table.tolist() == first.page_table.tolist() and m.num_in_use() == 0 and m.num_locked() == 3
    assert second.table_version > version and second.stable_since(version) == 0


def test_a_page_that_a_step_in_flight_writes_is_kept_though_others_have_its_tokens() -> None:
    m = KVManager(32, 4)
    first, second = m.open(b""), m.open(b"")
    for branch in (first, second):
        m.append(branch, list(range(6)))
        m.attach(branch)
        compute(m, branch)
    m.reserve(second, 7)
    writing = int(second.page_table[1])
    m.publish(first)
    m.publish(second)
    check(m)
    assert second.page_table.tolist() == [first.page_table[0], writing]
    m.append(second, [99])
    m.commit(second, 7)
    m.detach(second)
    check(m)
    assert m.lookup(second) == 6


@pytest.mark.parametrize("goes_on_with", [99, 6])
def test_a_claimed_page_is_kept_while_it_is_written_though_others_have_its_tokens(goes_on_with: int) -> None:
    m = KVManager(32, 8)
    trunk = cached(m, [0, 1, 2, 3])
    writer, other = m.fork(trunk, 2)
    for branch in (writer, other):
        m.append(branch, [4, 5])
        m.attach(branch)
        compute(m, branch)
    m.append(other, [6])
    compute(m, other)
    assert m.num_copies == 1, "the writer claimed the trunk's page, the other copied it"
    m.reserve(writer, 7)  # a step in flight writes position 6
    table = writer.page_table.tolist()
    m.publish(other)
    m.publish(writer)
    check(m)
    assert writer.page_table.tolist() == table, "the step in flight must find its page where it was"
    m.append(writer, [goes_on_with])
    m.commit(writer, 7)
    m.detach(writer)
    check(m)
    m.append(writer, [50])
    assert m.lookup(writer) == 7


def test_two_that_diverge_in_the_same_page_both_keep_theirs() -> None:
    m = KVManager(32, 4)
    branches = [m.open(b"") for _ in range(2)]
    for i, branch in enumerate(branches):
        m.append(branch, [0, 1, 2, 3, 4, 50 + i])
        m.attach(branch)
        compute(m, branch)
    for branch in branches:
        m.detach(branch)
        check(m)
    assert m.num_cached() == 3, "the full page is shared, the page of the divergence is not"
    assert all(m.lookup(branch) == 5 for branch in branches)


def test_rollback_drops_pages_and_what_was_dropped_is_evicted_first() -> None:
    m = KVManager(8, 4)
    other = cached(m, list(range(100, 108)))
    branch = cached(m, list(range(20)))
    m.rollback(branch, 7)
    check(m)
    assert branch.tokens().tolist() == list(range(7)) and m.lookup(branch) == 6
    newcomer = cached(m, list(range(200, 216)))
    assert (m.lookup(other), m.lookup(branch), m.lookup(newcomer)) == (7, 6, 15)


def test_a_rolled_back_branch_goes_on_beside_what_it_dropped() -> None:
    m = KVManager(16, 4)
    branch = m.open(b"")
    m.append(branch, list(range(10)))
    m.attach(branch)
    compute(m, branch)
    m.publish(branch)
    m.rollback(branch, 6, superseded=False)
    assert branch.computed == 6 and len(branch.page_table) == 2
    m.append(branch, [70, 71])
    copies = compute(m, branch)
    assert copies[0] and copies[1], "the page is shared with what was dropped"
    m.detach(branch)
    old = m.open(b"")
    m.append(old, list(range(11)))
    assert m.lookup(old) == 10


def test_rolling_back_below_a_token_that_was_to_be_recomputed_forgets_it() -> None:
    m = KVManager(16, 4)
    branch = cached(m, [0, 1, 2, 3, 4])
    m.attach(branch)
    assert branch.computed == 4
    m.rollback(branch, 4)
    m.append(branch, [9, 9])
    compute(m, branch)
    m.detach(branch)
    check(m)
    other = m.open(b"")
    m.append(other, [0, 1, 2, 3, 9, 9, 9])
    assert m.lookup(other) == 6


def test_a_branch_is_not_fooled_by_what_grew_where_its_own_tail_was_evicted() -> None:
    m = KVManager(16, 4)
    sleeper = cached(m, list(range(16)))
    m.tree.evict(2)
    cached(m, [*range(8), 70, 71, 72, 73, 74, 75, 76, 77])
    assert m.lookup(sleeper) == 8
    assert m.attach(sleeper) == 8
    check(m)


def test_adopt_takes_the_winners_tokens_and_pages_and_closes_it() -> None:
    m = KVManager(16, 4)
    trunk = cached(m, list(range(6)))
    winner, loser = m.fork(trunk, 2)
    m.append(winner, [7, 8]), m.append(loser, [9])
    m.attach(winner)
    compute(m, winner)
    table = winner.page_table.tolist()
    m.adopt(trunk, winner)
    check(m)
    assert winner.closed and trunk.attached and trunk.page_table.tolist() == table and trunk.computed == 8
    assert trunk.tokens().tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    m.release(loser, superseded=True)
    m.detach(trunk)
    check(m)
    with pytest.raises(BranchError, match="namespace"):
        m.adopt(trunk, m.open(b"other"))


def test_a_shortage_is_none_and_changes_nothing() -> None:
    m = KVManager(4, 4)
    branch = m.open(b"")
    m.append(branch, list(range(40)))
    m.attach(branch)
    compute(m, branch, 8)
    before = dump(m)
    assert m.can_reserve(branch, 40) == 6 and m.reserve(branch, 40) is None
    assert dump(m) == before
    assert m.can_reserve(branch, 16) == 0 and m.reserve(branch, 16) is not None


@pytest.mark.parametrize("computed", [0, 3, 4, 7, 10])
def test_discarded_kv_leaves_the_tree_up_to_where_somebody_else_needs_it(computed: int) -> None:
    m = KVManager(64, 4)
    cached(m, [*range(8), 50, 51])
    branch = m.open(b"")
    m.append(branch, list(range(24)))
    assert m.attach(branch) == 8
    for upto in (12, 12 + computed):
        compute(m, branch, upto)
        if upto == 12:
            m.publish(branch)
    m.discard(branch)
    check(m)
    assert not branch.attached and len(branch) == 24 and m.lookup(branch) == 8
    assert m.num_cached() == 3, "the two shared pages, and that of the other branch"
    m.attach(branch)
    compute(m, branch)
    m.detach(branch)
    assert m.lookup(branch) == 23
    check(m)


def test_discarding_a_path_of_ones_own_removes_all_of_it_and_its_root() -> None:
    m = KVManager(16, 4)
    cached(m, list(range(10)), b"mine")
    branch = m.open(b"mine")
    m.append(branch, list(range(14)))
    m.attach(branch)
    compute(m, branch)
    m.discard(branch)
    check(m)
    assert m.num_free() == 16 and m.tree.find_root(b"mine") is None and m.lookup(branch) == 0


def test_what_a_copy_reads_and_what_is_leased_is_not_discarded() -> None:
    m = KVManager(16, 4)
    parent = cached(m, list(range(6)))
    m.lease(parent, None, 0.0)
    (child,) = m.fork(parent, 1)
    m.append(child, [90, 91])
    m.attach(child)
    compute(m, child)
    m.discard(child)
    check(m)
    assert m.lookup(parent) == 5 and m.num_locked() == 2


def test_trim_gives_back_scratch_pages_only() -> None:
    m = KVManager(16, 4)
    branch = m.open(b"")
    m.append(branch, list(range(6)))
    m.attach(branch)
    compute(m, branch)
    m.reserve(branch, 20)
    assert len(branch.page_table) == 5
    m.trim(branch)
    check(m)
    assert len(branch.page_table) == 2 and branch.reserved == 6 and m.num_in_use() == 2


def test_scratch_positions_that_were_committed_but_never_known_are_dropped() -> None:
    m = KVManager(16, 4)
    branch = m.open(b"")
    m.append(branch, [0, 1, 2])
    m.attach(branch)
    compute(m, branch, 9)
    m.detach(branch)
    check(m)
    assert m.num_cached() == 1 and m.tree.num_tokens == 3


def test_pages_add_up_in_every_state() -> None:
    m = KVManager(16, 4)
    idle = cached(m, list(range(8)))
    running = m.open(b"x")
    m.append(running, list(range(5)))
    m.attach(running)
    compute(m, running)
    assert (m.num_free(), m.num_cached(), m.num_locked(), m.num_in_use()) == (12, 2, 0, 2)
    m.publish(running)
    assert (m.num_free(), m.num_cached(), m.num_locked(), m.num_in_use()) == (12, 2, 2, 0)
    m.release(running), m.release(idle)
    assert m.flush() == 4 and m.num_free() == 16


def test_a_closed_branch_is_refused_and_closing_again_is_not() -> None:
    m = KVManager(4, 4)
    branch = cached(m, [1, 2])
    m.release(branch)
    m.release(branch)
    for call in (m.attach, m.lookup, lambda b: m.append(b, [1]), lambda b: m.fork(b, 1), lambda b: m.rollback(b, 0)):
        with pytest.raises(BranchError, match="closed"):
            call(branch)  # type: ignore[operator]


def test_misuse_is_refused_with_the_numbers() -> None:
    m = KVManager(4, 4)
    branch = cached(m, [1, 2])
    with pytest.raises(BranchError, match="2 tokens to 3"):
        m.rollback(branch, 3)
    m.attach(branch)
    with pytest.raises(BranchError, match="attached already"):
        m.attach(branch)
    with pytest.raises(CacheSizeError, match=r"lease_share.*1\.5"):
        KVManager(4, 4, lease_share=1.5)
    with pytest.raises(CacheSizeError, match="cost, lru"):
        KVManager(4, 4, policy="fifo")
    assert issubclass(CacheSizeError, RadixError)


def test_a_branch_cannot_commit_what_it_did_not_reserve() -> None:
    m = KVManager(4, 4)
    branch = m.open(b"")
    m.append(branch, [1, 2, 3])
    m.attach(branch)
    m.reserve(branch, 2)
    with pytest.raises(AssertionError, match="outside of what was reserved"):
        m.commit(branch, 3)


def test_lookups_are_answered_from_memory_until_the_tree_changes_where_they_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, searched, plain = KVManager(16, 4), [], Placement.find
    monkeypatch.setattr(Placement, "find", lambda self, b: (searched.append(b), plain(self, b))[1])
    waiting = m.open(b"")
    m.append(waiting, list(range(12)))
    assert m.lookup(waiting) == 0 and searched.pop() is waiting
    epoch = m.epoch
    assert m.lookup(waiting) == 0 and not searched and m.epoch == epoch
    cached(m, list(range(9)))
    assert m.epoch != epoch and m.lookup(waiting) == 9 and waiting in searched
    searched.clear()
    cached(m, [500, 501], b"elsewhere")
    assert m.lookup(waiting) == 9 and waiting not in searched, "a change elsewhere does not concern it"
    m.flush()
    assert m.lookup(waiting) == 0


def test_memory_of_the_tree_does_not_grow_under_churn() -> None:
    m = KVManager(64, 4)
    rng, sizes = np.random.default_rng(0), []
    for i in range(600):
        m.release(cached(m, rng.integers(0, 4, int(rng.integers(1, 60))).tolist(), b"ns%d" % (i % 7)))
        if i % 200 == 199:
            sizes.append(len(m.tree.nodes.parent))
    assert sizes[0] == sizes[1] == sizes[2] and len(m.tree.children) <= 64 * 4
    m.flush()
    assert not m.tree.children and not m.tree.roots


def test_stats_name_what_happened() -> None:
    m = KVManager(8, 4)
    trunk = cached(m, list(range(6)))
    left, right = m.fork(trunk, 2)
    m.append(left, [1]), m.append(right, [2])
    for branch in (left, right):
        m.attach(branch)
        compute(m, branch)
    stats = m.stats()
    assert (stats["copies"], stats["num_attached"], stats["hit_tokens"], stats["matched_tokens"]) == (1, 2, 12, 20)
    m.release(left), m.release(right), m.release(trunk)
    assert m.flush() == m.stats()["evictions"] == 3
