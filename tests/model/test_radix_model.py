"""The whole cache against an oracle too simple to be wrong, in whatever order Hypothesis can think of."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.oracle import World

from anabranch.radix.branch import Branch

token_lists = st.lists(st.integers(0, 2), max_size=20)  # three letters: prefixes must collide
namespaces = st.sampled_from([b"", b"a", b"b"])
MAX_BRANCHES = 10
MAX_LENGTH = 60


class CacheModel(RuleBasedStateMachine):
    """Branches on a small pool, with steps in flight, through every call of the manager."""

    @initialize(
        num_pages=st.integers(8, 24),
        page_size=st.sampled_from([1, 2, 4, 16]),
        policy=st.sampled_from(["lru", "cost"]),
        lease_share=st.sampled_from([0.0, 0.25, 0.75]),
    )
    def build(self, num_pages: int, page_size: int, policy: str, lease_share: float) -> None:
        self.world = World(num_pages, page_size, policy, lease_share)

    def pick(self, data: st.DataObject, *, attached: bool | None = None) -> Branch:
        branches = [b for b in self.world.branches if attached is None or b.attached == attached]
        assume(branches)
        return branches[data.draw(st.integers(0, len(branches) - 1), label="branch")]

    @precondition(lambda self: len(self.world.branches) < MAX_BRANCHES)
    @rule(namespace=namespaces, tokens=token_lists)
    def open(self, namespace: bytes, tokens: list[int]) -> None:
        self.world.append(self.world.open(namespace), tokens)

    @rule(data=st.data(), tokens=token_lists)
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        branch = self.pick(data)
        self.world.append(branch, tokens[: MAX_LENGTH - len(branch)])

    @rule(data=st.data(), n=st.integers(1, 6))
    def echo(self, data: st.DataObject, n: int) -> None:
        self.world.echo(self.pick(data), n)

    @precondition(lambda self: len(self.world.branches) < MAX_BRANCHES)
    @rule(data=st.data(), n=st.integers(0, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        self.world.fork(self.pick(data), n)

    @rule(data=st.data(), superseded=st.booleans())
    def rollback(self, data: st.DataObject, superseded: bool) -> None:
        branch = self.pick(data)
        self.world.rollback(branch, data.draw(st.integers(0, len(branch)), label="length"), superseded=superseded)

    @rule(data=st.data(), superseded=st.booleans())
    def release(self, data: st.DataObject, superseded: bool) -> None:
        self.world.release(self.pick(data), superseded=superseded)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        branch, winner = self.pick(data), self.pick(data)
        assume(branch is not winner and branch.namespace == winner.namespace)
        self.world.adopt(branch, winner)

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        self.world.attach(self.pick(data, attached=False))

    @rule(data=st.data(), settle=st.booleans())
    def plan(self, data: st.DataObject, settle: bool) -> None:
        branch = self.pick(data, attached=True)
        planned = self.world.planned[branch]
        assume(planned < len(branch) + 1)
        self.world.plan(branch, data.draw(st.integers(planned + 1, len(branch) + 1), label="upto"), settle=settle)

    @precondition(lambda self: self.world.flight)
    @rule(token=st.integers(0, 2))
    def run(self, token: int) -> None:
        self.world.run(token)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.world.publish(self.pick(data, attached=True))

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self.world.trim(self.pick(data, attached=True))

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self.world.detach(self.pick(data, attached=True))

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.world.discard(self.pick(data, attached=True))

    @rule(data=st.data(), seconds=st.sampled_from([None, 1.0, 4.0]))
    def lease(self, data: st.DataObject, seconds: float | None) -> None:
        self.world.lease(self.pick(data, attached=False), seconds)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def settle(self) -> None:
        self.world.manager.settle()

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


CacheModel.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTheCacheAgreesWithTheOracle = CacheModel.TestCase
