"""Opening model directories and GGUF files: every tensor accounted for, nothing from outside, nothing that runs."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import (
    llama_config,
    make_tiny_gguf,
    make_tiny_llama,
    random_llama_tensors,
    safetensors_bytes,
    write_safetensors,
)

from anabranch.kernels.formats import RawTensor
from anabranch.runtime.worker.loading.checkpoint import Checkpoint, LoadReport, open_checkpoint
from anabranch.runtime.worker.loading.errors import CheckpointError
from anabranch.runtime.worker.loading.gguf_names import canonical_name, half_split_rows


def take_all(checkpoint: Checkpoint, *, but: tuple[str, ...] = ()) -> LoadReport:
    """Take every parameter that a model of this config has, as a model builder would."""
    c = checkpoint.config
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for layer in range(c.num_layers):
        p = f"model.layers.{layer}."
        shapes |= {f"{p}{norm}.weight": (c.hidden_size,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, c.hidden_size)
            if c.qkv_bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
            if c.qk_norm and name != "v":
                shapes[f"{p}self_attn.{name}_norm.weight"] = (c.head_dim,)
        shapes[f"{p}self_attn.o_proj.weight"] = (c.hidden_size, q_rows)
        if c.output_bias:
            shapes[f"{p}self_attn.o_proj.bias"] = (c.hidden_size,)
        shapes |= {f"{p}mlp.{name}_proj.weight": (c.inner_size, c.hidden_size) for name in ("gate", "up")}
        shapes[f"{p}mlp.down_proj.weight"] = (c.hidden_size, c.inner_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for name, shape in shapes.items():
        if name not in but:
            checkpoint.take(name, shape)
    return checkpoint.finish()


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        take_all(open_checkpoint(path))
    return str(caught.value)


def values_of(raw: RawTensor) -> np.ndarray:
    return raw.data.view({"F32": "<f4", "F16": "<f2"}[raw.format]).reshape(raw.shape)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_each_parameter_of_each_family_is_set_once_and_reported(
    tmp_path: Path, model_type: str, tie: bool, shards: int
) -> None:
    path = make_tiny_llama(tmp_path / "m", model_type=model_type, tie=tie, shards=shards, layers=1)
    checkpoint = open_checkpoint(path)
    report = take_all(checkpoint)
    assert {raw.name for raw in report.taken} == set(checkpoint.tensors)
    assert report.ignored == ()
    text = str(report)
    assert all(name in text for name in checkpoint.tensors)
    assert f"{len(checkpoint.tensors)} tensors" in text


def test_gguf_and_safetensors_of_one_model_are_the_same_checkpoint(tmp_path: Path) -> None:
    for model_type in ("llama", "qwen2", "qwen3"):
        ours = open_checkpoint(make_tiny_llama(tmp_path / model_type, model_type=model_type, seed=4))
        theirs = open_checkpoint(make_tiny_gguf(tmp_path / f"{model_type}.gguf", model_type=model_type, seed=4))
        assert set(ours.tensors) == set(theirs.tensors)
        for name in ours.tensors:
            np.testing.assert_array_equal(values_of(ours.tensors[name]), values_of(theirs.tensors[name]), name)
        same = ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "inner_size", "qkv_bias", "qk_norm")
        assert all(getattr(ours.config, name) == getattr(theirs.config, name) for name in same)
        assert ours.config.eos_token_ids == theirs.config.eos_token_ids
        take_all(theirs)


def test_a_directory_with_one_gguf_file_is_that_file_and_with_two_is_refused(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "a.gguf")
    take_all(open_checkpoint(tmp_path))
    make_tiny_gguf(tmp_path / "b.gguf")
    assert all(word in refusal(tmp_path) for word in ("a.gguf", "b.gguf", "2 GGUF files"))


def test_rotary_rows_of_a_quantized_matrix_move_as_whole_blocks(tmp_path: Path) -> None:
    exact = open_checkpoint(make_tiny_gguf(tmp_path / "a.gguf", quant="F32"))
    quantized = open_checkpoint(make_tiny_gguf(tmp_path / "b.gguf", quant="Q8_0"))
    name = "model.layers.0.self_attn.q_proj.weight"
    raw = quantized.tensors[name]
    blocks = raw.data.reshape(raw.shape[0], -1, 34)
    scales = blocks[:, :, :2].copy().view("<f2").astype(np.float32)
    back = (scales * blocks[:, :, 2:].copy().view(np.int8)).reshape(raw.shape)
    np.testing.assert_allclose(back, values_of(exact.tensors[name]), atol=0.02)


def test_the_order_of_rotary_rows_is_the_inverse_of_the_converter() -> None:
    rows = np.arange(24)  # three heads of 8
    converted = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(converted[half_split_rows(24, 8)], rows)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    tensors = random_llama_tensors(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(path, tensors)
    message = refusal(path)
    assert "model.layers.1.mlp.up_proj.weight" in message and "[128, 64]" in message and "missing" in message


def test_a_tensor_that_no_parameter_wants_is_named(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    tensors = random_llama_tensors(config) | {"model.layers.0.self_attn.sinks": np.zeros(4, np.float32)}
    write_safetensors(path, tensors)
    assert "model.layers.0.self_attn.sinks" in refusal(path)


def test_derived_buffers_may_be_left_over(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_safetensors(path, random_llama_tensors(config) | {name: np.zeros(8, np.float32)})
    assert take_all(open_checkpoint(path)).ignored == (name,)


def test_a_tensor_of_another_shape_is_refused_not_transposed(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    tensors = random_llama_tensors(config)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    write_safetensors(path, tensors)
    assert all(word in refusal(path) for word in (name, "[128, 64]", "[64, 128]"))


def test_an_integer_tensor_where_a_weight_is_due_is_refused(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", layers=1)
    data = bytearray((path / "model.safetensors").read_bytes())
    text = data.replace(b'"model.norm.weight": {"dtype": "F32"', b'"model.norm.weight": {"dtype": "I32"')
    (path / "model.safetensors").write_bytes(bytes(text))
    assert all(word in refusal(path) for word in ("model.norm.weight", "I32"))


def test_tied_embeddings_need_no_lm_head_and_take_an_equal_one(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", tie=True)
    config = json.loads((path / "config.json").read_text())
    tensors = random_llama_tensors(config)
    assert "lm_head.weight" not in tensors
    take_all(open_checkpoint(path))
    write_safetensors(path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert take_all(open_checkpoint(path)).ignored == ("lm_head.weight",)
    write_safetensors(path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    assert "tie_word_embeddings" in refusal(path)


def test_taking_a_tensor_twice_is_our_own_mistake(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path / "m"))
    checkpoint.take("model.norm.weight", (64,))
    with pytest.raises(AssertionError, match="twice"):
        checkpoint.take("model.norm.weight", (64,))


class TestShards:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return make_tiny_llama(tmp_path / "m", shards=3)

    def edit_index(self, path: Path, **changes: object) -> None:
        index = path / "model.safetensors.index.json"
        spec = json.loads(index.read_text())
        spec["weight_map"] |= changes
        index.write_text(json.dumps(spec))

    def test_a_missing_shard_is_listed(self, path: Path) -> None:
        (path / "model-00002-of-00003.safetensors").unlink()
        assert all(word in refusal(path) for word in ("1 of 3", "model-00002-of-00003.safetensors"))

    def test_a_shard_in_other_capital_letters_is_pointed_out(self, path: Path) -> None:
        (path / "model-00002-of-00003.safetensors").rename(path / "Model-00002-of-00003.safetensors")
        assert all(word in refusal(path) for word in ("model-00002", "'Model-00002", "capital"))

    @pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, "a\0b"])
    def test_a_shard_outside_the_directory_is_refused(self, path: Path, name: object) -> None:
        (path.parent / "evil.safetensors").write_bytes(safetensors_bytes({"x": np.ones(1, np.float32)}))
        self.edit_index(path, x=name)
        assert "not a plain file name" in refusal(path)

    def test_a_link_out_of_the_directory_is_refused(self, path: Path) -> None:
        target = path.parent / "elsewhere.safetensors"
        (path / "model-00001-of-00003.safetensors").rename(target)
        (path / "model-00001-of-00003.safetensors").symlink_to(target)
        assert "outside the model's directory" in refusal(path)

    def test_a_download_cache_may_link_to_its_own_blobs(self, path: Path) -> None:
        snapshot = path.parent / "models--x" / "snapshots" / "1234"
        blobs = path.parent / "models--x" / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for i, file in enumerate(sorted(path.iterdir())):
            file.rename(blobs / str(i))
            (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(i))
        take_all(open_checkpoint(snapshot))

    def test_an_index_and_shards_that_disagree_are_refused(self, path: Path) -> None:
        self.edit_index(path, **{"model.norm.weight": "model-00001-of-00003.safetensors"})
        assert "model.norm.weight" in refusal(path)

    def test_a_tensor_that_the_index_does_not_list_is_refused(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        spec = json.loads(index.read_text())
        del spec["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(spec))
        assert all(word in refusal(path) for word in ("does not list", "model.norm.weight"))


class Canary:
    """Unpickling one writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (self.path, "ran"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.npy"])
def test_pickle_checkpoints_are_refused_unopened_with_the_way_out(tmp_path: Path, name: str) -> None:
    path = make_tiny_llama(tmp_path / "m")
    (path / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    (path / name).write_bytes(pickle.dumps(Canary(canary)))
    for target in (path, path / name):
        message = refusal(target)
        assert name in message and "save_pretrained" in message and "run when they are loaded" in message
    assert not canary.exists()


def test_a_directory_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert all(word in refusal(tmp_path) for word in ("no weights", "notes.txt"))
    assert "does not exist" in refusal(tmp_path / "absent")


def test_several_safetensors_files_without_an_index_are_refused(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "m", shards=2)
    (path / "model.safetensors.index.json").unlink()
    assert "index.json" in refusal(path)


def test_a_tensor_of_another_architecture_in_a_gguf_file_is_named() -> None:
    assert canonical_name(Path("x"), "blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    for name in ("blk.0.ssm_in.weight", "blk.01.attn_q.weight", "blk.0.attn_q.scale", "v.patch_embd.weight"):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            canonical_name(Path("x"), name)


def test_opening_copies_no_weights(tmp_path: Path) -> None:
    from support.damage import peak_allocation

    config = llama_config(
        layers=1, hidden=512, vocab=4096, heads=8, kv_heads=8, head_dim=64, inner=512, tie=True, eos=0, bos=0
    )
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path, random_llama_tensors(config))
    with peak_allocation() as peak:
        report = take_all(open_checkpoint(path))
    assert report.num_bytes > 10 << 20
    assert peak.num_bytes < 1 << 20, f"opening allocated {peak.num_bytes} bytes"
