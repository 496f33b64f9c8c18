"""Comparisons take turns, on text that nobody has seen, and say who is ahead by how much."""

import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.bench import ByteVocabulary, FakeTarget

from anabranch.runtime.bench import peers
from anabranch.runtime.bench.children import Child
from anabranch.runtime.bench.host import Shares
from anabranch.runtime.bench.workloads import WORKLOADS

VOCABULARY: Any = ByteVocabulary()


class FakeChild:
    """Notes when it was told to stand still."""

    def __init__(self) -> None:
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class Turns(FakeTarget):
    """Notes for each prompt who got it and whether the peer stood still."""

    def __init__(self, name: str, child: FakeChild, log: list[tuple[str, bool]], **options: Any) -> None:
        super().__init__(**options)
        self.name, self.child, self.log = name, child, log

    def answer(self, *arguments: Any) -> Any:
        self.log.append((self.name, self.child.is_paused))
        return super().answer(*arguments)


class FakeWatch:
    """In place of a watch: the machine is quiet but for the measurements at `busy_at`, counted from 1."""

    entered = 0
    busy_at: tuple[int, ...] = ()

    def __init__(self, pids: object) -> None:
        self.shares = Shares(1.0, 0.0, 0.0, 0.0)

    def __enter__(self) -> "FakeWatch":
        FakeWatch.entered += 1
        self.shares = Shares(1.0, 0.0, 0.0, 0.9 if FakeWatch.entered in self.busy_at else 0.0)
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWatch, "entered", 0)
    monkeypatch.setattr(peers, "Watch", FakeWatch)


def setting(name: str = "peer", *, ours: float = 0.001, theirs: float = 0.003) -> tuple[Turns, peers.Peer, list[tuple[str, bool]]]:
    child, log = FakeChild(), []  # type: ignore[var-annotated]
    target = Turns(name, child, log, is_remote=True, seconds_per_token=theirs)
    return Turns("ours", child, log, seconds_per_token=ours), peers.Peer(target, child, 0.0), log  # type: ignore[arg-type]


def compare(ours: FakeTarget, peer: peers.Peer, *names: str, repeats: int = 3) -> dict[str, Any]:
    return peers.compare(ours, peer, VOCABULARY, [WORKLOADS[n] for n in names], repeats=repeats, scale=0.125)


def test_they_take_turns_and_the_peer_stands_still_while_ours_runs() -> None:
    ours, peer, log = setting()
    compare(ours, peer, "latency", repeats=3)
    assert log == [("ours", True), ("peer", False)] * 4  # the first pair warms up


def test_both_get_the_same_text_and_no_text_comes_twice_even_with_another_peer() -> None:
    ours, first, _ = setting("first")
    compare(ours, first, "latency", "prefill")
    second = FakeTarget()
    second.name = "second"
    compare(ours, peers.Peer(second, FakeChild(), 0.0), "latency", "prefill")  # type: ignore[arg-type]
    assert ours.prompts == [*first.target.prompts, *second.prompts]  # type: ignore[attr-defined]
    assert len(set(ours.prompts)) == len(ours.prompts) == 16


def test_a_ratio_above_one_means_that_ours_is_ahead_for_times_and_for_rates() -> None:
    ours, peer, _ = setting(ours=0.001, theirs=0.004)
    report = compare(ours, peer, "latency", "prefill")
    for entry in report.values():
        assert entry["ratio"]["median"] == pytest.approx(4.0, rel=0.01) and len(entry["ratio"]["values"]) == 3
    assert report["latency"]["ours"]["unit"] == "ms" and report["latency"]["details"]["peer"]["tpot_ms"]["median"] == pytest.approx(4.0)


def test_a_pair_during_which_others_ran_is_measured_again_on_new_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWatch, "busy_at", (3, 5))
    ours, peer, _ = setting()
    entry = compare(ours, peer, "latency", repeats=3)["latency"]
    assert entry["redone"] == 2 and len(entry["ratio"]["values"]) == 3
    assert len(set(ours.prompts)) == len(ours.prompts) == 1 + 3 + 2
    assert not any("others used" in w for w in entry["warnings"])


def test_the_best_peer_is_the_one_that_ours_is_least_ahead_of() -> None:
    reports = {}
    for name, theirs in (("slow", 0.009), ("good", 0.002)):
        ours, peer, _ = setting(name, theirs=theirs)
        reports[name] = compare(ours, peer, "latency", repeats=3)
    found = peers.by_workload(reports)["latency"]
    assert found["best_peer"] == "good" and found["ratio"]["median"] == pytest.approx(2.0, rel=0.01)
    assert set(found["peers"]) == {"slow", "good"}


@pytest.fixture
def sleeper() -> Iterator[Child]:
    child = Child([sys.executable, "-c", "import signal\nsignal.pause()"])
    yield child
    child.end()


def test_a_server_that_ends_before_it_answers_is_reported() -> None:
    child = Child([sys.executable, "-c", "raise SystemExit(3)"])
    child.process.wait()
    with pytest.raises(RuntimeError, match="exit code 3"):
        peers.wait_for_server(peers.free_port(), child)


def test_a_server_that_never_answers_is_given_up(sleeper: Child) -> None:
    with pytest.raises(RuntimeError, match="did not answer within"):
        peers.wait_for_server(peers.free_port(), sleeper, timeout_s=0.05)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", peers.free_port()))
