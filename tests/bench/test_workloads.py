"""Workloads against a target that counts as a perfect cache would: the counts of their reports must be right."""

import pytest
from bench.test_floor import SIZES, FlatRates
from support.bench import RECORD, ByteVocabulary, FakeTarget

from anabranch.runtime.bench.measure import Machine, measure, texts
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.workloads import WORKLOADS, distinct_tokens

VOCABULARY = ByteVocabulary()


def run(name: str, target: FakeTarget) -> dict[str, float]:
    return WORKLOADS[name].run(target, Texts(VOCABULARY, 1), 0.125)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_reports_its_headline_and_closes_what_it_opened(name: str) -> None:
    target = FakeTarget()
    assert run(name, target)[WORKLOADS[name].headline] > 0
    assert target.open_nodes == 0 or name == "select"


@pytest.mark.parametrize("name", ["latency", "prefill", "throughput"])
def test_prompts_that_share_nothing_on_purpose_share_nearly_nothing(name: str) -> None:
    figures = run(name, FakeTarget())
    assert figures["cached_tokens"] <= 0.05 * figures["prompt_tokens"]


def test_a_perfect_cache_computes_each_token_of_a_tree_once() -> None:
    assert run("tree", FakeTarget())["computed_over_distinct"] == 1.0


def test_without_a_cache_a_tree_is_computed_many_times_over() -> None:
    assert run("tree", FakeTarget(caches=False))["computed_over_distinct"] > 4


def test_a_chat_finds_all_but_the_last_token_of_each_turn_again() -> None:
    assert run("chat", FakeTarget())["cached_of_cacheable"] == pytest.approx(1.0, abs=0.01)
    assert run("chat", FakeTarget(caches=False))["cached_of_cacheable"] == 0


def test_records_are_checked_and_their_steps_counted() -> None:
    good, bad = run("json", FakeTarget()), run("json", FakeTarget(record={**RECORD, "age": 500}))
    assert good["valid_share"] == 1 and bad["valid_share"] == 0
    assert good["steps_per_output_token"] == pytest.approx(0.5, abs=0.01) and good["forced_share"] == pytest.approx(0.5, abs=0.01)


def naive_distinct(sequences: list[list[int]]) -> int:
    return len({tuple(s[: i + 1]) for s in sequences for i in range(len(s) - 1)})


def test_distinct_tokens_are_nodes_of_the_trie_without_last_tokens() -> None:
    sequences = [[1, 2, 3], [1, 2, 3, 4], [1, 9], [5], [1, 2, 7, 8]]
    assert distinct_tokens(sequences) == naive_distinct(sequences) == 4


def test_no_run_or_workload_or_label_sees_the_text_of_another() -> None:
    seen = set()
    for name in ("latency", "prefill"):
        for label in ("", "openvino"):
            for i in ("warm-up 0", 0, 1):
                seen.add(texts(VOCABULARY, WORKLOADS[name], label, i).passage(64))  # type: ignore[arg-type]
    assert len(seen) == 12
    assert len({text[:4] for text in seen}) > 8, "passages begin alike: they share a prefix"


def test_measured_figures_come_with_the_floor_the_processor_and_warnings() -> None:
    machine = Machine(SIZES, FlatRates())
    measured = measure(FakeTarget(), WORKLOADS["latency"], VOCABULARY, repeats=2, scale=0.125, machine=machine)  # type: ignore[arg-type]
    figures = measured.figures
    assert figures["x_floor"].median == pytest.approx(figures["tpot_ms"].median / figures["floor"].median)
    assert len(measured.shares) == 2 and any("2 repeats" in w for w in measured.warnings)
    assert measured.as_dict()["processor"][0]["seconds"] > 0


def test_a_higher_rate_is_nearer_to_its_floor() -> None:
    machine = Machine(SIZES, FlatRates())
    figures = run("throughput", FakeTarget())
    slow, fast = (machine.floor_of(WORKLOADS["throughput"], 0.125, {**figures, "output_tok_s": rate})["x_floor"] for rate in (10.0, 20.0))
    assert slow == pytest.approx(2 * fast)


def test_records_that_do_not_fit_are_a_warning() -> None:
    target = FakeTarget(record="no record")
    measured = measure(target, WORKLOADS["json"], VOCABULARY, repeats=3, scale=0.125)  # type: ignore[arg-type]
    assert any("0% of the records fit" in w for w in measured.warnings)


def test_warm_ups_run_before_and_do_not_count() -> None:
    target = FakeTarget()
    measured = measure(target, WORKLOADS["prefill"], VOCABULARY, repeats=3, warm_ups=2, scale=0.125)  # type: ignore[arg-type]
    assert len(target.prompts) == 5 and len(measured.figures["prefill_tok_s"].values) == 3
