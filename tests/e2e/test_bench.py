"""The bench runs, says what it promises, and its counts (not its times) are right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "anabranch.runtime.cli", "bench", *arguments, "--small", "--json", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_forks_send_no_text_and_a_tree_computes_each_token_once(model_path: Path) -> None:
    result = bench("fork")
    assert result["text_bytes_sent"] == 0 and result["fork_message_bytes"] < 200
    assert result["computed_over_distinct"] <= 1.01


def test_the_radix_table_has_the_promised_keys() -> None:
    keys = {
        "match_100k_ms", "extend_200_us_at_1k", "extend_200_us_at_100k", "fork_us", "evict_us_per_page_at_10k",
        "evict_us_per_page_at_1m", "bytes_per_node_at_1m", "order_10k_ms",
    }  # fmt: skip
    assert keys <= set(bench("radix"))


WORKLOADS = ("latency", "prefill", "throughput", "prefix", "chat", "tree", "json", "select")


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_runs_and_is_no_faster_than_its_floor(workload: str, model_path: Path) -> None:
    result = bench(workload)
    assert result[result["headline"]]["median"] > 0 and result["x_floor"]["median"] > 1
    assert "repeats" in result["warnings"][0] and result["processor"][0]["seconds"] > 0
    if workload == "prefix":
        assert result["cached_tokens"]["median"] > 0.5 * result["prompt_tokens"]["median"]
    if workload == "chat":
        assert result["cached_of_cacheable"]["median"] > 0.99
    if workload == "tree":
        assert result["computed_over_distinct"]["median"] <= 1.01
    if workload == "json":
        assert result["valid_share"]["median"] == 1 and result["steps_per_output_token"]["median"] < 1


@pytest.mark.slow
def test_the_step_bench_runs() -> None:
    assert bench("step")["rows_1_depth_1_us"] > 0


@pytest.mark.slow
def test_a_trace_is_served_at_its_times_and_a_closed_loop_as_fast_as_it_goes(tmp_path: Path, model_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 10},{20 + 3 * i},4\n" for i in range(12)))
    paced, free = bench("serve", "--arrivals", str(trace)), bench("serve", "--requests", "12")
    assert paced["loop"] == "open" and paced["offered_per_s"]["median"] == pytest.approx(10.0)
    assert paced["total_s"]["median"] >= 1.1 and paced["ttft_p50_ms"]["median"] > 0 and paced["queue_p99_ms"]["median"] >= 0
    assert free["loop"] == "closed" and free["in_flight_max"]["median"] <= 8 and "offered_per_s" not in free


@pytest.mark.slow
def test_what_fast_costs_is_little_and_exact_costs_nothing(model_path: Path) -> None:
    cases = bench("accuracy")["cases"]
    assert cases["exact, KV f32"]["kl"] == 0 and cases["exact, KV f32"]["tokens"] >= 100
    ours = {name: case["kl"] for name, case in cases.items() if name.startswith(("exact", "fast"))}
    assert max(ours.values()) < 0.02 and ours["exact, KV int16"] < ours["exact, KV int8"]


@pytest.mark.slow
def test_the_cache_finds_nothing_in_text_that_is_new_and_both_sides_are_timed(model_path: Path) -> None:
    result = bench("cache-cost")
    assert result["cached_tokens"] < 20 and result["with_s"]["median"] > 0 and result["planning_without_us"] > 0


@pytest.mark.slow
def test_a_start_is_split_into_the_stages_of_its_trace(model_path: Path) -> None:
    result = bench("start", "--num-threads", "1")
    assert len(result["first_text_s"]["values"]) == 3 and "stage_imports_ms" in result
    assert all(first < ended for first, ended in zip(result["first_text_s"]["values"], result["exit_s"]["values"]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("serve", "--rate", "0"), "rate must be above 0"),
        (("serve", "--arrivals", "nowhere"), "nowhere is not a file"),
        (("latency", "--base-url", "https://x"), "base url must look like"),
        (("peers", "--peer", "nobody"), "unknown peer 'nobody'"),
        (("accuracy", "--peer", "openvino"), "--peer llama.cpp can"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(arguments: tuple[str, ...], problem: str, model_path: Path) -> None:
    command = [sys.executable, "-m", "anabranch.runtime.cli", "bench", *arguments, "--small", "--no-touch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and problem in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_workload_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.runtime.cli", "bench", "nonsense"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "nonsense" in done.stderr and "latency" in done.stderr and "Traceback" not in done.stderr
