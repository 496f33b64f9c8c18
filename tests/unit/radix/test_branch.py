from __future__ import annotations

import numpy as np
import pytest
from support.radix import cached, compute

from anabranch.radix.branch import MAX_VERSIONS, Branch
from anabranch.radix.manager import KVManager
from anabranch.radix.tokens import TokenLog


def test_tokens_and_tables_are_read_only_to_others() -> None:
    m = KVManager(8, 4)
    branch = cached(m, [1, 2, 3, 4, 5])
    m.attach(branch)
    for view in (branch.tokens(), branch.tokens(1, 3), branch.page_table):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 9
    assert branch.tokens(1, 3).tolist() == [2, 3] and branch.tokens(3, 99).tolist() == [4, 5]


def test_stable_since_answers_for_every_version_however_old() -> None:
    branch = Branch(b"", TokenLog())
    branch.begin_table(100)[:100] = np.arange(100)
    rng = np.random.default_rng(0)
    history = {branch.table_version: branch.page_table.copy()}
    for _ in range(3 * MAX_VERSIONS):
        first = int(rng.integers(50, 100))
        branch.entries(first)[:] += 1000
        branch.table_changed(first)
        history[branch.table_version] = branch.page_table.copy()
        for version, table in history.items():
            stable = branch.stable_since(version)
            assert (table[:stable] == branch.page_table[:stable]).all()
    assert branch.stable_since(branch.table_version) == 100
    assert branch.stable_since(branch.table_version - 1) == first


def test_growing_the_table_is_no_change() -> None:
    m = KVManager(64, 4)
    branch = m.open(b"")
    m.append(branch, list(range(200)))
    m.attach(branch)
    version = branch.table_version
    for upto in range(10, 200, 10):
        compute(m, branch, upto)
        m.publish(branch)
    assert branch.table_version == version and branch.stable_since(version) == len(branch.page_table) == 48


def test_a_branch_that_is_not_attached_has_no_table() -> None:
    m = KVManager(8, 4)
    with pytest.raises(AssertionError, match="no page table"):
        cached(m, [1, 2]).page_table  # noqa: B018
