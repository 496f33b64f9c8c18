"""The native matrix products and forwards against `reference`, over every format, and on the real model's own weights."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.tiny_forward import Row, batch_of, ints
from support.weights import random_raw, random_rows, rounding_bound

from anabranch.kernels.backends.cpu import CpuBackend
from anabranch.kernels.formats import FORMATS
from anabranch.kernels.layout import KVSpec
from anabranch.kernels.reference import ReferenceBackend, linear
from anabranch.runtime.models_cache import default_model_path
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.models.registry import build_model

TEXT = (
    "The harbour was quiet when the two of them came down to the water. A single lamp burned on the pier, and the tide was going out; "
    "along the wall the boats had settled on the mud, leaning this way and that like sleepers on a train. She asked him what he had done "
    "with the letter. He said that he had burned it, which was not true, and that in any case it no longer mattered, which was. "
    "In 1887 the town had 4,210 inhabitants, three churches and one railway station; by 1911 the station was the only one of them to have grown."
)
NUM_PAGES = 40


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_products_agree_with_the_reference(form: str, precision: str) -> None:
    raw, x = random_raw(form, 96, 512, seed=3), random_rows(11, 512, seed=4)
    expected = linear(torch.from_numpy(x), ReferenceBackend().matrix([raw])).numpy()
    got = CpuBackend(precision=precision).matrix([raw]).multiply(x)
    bound = rounding_bound(raw, x) if precision == "fast" else 1e-4 * np.abs(expected).max(axis=1, keepdims=True) + 1e-6
    assert (np.abs(got - expected) <= bound).all()


@cache
def real_logits(precision: str, chunk: int) -> np.ndarray:
    """The default model's logits at every position of TEXT, computed `chunk` tokens at a step."""
    path = default_model_path()
    ids = ints(open_model_text(path).vocabulary.encode_plain(TEXT, at_start=True))
    backend = CpuBackend(precision=precision)
    model, _ = build_model(open_checkpoint(path), backend)
    c = model.config
    pool = backend.kv_pool(KVSpec(NUM_PAGES, 16, c.num_layers, c.num_kv_heads, c.head_dim, "f16"))
    step = backend.compile(model.forward, pool)
    pages = ints(np.random.default_rng(0).permutation(NUM_PAGES))
    edges = [*range(0, len(ids), chunk), len(ids)]
    return np.concatenate([step(batch_of([Row(ids, a, b, pages)])).copy() for a, b in pairwise(edges)])


@pytest.mark.slow
def test_the_real_model_gives_the_same_bits_token_by_token_and_all_at_once() -> None:
    whole = real_logits("fast", 1 << 20)
    for chunk in (1, 7, 64):
        np.testing.assert_array_equal(real_logits("fast", chunk).view(np.uint32), whole.view(np.uint32))


@pytest.mark.slow
def test_rounding_activations_moves_the_real_models_predictions_little() -> None:
    """KL divergence from exact to fast, per token of English; one activation scale per row instead of one per 32 would give about 0.09."""
    exact, fast = (real_logits(p, 1 << 20).astype(np.float64) for p in ("exact", "fast"))
    log_p, log_q = (x - x.max(axis=1, keepdims=True) for x in (exact, fast))
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (log_p, log_q))
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    assert 0 < divergence.mean() < 0.02, divergence.mean()
    assert (exact.argmax(axis=1) == fast.argmax(axis=1)).mean() > 0.9
