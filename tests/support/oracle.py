"""A cache too simple to be wrong, and a device that remembers what every KV slot holds.

`World` drives a real `KVManager` the way a scheduler and a worker do: it plans steps that reach the device later and in order,
also for branches that were detached, rolled back or closed meanwhile. Beside it stand a set of prefixes (what the
tree must hold) and a dictionary of slots (what the device holds); `check` compares everything with them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from anabranch.radix.branch import Branch
from anabranch.radix.invariants import check as check_rules
from anabranch.radix.manager import KVManager
from anabranch.radix.nodes import NONE

Prefix = tuple[bytes, tuple[int, ...]]  # a namespace and the tokens up to and including a position


class NaivePrefixCache:
    """All cached prefixes, one by one."""

    def __init__(self) -> None:
        self.prefixes: set[Prefix] = set()

    def add(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        self.prefixes.update((namespace, tokens[: i + 1]) for i in range(len(tokens)))

    def match_len(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        length = 0
        while length < len(tokens) and (namespace, tokens[: length + 1]) in self.prefixes:
            length += 1
        return length


@dataclass
class Step:
    """What the worker was told for one branch: copies, then KV for [start, stop), through the table of that moment."""

    branch: Branch
    life: int
    start: int
    stop: int
    table: np.ndarray
    copies: list[tuple[int, int]]


@dataclass
class World:
    """A manager, the branches on it, the steps in flight, and the two oracles."""

    num_pages: int
    page_size: int
    policy: str = "lru"
    lease_share: float = 0.25
    now: float = 0.0
    manager: KVManager = field(init=False)
    naive: NaivePrefixCache = field(default_factory=NaivePrefixCache)
    slots: dict[tuple[int, int], Prefix | str] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    lives: dict[Branch, int] = field(default_factory=dict)  # grows when steps in flight become void
    planned: dict[Branch, int] = field(default_factory=dict)
    num_checks: int = 0
    flight: list[Step] = field(default_factory=list)
    tables: dict[Branch, tuple[int, list[int]]] = field(default_factory=dict)  # what the worker has: (version, entries)

    def __post_init__(self) -> None:
        self.manager = KVManager(self.num_pages, self.page_size, policy=self.policy, lease_share=self.lease_share)

    # ------------------------------------------------------------ what can happen

    def open(self, namespace: bytes) -> Branch:
        return self._know(self.manager.open(namespace))

    def append(self, branch: Branch, tokens: list[int]) -> None:
        before = tokens_of(branch)
        self.manager.append(branch, tokens)
        assert tokens_of(branch) == before + tuple(tokens)

    def echo(self, branch: Branch, n: int) -> None:
        """Append what another branch has there, if its tokens begin with this one's: two that compute the same."""
        mine = tokens_of(branch)
        for other in self.branches:
            theirs = tokens_of(other)
            if len(theirs) > len(mine) and theirs[: len(mine)] == mine and other.namespace == branch.namespace:
                return self.append(branch, list(theirs[len(mine) : len(mine) + n]))

    def fork(self, branch: Branch, n: int) -> list[Branch]:
        self._publish_in_oracle(branch)
        children = self.manager.fork(branch, n)
        for child in children:
            assert tokens_of(child) == tokens_of(branch)
            self._know(child)
        return children

    def rollback(self, branch: Branch, length: int, *, superseded: bool) -> None:
        before, computed = tokens_of(branch), branch.computed
        self._void_steps(branch)
        self.manager.rollback(branch, length, superseded=superseded)
        assert tokens_of(branch) == before[:length]
        if branch.attached:
            assert branch.computed == min(computed, length)
            self.planned[branch] = branch.computed

    def release(self, branch: Branch, *, superseded: bool) -> None:
        self._publish_in_oracle(branch)
        self.manager.release(branch, superseded=superseded)
        self.manager.release(branch, superseded=superseded)  # idempotent
        self._forget(branch)

    def adopt(self, branch: Branch, winner: Branch) -> None:
        self._publish_in_oracle(branch)
        tokens, attached, computed = tokens_of(winner), winner.attached, winner.computed
        self._void_steps(winner)
        self._void_steps(branch)
        version = branch.table_version
        self.manager.adopt(branch, winner)
        assert (tokens_of(branch), branch.attached, branch.computed) == (tokens, attached, computed)
        assert branch.table_version > version and branch.stable_pages == 0
        self._forget(winner)
        self.tables.pop(branch, None)
        self.planned[branch] = branch.computed

    def attach(self, branch: Branch) -> None:
        expected = self._expected_lookup(branch)
        computed = self.manager.attach(branch)
        assert computed == branch.computed == expected, f"attached at {computed} instead of {expected}"
        self.planned[branch] = computed
        self.tables.pop(branch, None)  # a new slot of the worker

    def plan(self, branch: Branch, upto: int, *, settle: bool) -> bool:
        """Plan KV for [planned, upto). False if the pages do not suffice."""
        m = self.manager
        start = self.planned[branch]
        before = (branch.page_table.tolist(), branch.reserved, m.num_free(), m.num_cached(), m.tree.num_leased_only)
        short, evicted = m.can_reserve(branch, upto), m.tree.num_evicted_pages
        fresh = m._num_new_pages(branch, upto)
        copies = m.reserve(branch, upto)
        assert (copies is None) == (short > 0), f"{short} pages short, but reserve returned {copies}"
        evicted = m.tree.num_evicted_pages - evicted
        if copies is None:
            after = (branch.page_table.tolist(), branch.reserved, m.num_free(), m.num_cached(), m.tree.num_leased_only)
            assert before == after and not evicted, "a reservation that failed changed something"
            return False
        assert evicted == max(0, fresh - before[2]), (
            f"evicted {evicted} pages for {fresh} new ones, {before[2]} were free"
        )
        pairs = list(zip(copies.src.tolist(), copies.dst.tolist()))
        self.flight.append(Step(branch, self.lives[branch], start, upto, branch.page_table.copy(), pairs))
        self._send_table(branch)
        self.planned[branch] = upto
        if settle:
            self.manager.settle()
        return True

    def run(self, next_token: int) -> None:
        """The device runs the oldest step in flight, and its result comes back."""
        step = self.flight.pop(0)
        for source, target in step.copies:
            for slot in range(self.page_size):
                self.slots[target, slot] = self.slots.get((source, slot), "never written")
        branch, live = step.branch, self.lives.get(step.branch) == step.life
        if live and step.stop == len(branch) + 1:
            self.manager.append(branch, [next_token])  # the step before sampled it
        tokens = tokens_of(branch) if live else ()
        if live:
            self._must_read(branch.namespace, tokens[: step.start], step.table)
        for position in range(step.start, step.stop):
            place = (int(step.table[position // self.page_size]), position % self.page_size)
            written = live and position < len(tokens)
            self.slots[place] = (branch.namespace, tokens[: position + 1]) if written else "void"
        if live:
            self.manager.commit(branch, step.stop)

    def publish(self, branch: Branch) -> None:
        self._publish_in_oracle(branch)
        self.manager.publish(branch)

    def trim(self, branch: Branch) -> None:
        kept = max(branch.computed, min(branch.reserved, len(branch)))
        self.manager.trim(branch)
        self._void_steps(branch)
        self.planned[branch] = branch.computed
        assert branch.num_pages <= max(-(-kept // self.page_size), branch.own)

    def detach(self, branch: Branch) -> None:
        self._publish_in_oracle(branch)
        self._void_steps(branch)
        self.manager.detach(branch)
        assert not branch.attached and not branch.computed and not branch.num_pages

    def discard(self, branch: Branch) -> None:
        """What it has not published stays unknown; what it had may go, unless somebody else needs it."""
        tokens, known = len(branch), self.manager.tree.nodes.end[branch.node]
        self._void_steps(branch)
        self.manager.discard(branch)
        assert not branch.attached and not branch.num_pages and len(branch) == tokens
        assert branch.position <= known

    def lease(self, branch: Branch, seconds: float | None) -> None:
        granted = self.manager.lease(branch, None if seconds is None else self.now + seconds, self.now)
        assert not granted or branch in self.manager.leases

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire(self.now)

    def flush(self) -> None:
        cached, free = self.manager.num_cached(), self.manager.num_free()
        assert self.manager.flush() == cached
        assert (self.manager.num_cached(), self.manager.num_free()) == (0, free + cached)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """The rules hold, the tree has what it must, each look-up is right, and every table reads its own prefix."""
        m = self.manager
        self.num_checks += 1
        check_rules(m)
        present = self._read_tree()
        missing, extra = self.naive.prefixes - present, present - self.naive.prefixes
        assert not extra, f"the tree has prefixes that nobody computed: {sorted(extra)[:3]}"
        if m.tree.num_evicted_pages == 0 and not m.tree.ghosts:
            assert not missing, f"the tree lost {sorted(missing)[:3]} without an eviction"
        self.naive.prefixes = present  # what is missing was evicted, and may be published again
        m.tree.num_evicted_pages = 0
        m.tree.ghosts.clear()
        nodes = m.tree.nodes
        waiting = Counter(b.node for b in self.branches if not b.attached and m.placement.living_node(b) != NONE)
        wrong = [node for node in nodes.ids() if nodes.idle[node] != waiting[node]]
        assert not wrong, f"nodes {wrong} have another number of idle branches than they say"
        copying = {target for step in self.flight for _, target in step.copies}
        for branch in self.branches:
            if branch.attached:
                table = branch.page_table.tolist()
                ready = next((i for i, page in enumerate(table) if page in copying), len(table)) * self.page_size
                self._must_read(branch.namespace, tokens_of(branch)[: min(ready, branch.computed)], branch.page_table)
            elif self.num_checks % 4 == 0:  # in between, branches remember a place that others change
                found, expected = m.lookup(branch), self._expected_lookup(branch)
                assert found == expected, f"look-up of {tokens_of(branch)} is {found} instead of {expected}"
                assert m.lookup(branch) == found

    def finish(self) -> None:
        """Close everything: only cached pages remain, and then none."""
        for branch in list(self.branches):
            self.release(branch, superseded=False)
        self.manager.settle()
        self.check()
        m = self.manager
        assert (m.num_locked(), m.num_in_use(), len(m.leases)) == (0, 0, 0)
        self.flush()
        assert m.num_free() == m.pool.num_pages and not m.tree.children and not m.tree.roots
        assert len(m.tree.nodes) == m.tree.order.policy.num_classes, "a node is left over"

    # ------------------------------------------------------------ inside

    def _know(self, branch: Branch) -> Branch:
        self.branches.append(branch)
        self.lives[branch] = 0
        return branch

    def _forget(self, branch: Branch) -> None:
        assert branch.closed
        self.branches.remove(branch)
        del self.lives[branch]
        self.planned.pop(branch, None)
        self.tables.pop(branch, None)

    def _void_steps(self, branch: Branch) -> None:
        self.lives[branch] += 1

    def _publish_in_oracle(self, branch: Branch) -> None:
        if branch.attached:
            self.naive.add(branch.namespace, tokens_of(branch)[: branch.computed])

    def _expected_lookup(self, branch: Branch) -> int:
        tokens = tokens_of(branch)
        return max(0, min(self.naive.match_len(branch.namespace, tokens), len(tokens) - 1))

    def _must_read(self, namespace: bytes, tokens: tuple[int, ...], table: np.ndarray) -> None:
        for position in range(len(tokens)):
            place = (int(table[position // self.page_size]), position % self.page_size)
            right = (namespace, tokens[: position + 1])
            found = self.slots.get(place, "never written")
            assert found == right, f"position {position} at (page, slot) {place} holds {found} instead of {right}"

    def _read_tree(self) -> set[Prefix]:
        """Every prefix of the tree, read from the device's slots edge by edge."""
        m, found = self.manager, set[Prefix]()
        paths: dict[int, tuple[bytes, tuple[int, ...]]] = {root: (ns, ()) for ns, root in m.tree.roots.items()}
        nodes = m.tree.nodes
        edges = sorted(m.tree.children.values(), key=lambda node: nodes.start[node])
        for node in edges:
            namespace, above = paths[nodes.parent[node]]
            tokens = above + tuple(m.tree.edge_tokens(node).tolist())
            paths[node] = (namespace, tokens)
            table = np.full(-(-len(tokens) // self.page_size), -1, np.int32)
            m.tree.fill_page_table(node, table)
            self._must_read(namespace, tokens, table)
            found.update((namespace, tokens[: i + 1]) for i in range(len(above), len(tokens)))
        return found

    def _send_table(self, branch: Branch) -> None:
        """Bring the worker's copy up to date the way a plan does: keep what is stable, append the rest."""
        version, entries = self.tables.get(branch, (branch.table_version, []))
        keep = len(entries)
        if version != branch.table_version:
            precise = branch.stable_since(version)
            keep = min(keep, branch.stable_pages)
            assert keep <= precise, f"stable_pages {branch.stable_pages} promises more than {precise}"
            assert entries[:precise] == branch.page_table[: len(entries[:precise])].tolist(), "a stable entry changed"
        entries = entries[:keep] + branch.page_table[keep:].tolist()
        assert entries == branch.page_table.tolist(), f"the worker's table is {entries}, not {branch.page_table}"
        self.tables[branch] = (branch.table_version, entries)


def tokens_of(branch: Branch) -> tuple[int, ...]:
    """The branch's tokens as a tuple."""
    return tuple(branch.tokens().tolist())
