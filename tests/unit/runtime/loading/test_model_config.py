"""The numbers of a model: read, bounded, and refused where we would compute something else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import llama_config, make_tiny_gguf

from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.loading.config import ModelConfig, config_from_gguf, config_from_json
from anabranch.runtime.worker.loading.errors import CheckpointError
from anabranch.runtime.worker.loading.files import read_json
from anabranch.runtime.worker.loading.gguf import read_gguf

HERE = Path("somewhere/config.json")


def spec(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"layers": 2, "hidden": 64, "vocab": 512, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return llama_config(**base, inner=128, tie=False, eos=2, bos=1, context=4096, **more)


def config(generation: dict[str, Any] | None = None, **more: Any) -> ModelConfig:
    return config_from_json(HERE, spec(**more), generation)


def refusal(values: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        config_from_json(HERE, values, generation)
    return str(caught.value)


def test_the_fields_of_a_llama_config_are_read() -> None:
    c = config()
    assert (c.family, c.vocab_size, c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == (
        "llama", 512, 64, 2, 4, 2, 16,
    )  # fmt: skip
    assert (c.inner_size, c.eps, c.rope_theta, c.context_length) == (128, 1e-5, 10000.0, 4096)
    assert (c.bos_token_id, c.eos_token_ids, c.sliding_window, c.tie_embeddings) == (1, (2,), None, False)
    assert not (c.qkv_bias or c.output_bias or c.mlp_bias or c.qk_norm)


def test_families_differ_where_their_mathematics_does() -> None:
    assert config(model_type="qwen2").qkv_bias and not config(model_type="qwen2").output_bias
    assert config(model_type="qwen3").qk_norm
    biased = config(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.output_bias and biased.mlp_bias


def test_absent_fields_take_the_defaults_of_the_format() -> None:
    values = spec()
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "bos_token_id"):
        values.pop(name)
    c = config_from_json(HERE, values)
    assert (c.num_kv_heads, c.head_dim, c.tie_embeddings, c.rope_theta, c.bos_token_id) == (4, 16, False, 10000.0, None)


def test_end_tokens_come_from_both_configs() -> None:
    assert config(generation={"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert config(eos_token_id=[3, 4], generation={"eos_token_id": 5}).eos_token_ids == (3, 4, 5)
    assert config(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, 4096),  # transformers' default
        ({"model_type": "mistral", "sliding_window": 4096}, None),  # never less than the context
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, 128),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, None),
    ],
)
def test_a_sliding_window_counts_where_the_family_says_so(more: dict[str, Any], window: int | None) -> None:
    assert config(**more).sliding_window == window


def test_layers_with_different_windows_are_refused() -> None:
    mixed = spec(model_type="qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=1)
    assert "max_window_layers" in refusal(mixed)
    mixed = spec(model_type="qwen3", sliding_window=128, use_sliding_window=True)
    assert "layer_types" in refusal(mixed | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size",
        "max_position_embeddings",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 2**40, 2**700, "64", 1.5, True, [4], None, float("inf")])
def test_a_size_outside_its_range_is_refused_naming_file_field_value_and_limit(name: str, value: object) -> None:
    message = refusal(spec() | {name: value})
    assert all(word in message for word in ("config.json", repr(name)))
    assert "missing" in message if value is None else "integer from 1 to" in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"rope_theta": -1.0}, ["rope_theta"]),
        ({"num_key_value_heads": 3}, ["4", "3", "multiple"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads", "8"]),
        ({"head_dim": 15}, ["head_dim 15", "odd"]),
        ({"eos_token_id": 512}, ["eos_token_id", "512"]),
        ({"eos_token_id": list(range(100))}, ["eos_token_id"]),
        ({"bos_token_id": -1}, ["bos_token_id"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false"]),
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["Qwen2ForCausalLM"]}, ["architectures", "llama"]),
        ({"model_type": "mamba", "architectures": None}, ["mamba"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"num_experts": 8}, ["num_experts"]),
        ({"logits_scaling": 8.0}, ["logits_scaling"]),
        ({"rope_scaling": {"type": "longrope"}}, ["rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
    ],
)
def test_values_that_do_not_fit_or_change_the_mathematics_are_refused(values: dict[str, Any], words: list[str]) -> None:
    message = refusal(spec() | values)
    assert all(word in message for word in words), message


def test_neutral_values_of_foreign_fields_are_accepted() -> None:
    config(attn_logit_softcapping=None, partial_rotary_factor=1.0, num_experts=0, quantization_config=None, x_new=5)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotary_frequencies_equal_those_of_transformers(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = spec() | {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": rope}
    inv_freq, magnitude = config_from_json(HERE, values).rope()
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=4096,
            hidden_size=64,
            num_attention_heads=4,
            rope_parameters=rope | {"rope_theta": theta},
        )
    )
    assert inv_freq.dtype == np.float64
    np.testing.assert_allclose(inv_freq, theirs.inv_freq.numpy(), rtol=3e-6)
    assert magnitude == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_the_old_and_the_new_place_of_rope_settings_mean_the_same() -> None:
    old = config(rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 2.0})
    values = spec() | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}}
    del values["rope_theta"]
    assert config_from_json(HERE, values) == old


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert config(rope_scaling=yarn).context_length == 16384
    assert config(rope_scaling=yarn | {"original_max_position_embeddings": 1024}).context_length == 4096


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        "\xff",
        "",
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
        "x" * (1 << 21),
    ],
)
def test_a_config_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(path)


class TestGguf:
    @pytest.fixture
    def metadata(self, tmp_path: Path) -> dict[str, Any]:
        return read_gguf(make_tiny_gguf(tmp_path / "t.gguf")).metadata

    def read(self, metadata: dict[str, Any], **more: Any) -> ModelConfig:
        values = metadata | {key.replace("__", "."): value for key, value in more.items()}
        return config_from_gguf(Path("t.gguf"), values, vocab_size=512, tensor_names=frozenset({"lm_head.weight"}))

    def test_it_is_read(self, metadata: dict[str, Any]) -> None:
        c = self.read(metadata)
        assert (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.eos_token_ids) == (2, 4, 2, 16, (2,))
        assert not c.tie_embeddings

    @pytest.mark.parametrize(
        ("more", "word"),
        [
            ({"general__architecture": "gemma"}, "gemma"),
            ({"llama__expert_count": 8}, "expert_count"),
            ({"llama__block_count": 2**31}, "block_count"),
            ({"llama__attention__head_count": np.array([4, 4])}, "head_count"),
            ({"llama__vocab_size": 511}, "511"),
            ({"llama__rope__dimension_count": 8}, "dimension_count"),
            ({"llama__rope__scaling__type": "longrope"}, "longrope"),
            ({"llama__rope__scaling__type": "linear"}, "factor"),
            ({"tokenizer__ggml__eos_token_id": 512}, "512"),
            ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "nan"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, metadata: dict[str, Any], more: dict[str, Any], word: str) -> None:
        with pytest.raises(CheckpointError, match=word):
            self.read(metadata, **more)

    def test_yarn_and_linear_scaling_are_read(self, metadata: dict[str, Any]) -> None:
        base = {"llama__rope__scaling__factor": 4.0}
        linear = self.read(metadata, llama__rope__scaling__type="linear", **base)
        assert linear.rope_scaling.kind == "linear" and linear.rope_scaling.factor == 4.0
        yarn = self.read(
            metadata, llama__rope__scaling__type="yarn", llama__rope__scaling__original_context_length=256, **base
        )
        assert (yarn.rope_scaling.kind, yarn.rope_scaling.original_context) == ("yarn", 256)

    def test_frequency_factors_in_a_tensor_give_the_llama3_scaling(self, tmp_path: Path) -> None:
        import gguf

        llama3 = config(rope_scaling=ROPES[3])
        plain, _ = config().rope()
        scaled, _ = llama3.rope()
        path = make_tiny_gguf(tmp_path / "plain.gguf")
        reader = gguf.GGUFReader(path)
        writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                kind = field.types[0]
                inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=inner)
        for t in reader.tensors:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        got, magnitude = open_checkpoint(tmp_path / "scaled.gguf").config.rope()
        np.testing.assert_allclose(got, scaled, rtol=1e-6)
        assert magnitude == 1.0


def test_a_config_survives_a_round_trip_through_json_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec()))
    assert config_from_json(path, read_json(path)) == config()
