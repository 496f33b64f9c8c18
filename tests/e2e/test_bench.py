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


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["latency", "prefill", "throughput", "prefix", "chat", "tree", "select", "step"])
def test_a_workload_runs(workload: str, model_path: Path) -> None:
    result = bench(workload)
    if workload in ("prefix", "chat"):
        assert result["cached_tokens"]["median"] > 0.5 * result["prompt_tokens"]["median"]


def test_an_unknown_workload_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.runtime.cli", "bench", "nonsense"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "nonsense" in done.stderr and "latency" in done.stderr and "Traceback" not in done.stderr
