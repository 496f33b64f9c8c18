"""Driving a cache by hand, as a scheduler with steps that return at once would."""

from __future__ import annotations

from anabranch.radix.branch import Branch
from anabranch.radix.explain import dump
from anabranch.radix.invariants import check
from anabranch.radix.manager import KVManager


def compute(m: KVManager, branch: Branch, upto: int | None = None) -> tuple[list[int], list[int]]:
    """Reserve and commit as a step would; returns the copies it took."""
    upto = len(branch) if upto is None else upto
    copies = m.reserve(branch, upto)
    assert copies is not None, dump(m)
    m.commit(branch, upto)
    m.settle()
    check(m)
    return copies.src.tolist(), copies.dst.tolist()


def cached(m: KVManager, tokens: list[int], namespace: bytes = b"") -> Branch:
    """An idle branch whose tokens are all computed."""
    branch = m.open(namespace)
    m.append(branch, tokens)
    m.attach(branch)
    compute(m, branch)
    m.detach(branch)
    check(m)
    return branch
