"""Our models against transformers' own code, float32, the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.tiny_models import make_tiny_llama
from support.worker_driver import Driver
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from anabranch.kernels.layout import KVSpec, StepBatch
from anabranch.kernels.reference import ReferenceBackend
from anabranch.runtime.models_cache import default_model_path
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.models.registry import build_model
from anabranch.runtime.worker.worker import Worker

TOLERANCE = 1e-3  # of logits

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie": True},
    "llama-mha": {"kv_heads": 4},
    "llama-biases": {"attention_bias": True},
    "llama-wide-head": {"head_dim": 32},
    "llama3-rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "yarn": {"rope_scaling": YARN},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"model_type": "mistral"},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied-bf16": {"model_type": "qwen2", "tie": True, "dtype": "BF16"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "sharded-f16": {"shards": 3, "dtype": "F16"},
}


def theirs(path: Path, ids: list[int], **how: Any) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **how).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def ours(path: Path, ids: list[int], chunks: list[int], page_size: int = 4) -> np.ndarray:
    """Logits at every position, computed in chunks of these sizes."""
    backend = ReferenceBackend()
    model, _ = build_model(open_checkpoint(path), backend)
    c = model.config
    num_pages = -(-len(ids) // page_size)
    pool = backend.kv_pool(KVSpec(num_pages, page_size, c.num_layers, c.num_kv_heads, c.head_dim, "f32"))
    pool.poison_pages(np.arange(num_pages, dtype=np.int32))
    run, table, out, start = (
        backend.compile(model.forward, pool),
        np.arange(num_pages, dtype=np.int32)[::-1].copy(),
        [],
        0,
    )
    for size in chunks:
        stop = start + size
        i32 = lambda *values: np.array(values, np.int32)  # noqa: E731
        out.append(run(StepBatch(
            i32(*ids[start:stop]), np.arange(start, stop, dtype=np.int32), i32(0, size), i32(stop), i32(0, num_pages), table,
            np.arange(size, dtype=np.int32),
        )).numpy())  # fmt: skip
        start = stop
    assert start == len(ids)
    return np.concatenate(out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_equal_transformers(variant: str, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", layers=2, context=256, **VARIANTS[variant])
    ids = np.random.default_rng(1).integers(3, 500, 90).tolist()
    expected = theirs(path, ids)
    assert np.abs(expected).max() > 1  # there is something to compare
    for chunks in ([90], [1] * 20 + [33, 37]):
        np.testing.assert_allclose(ours(path, ids, chunks), expected, atol=TOLERANCE / 10, rtol=1e-4)


def test_every_tensor_of_the_file_sets_one_parameter(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", tie=True)
    checkpoint = open_checkpoint(path)
    _, report = build_model(checkpoint, ReferenceBackend())
    assert sorted(raw.name for raw in report.taken) == sorted(checkpoint.tensors)
    assert "lm_head.weight" not in checkpoint.tensors


GGUF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def transformers_from_gguf(path: Path) -> LlamaForCausalLM:
    """The weights as the `gguf` package reads them, in transformers' Llama: nothing of ours has touched them."""
    reader = gguf.GGUFReader(path)
    field = lambda name: reader.fields[f"llama.{name}"].contents()  # noqa: E731
    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            num_heads = {"attn_q": heads, "attn_k": kv_heads}.get(parts[2])
            if num_heads is not None:  # the file pairs dimensions 2i and 2i + 1, transformers i and i + half
                values = values.reshape(num_heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            name = f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        state[name] = torch.from_numpy(np.array(values, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=len(state["lm_head.weight"]), hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"), num_hidden_layers=field("block_count"), num_attention_heads=heads,
        num_key_value_heads=kv_heads, rms_norm_eps=field("attention.layer_norm_rms_epsilon"), rope_theta=field("rope.freq_base"),
        max_position_embeddings=field("context_length"), tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Path, Any]]:
    path = default_model_path()
    yield path, open_model_text(path).vocabulary


@pytest.mark.slow
def test_the_default_model_equals_transformers(real: tuple[Path, Any]) -> None:
    path, vocabulary = real
    model = transformers_from_gguf(path)
    worker = Worker(path, backend="reference", page_size=16, num_pages=64)
    driver = Driver(worker)
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    questions = [
        "What is the capital of France?", "Name three colours.", "Write one sentence about the sea.", "What is 2 + 3?",
        "Say hello in Spanish.", "Who wrote Hamlet?", "Finish: roses are red,", "Give a synonym of quick.",
    ]  # fmt: skip
    with torch.inference_mode():
        ids = vocabulary.encode_control(
            text.format("Explain paging in two sentences, with an example from a library.") * 4
        )
        expected = model(torch.tensor([ids])).logits[0].numpy()
        found = ours(path, ids, [60, 1, len(ids) - 61], page_size=16)
        assert np.abs(found - expected).max() < TOLERANCE
        for question in questions:
            prompt = vocabulary.encode_control(text.format(question))
            branch = driver.open(prompt)
            output = driver.generate(branch, 64, stop=vocabulary.eos_token_ids)
            theirs_out = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0)
            assert output == theirs_out[0, len(prompt) : len(prompt) + len(output)].tolist(), question
            driver.close(branch)
