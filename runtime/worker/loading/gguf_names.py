"""GGUF tensors under their Hugging Face names, and q/k rows back in half-split rotary order.

llama.cpp's converter reorders the rows of q and k of the "llama" architecture so that a rotary pair is adjacent
(2i, 2i + 1). We compute with Hugging Face's order, in which pair i is (i, i + head_dim / 2). Rows are whole blocks, so
raw rows move without being decoded.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.formats import RawTensor
from anabranch.runtime.worker.loading.errors import refuse, shown

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")


def canonical_name(path: Path, name: str) -> str:
    """The Hugging Face name of a tensor of a Llama-family GGUF file. Raises CheckpointError for any other tensor."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = _LAYER.fullmatch(name)
    if found and found[2] in _IN_LAYER:
        return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"
    refuse(path, f"tensor {shown(name)} belongs to no architecture that is supported")


def half_split_rows(num_rows: int, head_dim: int) -> NDArray[np.intp]:
    """Which adjacent-pair row stands at each half-split row."""
    rows = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


class CanonicalTensors(Mapping[str, RawTensor]):
    """A GGUF file's tensors by Hugging Face name. q and k of "llama" are reordered (copied) when they are read."""

    def __init__(self, path: Path, tensors: Mapping[str, RawTensor], *, reordered_head_dim: int | None) -> None:
        self._tensors = {canonical_name(path, name): raw for name, raw in tensors.items()}
        self._head_dim = reordered_head_dim

    def __getitem__(self, name: str) -> RawTensor:
        raw = self._tensors[name]
        if self._head_dim is None or not re.search(r"\.[qk]_proj\.(weight|bias)$", name):
            return raw
        if raw.shape[0] % self._head_dim:
            return raw  # a wrong shape, which is refused by whoever takes it
        order = half_split_rows(raw.shape[0], self._head_dim)
        if len(raw.shape) == 1:  # a bias: one row of values
            values = raw.data.reshape(raw.shape[0], -1)[order]
            return replace(raw, data=values.reshape(1, -1))
        return replace(raw, data=raw.data[order])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
