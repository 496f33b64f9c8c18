"""What is asked for is checked before anything is measured."""

from typing import Any

import pytest

from anabranch.runtime.bench import suite
from anabranch.runtime.bench.figures import Figure
from anabranch.runtime.cli import _parser


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"warm_ups": -1}, "warm_ups must be at least 0"),
        ({"num_requests": 0}, "num_requests must be"),
        ({"peers": ("nobody",)}, "unknown peer 'nobody'; known are openvino, llama.cpp"),
        ({"only": ("select",)}, "unknown workload 'select'"),
    ],
)
def test_settings_say_what_is_wrong_with_them(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        suite.Settings(**wrong)


def test_an_unknown_workload_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown workload 'nonsense'; known are latency"):
        suite.run("nonsense", suite.Settings())


def test_the_help_names_every_workload() -> None:
    bench = _parser().format_help() and next(
        action for action in _parser()._subparsers._group_actions[0].choices["bench"]._actions if action.dest == "workload"  # type: ignore[union-attr]
    )
    assert {name for name in suite.NAMES if name not in str(bench.help)} == set()


def test_peers_are_shown_with_ratio_and_spread_and_the_best_is_marked() -> None:
    figure = Figure((2.0, 3.0, 4.0), "x").as_dict()
    entry = {"headline": "tpot_ms", "ours": figure, "peer": figure, "ratio": figure}
    text = suite.show("peers", {"latency": {"best_peer": "good", "peers": {"good": entry, "slow": entry}}})
    good, slow = text.splitlines()[2:]
    assert "best" in good and "best" not in slow and "67%" in good
