"""The floor is arithmetic: here it is done again by hand, on sizes where that is easy."""

from dataclasses import dataclass

import numpy as np
import pytest

from anabranch.kernels.formats import RawTensor
from anabranch.runtime.bench import floor, least
from anabranch.runtime.bench.floor import Sizes, Step, decode, prefill, sizes_of, step_seconds
from anabranch.runtime.bench.workloads import WORKLOADS


@dataclass(frozen=True)
class FlatRates:
    float_ops_per_s: float = 100.0
    byte_ops_per_s: float = 1000.0
    bytes_per_s: float = 50.0

    def read_rate(self, num_bytes: int) -> float:
        return self.bytes_per_s


SIZES = Sizes(matrix_bytes=500, matrix_values=1000, head_bytes=100, head_values=200, kv_bytes_per_token=10, attention_per_pair=4)


def test_a_step_of_one_row_is_bound_by_reading_the_weights_and_its_kv() -> None:
    assert step_seconds(Step(1, 1, kv_read=40, pairs=40), SIZES, FlatRates()) == pytest.approx((500 + 100 + 400) / 50)


def test_a_step_of_many_tokens_is_bound_by_its_products() -> None:
    expected = 2 * (100 * 1000 + 200) / 1000 + 2 * 5050 * 4 / 500
    assert step_seconds(prefill(1, 100), SIZES, FlatRates()) == pytest.approx(expected)


def test_exact_activations_multiply_at_the_float_peak() -> None:
    step = Step(100, 0, 0, 0)
    exact = floor.Products.of(precision="exact", kv_dtype="f32")
    assert step_seconds(step, SIZES, FlatRates(), exact) == pytest.approx(10 * step_seconds(step, SIZES, FlatRates()))


def test_attention_over_floats_multiplies_at_the_float_peak_and_over_integers_as_words() -> None:
    step = Step(0, 0, 0, 1000)
    times = {dtype: step_seconds(step, SIZES, FlatRates(), floor.Products.of(precision="fast", kv_dtype=dtype)) for dtype in ("f16", "int8")}
    assert times == pytest.approx({"f16": 8000 / 100, "int8": 8000 / 500})


def test_no_logits_means_that_the_head_is_not_read() -> None:
    with_head, without = (step_seconds(Step(1, n, 0, 0), SIZES, FlatRates()) for n in (1, 0))
    assert with_head - without == pytest.approx(100 / 50)


def test_a_shared_prefix_is_read_once_but_attended_by_every_row() -> None:
    step = decode(8, 1, shared=100, own=5)
    assert step.kv_read == 100 + 8 * 5 and step.pairs == 8 * 105


def test_pairs_of_a_prefill_are_those_of_a_causal_mask() -> None:
    naive = sum(30 + i + 1 for i in range(7)) * 3
    assert prefill(3, 7, shared=20, own=10).pairs == naive


def test_many_decode_steps_cost_what_each_of_them_does() -> None:
    rates, steps = FlatRates(), 9
    each = sum(step_seconds(decode(2, 1, own=10 + i), SIZES, rates) for i in range(steps))
    assert floor.seconds([decode(2, steps, own=10)], SIZES, rates) == pytest.approx(each)


def tensor(name: str, shape: tuple[int, ...], num_bytes: int) -> RawTensor:
    return RawTensor(name, "Q8_0", shape, np.zeros((1, num_bytes), np.uint8))


def test_sizes_count_matrices_of_layers_and_the_head_that_there_is() -> None:
    tensors = [
        tensor("model.embed_tokens.weight", (50, 8), 425), tensor("model.layers.0.mlp.up_proj.weight", (16, 8), 136),
        tensor("model.layers.0.input_layernorm.weight", (8,), 32), tensor("model.norm.weight", (8,), 32),
    ]  # fmt: skip
    tied = sizes_of({t.name: t for t in tensors}, num_layers=1, num_heads=2, head_dim=4, kv_bytes_per_token=6)
    assert tied == Sizes(136, 128, 425, 400, 6, 2 * 1 * 2 * 4)
    untied = [*tensors, tensor("lm_head.weight", (50, 8), 999)]
    assert sizes_of({t.name: t for t in untied}, num_layers=1, num_heads=2, head_dim=4, kv_bytes_per_token=6).head_bytes == 999


FIGURES = {"output_tokens": 700.0, "steps_per_output_token": 0.4, "most_steps": 25.0}


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_has_a_floor_and_more_of_it_takes_longer(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.least is not None
    small, large = (floor.seconds(workload.least(scale, FIGURES), SIZES, FlatRates()) for scale in (0.125, 1.0))
    assert 0 < small < large
    assert least.headline_floor(workload.headline, workload.least(1.0, FIGURES), large, FIGURES) > 0


def test_the_floor_of_a_rate_is_a_rate_and_of_a_token_the_mean_step() -> None:
    plan = [decode(1, 10, own=4)]
    assert least.headline_floor("tpot_ms", plan, 5.0, {}) == pytest.approx(500)
    assert least.headline_floor("prefill_tok_s", [prefill(1, 30)], 2.0, {}) == pytest.approx(15)
    assert least.headline_floor("output_tok_s", plan, 2.0, {"output_tokens": 64}) == pytest.approx(32)
    with pytest.raises(AssertionError, match="no floor"):
        least.headline_floor("nonsense", plan, 1.0, {})
