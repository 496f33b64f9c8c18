"""A model's shape and mathematics, from config.json or GGUF metadata, refused where we would compute something else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Never, get_args

from anabranch.runtime.worker.loading.errors import refuse, shown
from anabranch.runtime.worker.loading.fields import Fields
from anabranch.runtime.worker.loading.rope import Floats, RopeScaling, rotary_frequencies

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[str, ...] = get_args(Family)
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

MAX_VOCAB, MAX_WIDTH, MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_CONTEXT = 1 << 22, 1 << 20, 1024, 1024, 1024, 1 << 26
MAX_EOS = 64

# Fields of neighbouring architectures that change what is computed. Any value but these: a model that we do not have.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_softcapping": (0, 0.0),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "embedding_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "rope_interleaved": (False,),
    "clip_qkv": (),
    "alibi": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "attention_sinks": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "moe_intermediate_size": (),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "is_encoder_decoder": (False,),
    "vision_config": (),
    "text_config": (),
    "audio_config": (),
    "position_embedding_type": ("rope", "rotary", "absolute"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that a model file needs to know to build the model. Lengths are in tokens; widths in values.

    q has num_heads * head_dim rows, k and v num_kv_heads * head_dim each. `qkv_bias`, `output_bias` (of o_proj) and
    `mlp_bias` say which projections have one. `qk_norm`: an RMS norm over each head of q and k before rotation (Qwen3).
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    eps: float
    rope_theta: float
    context_length: int
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None  # tokens seen back, itself included, in every layer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def rope(self) -> tuple[Floats, float]:
        """Rotary frequencies [head_dim / 2] float64, and the magnitude of cos and sin."""
        return rotary_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)


def config_from_json(path: Path, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config in a parsed config.json; end-of-sequence ids also from generation_config.json.

    Raises CheckpointError.
    """
    f = Fields(path, values)
    family = _family(f)
    _refuse_other_mathematics(f)
    heads = f.integer("num_attention_heads", 1, MAX_HEADS)
    hidden = f.integer("hidden_size", 1, MAX_WIDTH)
    vocab = f.integer("vocab_size", 1, MAX_VOCAB)
    context = f.integer("max_position_embeddings", 1, MAX_CONTEXT)
    bias = f.flag("attention_bias", False)
    theta, scaling, context = _rope_from_json(f, context)
    eos = f.integers("eos_token_id", 0, vocab - 1, MAX_EOS)
    if generation is not None:
        more = Fields(path.with_name("generation_config.json"), generation)
        eos = tuple(dict.fromkeys(eos + more.integers("eos_token_id", 0, vocab - 1, MAX_EOS)))
    return _checked(
        path,
        ModelConfig(
            family=family,
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=f.integer("num_hidden_layers", 1, MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=f.integer("num_key_value_heads", 1, heads, heads),
            head_dim=f.integer("head_dim", 2, MAX_HEAD_DIM, 128 if family == "qwen3" else None)
            or _even_share(f, hidden, heads),
            inner_size=f.integer("intermediate_size", 1, MAX_WIDTH),
            eps=f.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            context_length=context,
            qkv_bias=family == "qwen2" or (bias and family != "mistral"),
            output_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=f.flag("mlp_bias", False) and family == "llama",
            qk_norm=family == "qwen3",
            tie_embeddings=f.flag("tie_word_embeddings", False),
            sliding_window=_sliding_window(f, family, context),
            bos_token_id=(f.integers("bos_token_id", 0, vocab - 1, MAX_EOS) or (None,))[0],
            eos_token_ids=eos,
        ),
    )


def _family(f: Fields) -> Family:
    """From model_type and the first of `architectures`, of which either may be absent."""
    named = f.raw("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        f.refuse("architectures", f"is {shown(named)}; it must be a list of names")
    by_class = None
    if named:
        by_class = _CLASSES.get(named[0]) or _refuse_architecture(f.path, named[0])
    family = f.text("model_type", by_class)
    if family not in FAMILIES:
        _refuse_architecture(f.path, family)
    if by_class not in (None, family):
        f.refuse("architectures", f"is {shown(named)}, but model_type is {family!r}")
    return family


def _refuse_architecture(path: Path, name: object) -> Never:
    refuse(path, f"architecture {shown(name)} is not supported; supported are {', '.join(_CLASSES)}")


def _refuse_other_mathematics(f: Fields) -> None:
    for name, neutral in _NEUTRAL.items():
        value = f.raw(name)
        if value is not None and value not in neutral:
            f.refuse(name, f"is {shown(value)}, which changes what the model computes and is not supported")
    for name in ("hidden_act", "hidden_activation"):
        if f.text(name, "silu") not in ("silu", "swish"):
            f.refuse(name, f"is {shown(f.raw(name))}; only 'silu' is supported")


def _even_share(f: Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        f.refuse(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}, and head_dim is not given"
        )
    return hidden // heads


def _sliding_window(f: Fields, family: Family, context: int) -> int | None:
    """The window of all layers. Qwen counts it only when use_sliding_window says so; layers that differ are refused."""
    # transformers' Mistral has a window unless the field is there and null.
    absent = 4096 if family == "mistral" and "sliding_window" not in f.values else None
    window = f.integer("sliding_window", 1, MAX_CONTEXT, absent)
    if family in ("qwen2", "qwen3") and not f.flag("use_sliding_window", False):
        window = None
    kinds = f.raw("layer_types")
    if isinstance(kinds, list) and window is not None and window < context:
        if "full_attention" in kinds:
            f.refuse("layer_types", "mixes full and sliding attention, which is not supported")
    elif isinstance(kinds, list) and window is None and any(kind != "full_attention" for kind in kinds):
        f.refuse("layer_types", f"names {shown(kinds)}; without a sliding window only 'full_attention' is supported")
    if window is None or window >= context:
        return None
    first = f.integer("max_window_layers", 0, MAX_LAYERS, 0)
    if first and kinds is None and family in ("qwen2", "qwen3"):
        if first >= f.integer("num_hidden_layers", 1, MAX_LAYERS):
            return None
        f.refuse(
            "max_window_layers", f"is {first}: layers with and without a sliding window are not supported together"
        )
    return int(window)


def _rope_from_json(f: Fields, context: int) -> tuple[float, RopeScaling, int]:
    """theta, scaling and the context that they serve. `rope_parameters` is transformers 5's place for both."""
    section = f.section("rope_parameters") or f.section("rope_scaling")
    theta = f.number("rope_theta", 1.0001, 1e15, None)
    if theta is None:
        theta = section.number("rope_theta", 1.0001, 1e15, 10000.0) if section else 10000.0
    if section is None:
        return theta, RopeScaling(), context
    if section.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        section.refuse("partial_rotary_factor", "is not 1; rotating a part of each head is not supported")
    kind = section.text("rope_type", None) or section.text("type", "default")
    original = section.integer("original_max_position_embeddings", 1, MAX_CONTEXT, None)
    if original is None:
        original = f.integer("original_max_position_embeddings", 1, MAX_CONTEXT, None)
    match kind:
        case "default" | "none":
            return theta, RopeScaling(), context
        case "linear":
            return theta, RopeScaling(kind="linear", factor=_factor(section)), context
        case "dynamic":
            return theta, RopeScaling(kind="dynamic", factor=_factor(section), original_context=context), context
        case "llama3":
            low = section.number("low_freq_factor", 1e-3, 1e6)
            high = section.number("high_freq_factor", low + 1e-6, 1e6)
            original = original or section.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
            scaling = RopeScaling(
                kind="llama3",
                factor=_factor(section),
                original_context=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
            return theta, scaling, context
        case "yarn":
            factor = _factor(section)
            # Where the original context is given, the factor says how far the model reaches beyond it.
            reach = max(context, int(original * factor)) if original else context
            return theta, _yarn(section, factor, original or context), min(reach, MAX_CONTEXT)
        case _:
            return section.refuse(
                "rope_type", f"is {shown(kind)}; supported are default, linear, dynamic, llama3, yarn"
            )


def _factor(section: Fields) -> float:
    return section.number("factor", 1.0, 1e4)


def _yarn(section: Fields, factor: float, original: int) -> RopeScaling:
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=section.number("beta_fast", 1e-3, 1e6, None) or 32.0,
        beta_slow=section.number("beta_slow", 1e-3, 1e6, None) or 1.0,
        attention_factor=section.number("attention_factor", 1e-3, 1e3, None),
        mscale=section.number("mscale", 0.0, 1e3, None),
        mscale_all_dim=section.number("mscale_all_dim", 0.0, 1e3, None),
        truncate=section.flag("truncate", True),
    )


# ---------------------------------------------------------------- GGUF

_GGUF_OTHER_MATHEMATICS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "embedding_scale": (1.0, 0.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "attention.sliding_window_pattern": (0, 1),
    "attention.kv_lora_rank": (0,),
    "attention.q_lora_rank": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}


def config_from_gguf(
    path: Path, metadata: Mapping[str, Any], *, vocab_size: int, tensor_names: frozenset[str]
) -> ModelConfig:
    """The config in GGUF metadata. `vocab_size` is the embedding's rows; which biases there are, the tensors say.

    Raises CheckpointError.
    """
    family = metadata.get("general.architecture")
    if family not in ("llama", "qwen2", "qwen3"):
        refuse(path, f"field 'general.architecture' is {shown(family)}; supported are llama, qwen2, qwen3")
    f = Fields(path, metadata, f"{family}.")
    for name, neutral in _GGUF_OTHER_MATHEMATICS.items():
        value = f.raw(name)
        if value is not None and value not in neutral:
            f.refuse(name, f"is {shown(value)}, which changes what the model computes and is not supported")
    heads = f.integer("attention.head_count", 1, MAX_HEADS)
    hidden = f.integer("embedding_length", 1, MAX_WIDTH)
    context = f.integer("context_length", 1, MAX_CONTEXT)
    if f.integer("vocab_size", 1, MAX_VOCAB, vocab_size) != vocab_size:
        f.refuse("vocab_size", f"is {f.raw('vocab_size')}, but token_embd.weight has {vocab_size} rows")
    head_dim = f.integer("attention.key_length", 2, MAX_HEAD_DIM, None) or _even_share(f, hidden, heads)
    for name, what in (("attention.value_length", "values"), ("rope.dimension_count", "rotated dimensions")):
        if f.integer(name, 1, MAX_HEAD_DIM, head_dim) != head_dim:
            f.refuse(name, f"is {f.raw(name)}; {what} of a width other than head_dim {head_dim} are not supported")
    tokens = Fields(path, metadata, "tokenizer.ggml.")
    ends = tokens.integers("eos_token_id", 0, vocab_size - 1, 1) + tokens.integers("eot_token_id", 0, vocab_size - 1, 1)
    window = f.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    return _checked(
        path,
        ModelConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=f.integer("block_count", 1, MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=f.integer("attention.head_count_kv", 1, heads, heads),
            head_dim=head_dim,
            inner_size=f.integer("feed_forward_length", 1, MAX_WIDTH),
            eps=f.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            rope_theta=f.number("rope.freq_base", 1.0001, 1e15, 10000.0),
            rope_scaling=_rope_from_gguf(f, context),
            context_length=context,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensor_names,
            output_bias="model.layers.0.self_attn.o_proj.bias" in tensor_names,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensor_names,
            qk_norm=family == "qwen3",
            tie_embeddings="lm_head.weight" not in tensor_names,
            sliding_window=window if 0 < window < context else None,
            bos_token_id=tokens.integer("bos_token_id", 0, vocab_size - 1, None),
            eos_token_ids=tuple(dict.fromkeys(ends)),
        ),
    )


def _rope_from_gguf(f: Fields, context: int) -> RopeScaling:
    kind = f.text("rope.scaling.type", "none")
    if kind == "none":
        # Before scaling had a type there was one linear factor.
        factor = f.number("rope.scale_linear", 1.0, 1e4, 1.0)
        return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else RopeScaling()
    if kind not in ("linear", "yarn"):
        f.refuse("rope.scaling.type", f"is {shown(kind)}; supported are none, linear, yarn")
    factor = f.number("rope.scaling.factor", 1.0, 1e4)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=f.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, context),
        beta_fast=f.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=f.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
    )


def _checked(path: Path, config: ModelConfig) -> ModelConfig:
    """Relations between fields."""
    if config.num_heads % config.num_kv_heads:
        refuse(path, f"{config.num_heads} attention heads are not a multiple of {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        refuse(path, f"head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    return config
