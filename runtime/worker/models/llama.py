"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3.

All are the same decoder: RMS norm, rotary attention with grouped KV heads, gated SiLU MLP, residuals around both. What differs is in the
config: biases (Qwen2), a norm over each head of q and k (Qwen3), a sliding window (Mistral), tied embeddings.

Source: Touvron et al. 2023 (Llama); Jiang et al. 2023 (Mistral); Qwen team 2024, 2025
"""

from dataclasses import dataclass

from anabranch.kernels.interface import AttentionShape, Backend, Logits, Ops, Rope, Weight
from anabranch.runtime.worker.loading.checkpoint import Checkpoint
from anabranch.runtime.worker.loading.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Weight  # [hidden]
    qkv: Weight  # [(q + 2 kv heads) * head_dim, hidden]
    q_norm: Weight | None  # [head_dim]
    k_norm: Weight | None
    output: Weight  # [hidden, q heads * head_dim]
    mlp_norm: Weight  # [hidden]
    gate_up: Weight  # [2 * inner, hidden]
    down: Weight  # [hidden, inner]


@dataclass(frozen=True, slots=True)
class Llama:
    config: ModelConfig
    shape: AttentionShape
    rope: Rope
    embedding: Weight  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Weight  # [hidden]
    lm_head: Weight  # [vocab, hidden]; the embedding itself if the two are tied

    def forward(self, ops: Ops) -> Logits:
        h = ops.embed(self.embedding)
        for i, layer in enumerate(self.layers):
            q = ops.attention_input(
                h, i, layer.input_norm, layer.qkv, self.shape, self.rope, layer.q_norm, layer.k_norm
            )
            h = ops.linear_add(ops.attention(q, i, self.shape), layer.output, h)
            h = ops.linear_add(ops.gated_mlp_input(h, layer.mlp_norm, layer.gate_up, self.config.eps), layer.down, h)
        return ops.logits(h, self.norm, self.lm_head, self.config.eps)


def build_llama(checkpoint: Checkpoint, backend: Backend) -> Llama:
    """Take every parameter once. Raises CheckpointError for one that is missing or misshapen."""
    c = checkpoint.config
    embedding = _matrix(checkpoint, backend, {"model.embed_tokens": c.vocab_size}, c.hidden_size)
    lm_head = embedding
    if not c.tie_embeddings:
        lm_head = _matrix(checkpoint, backend, {"lm_head": c.vocab_size}, c.hidden_size)
    inv_freq, magnitude = c.rope()
    return Llama(
        config=c,
        shape=AttentionShape(
            c.num_heads, c.num_kv_heads, c.head_dim, c.head_dim**-0.5, c.eps, sliding_window=c.sliding_window
        ),
        rope=Rope(inv_freq, magnitude),
        embedding=embedding,
        layers=tuple(_build_layer(checkpoint, backend, f"model.layers.{i}") for i in range(c.num_layers)),
        norm=_vector(checkpoint, backend, "model.norm", c.hidden_size),
        lm_head=lm_head,
    )


def _build_layer(checkpoint: Checkpoint, backend: Backend, name: str) -> Layer:
    c = checkpoint.config
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
    gate_up = {f"{mlp}.gate_proj": c.inner_size, f"{mlp}.up_proj": c.inner_size}
    output, down = {f"{attention}.o_proj": c.hidden_size}, {f"{mlp}.down_proj": c.hidden_size}
    return Layer(
        input_norm=_vector(checkpoint, backend, f"{name}.input_layernorm", c.hidden_size),
        qkv=_matrix(checkpoint, backend, qkv, c.hidden_size, bias=c.qkv_bias),
        q_norm=_vector(checkpoint, backend, f"{attention}.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=_vector(checkpoint, backend, f"{attention}.k_norm", c.head_dim) if c.qk_norm else None,
        output=_matrix(checkpoint, backend, output, q_rows, bias=c.output_bias),
        mlp_norm=_vector(checkpoint, backend, f"{name}.post_attention_layernorm", c.hidden_size),
        gate_up=_matrix(checkpoint, backend, gate_up, c.hidden_size, bias=c.mlp_bias),
        down=_matrix(checkpoint, backend, down, c.inner_size, bias=c.mlp_bias),
    )


def _matrix(
    checkpoint: Checkpoint, backend: Backend, parts: dict[str, int], columns: int, *, bias: bool = False
) -> Weight:
    """One matrix from parts (name: rows) stacked by rows."""
    raw = [checkpoint.take(f"{name}.weight", (rows, columns)) for name, rows in parts.items()]
    return backend.matrix(
        raw, [checkpoint.take(f"{name}.bias", (rows,)) for name, rows in parts.items()] if bias else ()
    )


def _vector(checkpoint: Checkpoint, backend: Backend, name: str, width: int) -> Weight:
    return backend.vector(checkpoint.take(f"{name}.weight", (width,)))
