from __future__ import annotations

import pytest
from support.radix import cached

from anabranch.radix.errors import BranchError
from anabranch.radix.invariants import check
from anabranch.radix.manager import KVManager


def test_a_leased_path_survives_eviction_until_its_time() -> None:
    m = KVManager(16, 4, lease_share=0.5)
    branch = cached(m, list(range(10)))
    assert m.lease(branch, until=5.0, now=1.0)
    check(m)
    assert m.num_cached() == 0 and m.num_locked() == 3 and m.flush() == 0
    m.expire(4.9)
    assert m.flush() == 0
    m.expire(5.0)
    check(m)
    assert m.flush() == 3


def test_a_lease_ends_when_its_branch_comes_back_or_closes() -> None:
    m = KVManager(16, 4, lease_share=0.5)
    first, second = cached(m, list(range(6))), cached(m, list(range(50, 56)))
    assert m.lease(first, None, 0.0) and m.lease(second, None, 0.0)
    m.attach(first)
    m.release(second)
    check(m)
    assert len(m.leases) == 0 and m.num_locked() == 2


def test_the_oldest_lease_is_demoted_when_the_budget_is_used_up() -> None:
    m = KVManager(16, 4, lease_share=0.25)
    branches = [cached(m, list(range(100 * i, 100 * i + 8))) for i in range(3)]
    assert all(m.lease(branch, None, 0.0) for branch in branches)
    check(m)
    assert branches[0] not in m.leases and len(m.leases) == 2 and m.stats()["num_demoted_leases"] == 1
    assert m.flush() == 2 and m.lookup(branches[0]) == 0 and m.lookup(branches[2]) == 7


def test_a_path_over_the_budget_gets_no_lease_and_disturbs_no_other() -> None:
    m = KVManager(16, 4, lease_share=0.25)
    small, large = cached(m, list(range(8))), cached(m, list(range(100, 120)))
    assert m.lease(small, None, 0.0)
    assert not m.lease(large, None, 0.0)
    assert small in m.leases


def test_a_shared_prefix_counts_once() -> None:
    m = KVManager(16, 4, lease_share=0.25)
    trunk = cached(m, list(range(12)))
    children = m.fork(trunk, 5)
    assert all(m.lease(child, None, 0.0) for child in children)
    assert m.tree.num_leased == 3 and len(m.leases) == 5


def test_running_work_takes_the_pages_of_leases_before_it_gives_up() -> None:
    m = KVManager(8, 4, lease_share=1.0)
    branches = [cached(m, list(range(100 * i, 100 * i + 16))) for i in range(2)]
    assert all(m.lease(branch, None, 0.0) for branch in branches)
    running = m.open(b"")
    m.append(running, list(range(900, 920)))
    m.attach(running)
    assert m.can_reserve(running, 20) == 0 and m.reserve(running, 20) is not None
    check(m)
    assert len(m.leases) == 0
    m.detach(running)


def test_a_lease_is_ended_by_one_whose_time_is_past() -> None:
    m = KVManager(16, 4, lease_share=0.5)
    branch = cached(m, list(range(6)))
    assert m.lease(branch, 9.0, 0.0) and not m.lease(branch, 1.0, 2.0)
    check(m)
    assert branch not in m.leases and m.num_locked() == 0


def test_nothing_cached_nothing_leased() -> None:
    m = KVManager(8, 4)
    branch = m.open(b"")
    m.append(branch, [1, 2, 3])
    assert not m.lease(branch, 10.0, 0.0)
    done = cached(m, [1, 2, 3])
    assert not m.lease(done, until=3.0, now=3.0), "its time is past"
    m.attach(done)
    with pytest.raises(BranchError, match="needs no lease"):
        m.lease(done, 10.0, 0.0)


def test_a_winners_lease_goes_to_the_branch_that_adopts_it() -> None:
    m = KVManager(16, 4, lease_share=0.5)
    trunk = cached(m, list(range(6)))
    winner = m.fork(trunk, 1)[0]
    assert m.lease(winner, 5.0, 0.0)
    m.adopt(trunk, winner)
    check(m)
    assert trunk in m.leases
    m.expire(5.0)
    assert trunk not in m.leases
    check(m)


def test_leases_that_ended_early_leave_nothing_behind() -> None:
    m = KVManager(16, 4, lease_share=0.5)
    branch = cached(m, list(range(6)))
    for i in range(1000):
        assert m.lease(branch, 1e9, 0.0)
        m.expire(float(i) / 1000)
    assert len(m.leases._ends) < 200
