"""Each classic mistake is seen, and sound runs are left in peace."""

from anabranch.runtime.bench import mistakes
from anabranch.runtime.bench.figures import Figure
from anabranch.runtime.bench.host import Shares


def figure(*values: float, unit: str = "ms") -> Figure:
    return Figure(values, unit)


def counts(cached: float, prompt: float) -> dict[str, Figure]:
    return {"cached_tokens": figure(cached, unit=""), "prompt_tokens": figure(prompt, unit="")}


def shares(*, ours: float = 0.0, others: float | None = 0.0) -> Shares:
    return Shares(1.0, ours, 0.0, others)


def test_a_sound_run_gets_no_warning() -> None:
    assert mistakes.of_repeats(3, 1) == []
    assert mistakes.of_spread({"tpot_ms": figure(10, 11, 12)}) == []
    assert mistakes.of_caching(counts(10, 1000), shares_prefixes=False) == []
    assert mistakes.of_caching(counts(900, 1000), shares_prefixes=True) == []
    assert mistakes.of_machine([shares(others=0.05), shares(others=None)]) == []
    assert mistakes.of_client([shares(ours=1.9)], is_remote=False) == []
    assert mistakes.of_stream(prompt_lengths=[10, 20], lag_p99_s=0.004, ttft_p50_s=0.01, offered=5.0, achieved=4.9) == []


def test_too_few_repeats_and_no_warm_up() -> None:
    assert len(mistakes.of_repeats(2, 0)) == 2


def test_a_wide_spread_is_named_but_not_that_of_tails_or_counts() -> None:
    wide = {"tpot_ms": figure(10, 10, 16), "itl_p99_ms": figure(1, 10, 100), "cached_tokens": figure(1, 5, 9, unit="")}
    assert [w.split()[0] for w in mistakes.of_spread(wide)] == ["tpot_ms"]


def test_hits_where_every_text_is_new_are_accidents() -> None:
    assert "accidental" in mistakes.of_caching(counts(300, 1000), shares_prefixes=False)[0]


def test_nothing_but_hits_is_suspicious_even_where_prefixes_are_shared() -> None:
    assert "earlier run" in mistakes.of_caching(counts(995, 1000), shares_prefixes=True)[0]


def test_a_busy_machine_is_named_with_its_load() -> None:
    (warning,) = mistakes.of_machine([shares(), shares(others=0.6)])
    assert "0.60 cores during 1 of 2 runs" in warning


def test_a_client_that_computes_much_beside_its_server_is_the_thing_measured() -> None:
    assert mistakes.of_client([shares(ours=0.9)], is_remote=True)


def test_an_open_loop_of_one_length_sent_late_and_overloaded_has_three_faults() -> None:
    found = mistakes.of_stream(prompt_lengths=[64, 64, 64], lag_p99_s=0.2, ttft_p50_s=0.1, offered=10.0, achieved=5.0)
    assert [w.split(":")[0] for w in found] == ["fixed lengths", "client-bound", "overloaded"]
