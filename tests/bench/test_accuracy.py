"""Divergence and perplexity against their definitions, and a model that disagrees with itself only where it rounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import make_tiny_llama

from anabranch.runtime.bench import accuracy
from anabranch.runtime.bench.accuracy import Tally, log_softmax

SAID = """
Mean PPL(Q)                   :  21.635892 ±   2.417021
Mean PPL(base)                :  21.708651 ±   2.424241
Mean    KLD:   0.004902 ±   0.001167
Maximum KLD:   0.137531
Same top p: 95.968 ± 1.774 %
"""


def test_a_tally_is_the_mean_of_divergences_by_their_definition() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(7, 50)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 50, 7).astype(np.int32)
    tally = Tally()
    for part in (slice(0, 3), slice(3, 7)):
        tally.add(log_softmax(a[part]), log_softmax(b[part]), targets[part])
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (a, b))
    found = tally.as_dict()
    assert found["kl"] == pytest.approx(float(torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(b).double(), torch.from_numpy(targets).long())
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert found["same_top"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    each = (p.exp() * (p - q)).sum(-1)
    assert found["kl_error"] == pytest.approx(float(each.std(correction=0)) / 7**0.5, rel=1e-4)


def test_windows_follow_each_other_in_their_text() -> None:
    windows, text = accuracy.windows_of(lambda t: list(t.encode()), 3, 40)
    assert np.concatenate(windows).tolist() == list(text.encode())[:120]


def test_a_model_agrees_with_itself_and_nearly_so_with_rounded_keys(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    forwards = {dtype: accuracy.forward_of(tmp_path, "exact", dtype, window=24, backend="reference") for dtype in ("f32", "int8")}
    windows = [np.arange(24, dtype=np.int32) % 50, np.arange(24, dtype=np.int32)[::-1].copy() % 50]
    tallies = accuracy.judge(windows, forwards["f32"], forwards)
    assert tallies["f32"].count == 2 * 11 and tallies["f32"].as_dict()["kl"] == 0 and tallies["f32"].as_dict()["same_top"] == 1
    assert 0 < tallies["int8"].as_dict()["kl"] < 0.05


def test_statistics_of_the_other_tool_are_read_and_missed_if_absent() -> None:
    expected = {"kl": 0.004902, "kl_error": 0.001167, "perplexity": 21.635892, "same_top": 0.95968}
    assert accuracy.read_statistics(SAID) == pytest.approx(expected)
    with pytest.raises(RuntimeError, match="printed no statistics: too few"):
        accuracy.read_statistics("too few")
