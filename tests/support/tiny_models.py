"""Small models as ordinary model directories: R-tiny (random weights, real attention) and Puppet (speaks a script)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.tokenizers import TokenizerFiles, byte_bpe_tokenizer, puppet_tokenizer

Tensors = dict[str, NDArray[np.float32]]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def pack(values: NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of values in a safetensors dtype: F32, F16 or BF16 (round to nearest even)."""
    values = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "BF16":
        bits = values.view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def safetensors_bytes(tensors: Mapping[str, NDArray[np.float32]], dtype: str = "F32") -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, values in tensors.items():
        data = pack(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


def write_safetensors(directory: Path, tensors: Tensors, *, dtype: str = "F32", shards: int = 1) -> None:
    """model.safetensors, or `shards` files and an index."""
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        (directory / file).write_bytes(safetensors_bytes(part, dtype))
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(pack(values, dtype)) for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def llama_config(
    *,
    layers: int,
    hidden: int,
    vocab: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    tie: bool,
    eos: int | list[int],
    bos: int | None,
    context: int = 1024,
    model_type: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    """A config.json as transformers writes it. `more` adds or replaces fields."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": tie,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    if model_type == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    return config | more


def random_llama_tensors(config: Mapping[str, Any], *, seed: int = 0) -> Tensors:
    """Random weights for a config: large enough that attention is sharp, so a wrong KV entry moves the logits."""
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * (gain / math.sqrt(columns))).astype(np.float32)

    def norm(width: int) -> NDArray[np.float32]:
        return rng.uniform(0.7, 1.3, width).astype(np.float32)

    # Tied embeddings are kept small, or the residual stream would make each token predict itself.
    scale = 0.2 if config["tie_word_embeddings"] else 1.0
    tensors: Tensors = {"model.embed_tokens.weight": (rng.standard_normal((vocab, hidden)) * scale).astype(np.float32)}
    bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm(hidden)
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = matrix(rows, hidden, 2.0 if part != "v" else 1.0)
            if bias:
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = rng.standard_normal(rows).astype(
                    np.float32
                ) * np.float32(0.3)
        if config["model_type"] == "qwen3":
            tensors[prefix + "self_attn.q_norm.weight"] = norm(dim)
            tensors[prefix + "self_attn.k_norm.weight"] = norm(dim)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_rows)
        if config.get("attention_bias", False):
            tensors[prefix + "self_attn.o_proj.bias"] = rng.standard_normal(hidden).astype(np.float32) * np.float32(0.1)
        tensors[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden, 4.0)
    return tensors


def make_tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    inner: int = 128,
    tie: bool = False,
    model_type: str = "llama",
    dtype: str = "F32",
    shards: int = 1,
    context: int = 1024,
    tokenizer: TokenizerFiles | None = None,
    **config: Any,
) -> Path:
    """R-tiny: a random Llama-type model in `path` (created), with a byte-level BPE tokenizer.

    Extra arguments go into config.json.
    """
    path = Path(path)
    tokenizer = tokenizer or byte_bpe_tokenizer(min(vocab, 512))
    tokenizer.save(path)
    bos = tokenizer.config.get("bos_token")
    spec = llama_config(
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        inner=inner,
        tie=tie,
        eos=tokenizer.eos_id,
        bos=tokenizer.id(bos) if bos else None,
        context=context,
        model_type=model_type,
        **config,
    )
    (path / "config.json").write_text(json.dumps(spec, indent=1))
    write_safetensors(path, random_llama_tensors(spec, seed=seed), dtype=dtype, shards=shards)
    return path


@dataclass(frozen=True)
class Puppet:
    path: Path
    script_ids: list[int]  # what greedy decoding says after any prompt, the closing end-of-sequence included
    tokenizer: TokenizerFiles


def make_puppet(
    path: Path,
    script: Sequence[str | bytes],
    *,
    template: str | None = None,
    loop: bool = False,
    vocab_size: int | None = None,
    context: int = 1024,
) -> Puppet:
    """A model whose greedy continuation of any prompt is `script`, one token per piece, then end-of-sequence.

    Pieces may repeat and may be incomplete UTF-8. With `loop` the script starts again instead of ending.
    """
    keywords = {} if template is None else {"template": template}
    tokenizer, ids = puppet_tokenizer(script, vocab_size=vocab_size, **keywords)
    if not loop:
        ids = [*ids, tokenizer.eos_id]
    follow = dict.fromkeys(range(tokenizer.vocab_size), ids[0]) | dict(pairwise(ids))
    follow[ids[-1]] = ids[0]
    return Puppet(make_puppet_map(path, follow, tokenizer, context=context), ids, tokenizer)


def make_puppet_map(
    path: Path,
    follow: Mapping[int, int | Mapping[int, float]],
    tokenizer: TokenizerFiles,
    *,
    vocab: int | None = None,
    context: int = 1024,
) -> Path:
    """A model whose next-token distribution depends on the last token only.

    follow[t] is the id that comes after t (almost surely), or its probabilities by id. Ids not named get logit -30.
    Embeddings are one-hot; attention output and MLP down-projection are zero (so NaN in the KV cache still shows).
    """
    path = Path(path)
    vocab = vocab or tokenizer.vocab_size
    hidden = -(-vocab // 64) * 64
    config = llama_config(
        layers=1, hidden=hidden, vocab=vocab, heads=2, kv_heads=1, head_dim=32, inner=64, tie=False,
        eos=tokenizer.eos_id, bos=tokenizer.id(tokenizer.config["bos_token"]), context=context,
    )  # fmt: skip
    tensors = random_llama_tensors(config, seed=0)
    tensors["model.embed_tokens.weight"] = np.eye(vocab, hidden, dtype=np.float32)
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 0
    # The RMS norm multiplies a one-hot vector by 1 / sqrt(1 / hidden + eps); undo that, so lm_head holds the logits.
    tensors["model.norm.weight"] = np.full(hidden, math.sqrt(1 / hidden + config["rms_norm_eps"]), np.float32)
    lm_head = np.full((vocab, hidden), -30.0, np.float32)
    for token_id, then in follow.items():
        for next_id, probability in ({then: 1.0} if isinstance(then, int) else then).items():
            lm_head[next_id, token_id] = math.log(probability)
    tensors["lm_head.weight"] = lm_head
    tokenizer.save(path)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_safetensors(path, tensors)
    return path


def make_tiny_gguf(
    path: Path, *, seed: int = 0, quant: str = "F32", model_type: str = "llama", tie: bool = False, **shape: int
) -> Path:
    """The weights of `make_tiny_llama(seed=seed)` as a GGUF file, written by the `gguf` package as llama.cpp's converter does.

    Matrices in `quant` (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1), norms in F32; q and k rows in adjacent-pair order for llama.
    """
    import gguf

    sizes = {"layers": 2, "hidden": 64, "vocab": 512, "heads": 4, "kv_heads": 2, "inner": 128} | shape
    tokenizer = byte_bpe_tokenizer(sizes["vocab"])
    head_dim = sizes["hidden"] // sizes["heads"]
    config = llama_config(
        **sizes, head_dim=head_dim, tie=tie, eos=tokenizer.eos_id, bos=0, model_type=model_type,
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, model_type)
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["inner"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _write_gguf_vocabulary(writer, tokenizer)
    kind = gguf.GGMLQuantizationType[quant]
    for name, values in random_llama_tensors(config, seed=seed).items():
        if model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _adjacent_pairs(values, head_dim)
        if values.ndim == 2 and quant != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_gguf_vocabulary(writer: Any, tokenizer: TokenizerFiles) -> None:
    model = json.loads(tokenizer.tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_chat_template(tokenizer.config["chat_template"])


def _adjacent_pairs(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows so that rotary pair i of a head is rows 2i and 2i + 1, from i and i + head_dim / 2."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(values.shape))


def _gguf_name(name: str) -> str:
    for old, new in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(old, new)
    return name
