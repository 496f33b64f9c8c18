"""Any JSON in any field of any file of a model: an answer or a refusal, never another exception."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import mutations
from support.tiny_models import make_tiny_gguf, make_tiny_llama

from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.loading.config import config_from_gguf
from anabranch.runtime.worker.loading.errors import CheckpointError
from anabranch.runtime.worker.loading.gguf import read_gguf

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2**70, -1, 1e400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CONFIG_FIELDS = [
    "architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "eos_token_id",
    "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta", "bos_token_id",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "rope_scaling", "rope_parameters",
    "sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "quantization_config", "num_experts",
]  # fmt: skip
ROPE_FIELDS = [
    "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor",
]  # fmt: skip
TOKENIZER_FIELDS = ["bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "add_bos_token"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("hostile") / "m", layers=1, shards=2)


def opens_or_is_refused(path: Path) -> None:
    for open_model in (open_checkpoint, open_model_text):
        try:
            open_model(path)  # type: ignore[operator]
        except CheckpointError as refusal:
            assert len(str(refusal)) < 2000
            str(refusal).encode()  # nothing unprintable gets into messages


class Edited:
    """A JSON file with other contents for a while."""

    def __init__(self, path: Path, change: Any) -> None:
        self.path, self.change = path, change

    def __enter__(self) -> None:
        self.before = self.path.read_text()
        self.path.write_text(json.dumps(self.change(json.loads(self.before))))

    def __exit__(self, *_: object) -> None:
        self.path.write_text(self.before)


@given(changes=st.dictionaries(st.sampled_from(CONFIG_FIELDS), values, min_size=1, max_size=2))
@settings(max_examples=300, deadline=None)
def test_config_json(model: Path, changes: dict[str, Any]) -> None:
    with Edited(model / "config.json", lambda config: config | changes):
        opens_or_is_refused(model)


@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"]),
    changes=st.dictionaries(st.sampled_from(ROPE_FIELDS), values | st.floats(0.1, 100), max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_rope_settings(model: Path, kind: str, changes: dict[str, Any]) -> None:
    with Edited(model / "config.json", lambda config: config | {"rope_scaling": {"rope_type": kind} | changes}):
        try:
            inv_freq, magnitude = open_checkpoint(model).config.rope()
        except CheckpointError:
            return
        assert ((inv_freq > 0) & (inv_freq < 1e9)).all() and 0 < magnitude < 1e4


@given(changes=st.dictionaries(st.sampled_from(TOKENIZER_FIELDS), values, min_size=1, max_size=3), whole=values)
@settings(max_examples=150, deadline=None)
def test_tokenizer_config_and_generation_config(model: Path, changes: dict[str, Any], whole: Any) -> None:
    with Edited(model / "tokenizer_config.json", lambda config: config | changes):
        opens_or_is_refused(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": whole}))
    try:
        opens_or_is_refused(model)
    finally:
        (model / "generation_config.json").unlink()


@given(
    changes=st.dictionaries(st.just("lm_head.weight") | st.text(max_size=5), values, min_size=1, max_size=3),
    whole=values,
)
@settings(max_examples=150, deadline=None)
def test_the_index_of_shards(model: Path, changes: dict[str, Any], whole: Any) -> None:
    index = model / "model.safetensors.index.json"
    with Edited(index, lambda spec: spec | {"weight_map": spec["weight_map"] | changes}):
        opens_or_is_refused(model)
    with Edited(index, lambda spec: whole):
        opens_or_is_refused(model)
    with Edited(index, lambda spec: spec | {"weight_map": whole}):
        opens_or_is_refused(model)


@given(
    name=st.sampled_from(["lm_head.weight", "__metadata__", "x", "x\ud800"]), entry=values, dtype=values, shape=values
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_safetensors_entries(tmp_path: Path, name: str, entry: Any, dtype: Any, shape: Any) -> None:
    from anabranch.runtime.worker.loading.safetensors import read_safetensors

    path = tmp_path / "x.safetensors"
    for value in (
        entry,
        {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": shape},
    ):
        text = json.dumps({name: value}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        try:
            read_safetensors(path)
        except CheckpointError as refusal:
            str(refusal).encode()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_gguf_metadata(data: st.DataObject) -> None:
    metadata = _gguf_metadata()
    names = st.sampled_from([*metadata, "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count"])
    changes = data.draw(st.dictionaries(names, values, min_size=1, max_size=3))
    try:
        config_from_gguf(Path("x.gguf"), metadata | changes, vocab_size=512, tensor_names=frozenset())
    except CheckpointError as refusal:
        str(refusal).encode()


_metadata: dict[str, Any] = {}


def _gguf_metadata() -> dict[str, Any]:
    import tempfile

    if not _metadata:
        with tempfile.TemporaryDirectory() as directory:
            _metadata.update(read_gguf(make_tiny_gguf(Path(directory) / "t.gguf"), with_tensors=False).metadata)
    return _metadata


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_damaged_json_files(model: Path, name: str) -> None:
    good = (model / name).read_bytes()
    try:
        for damaged in mutations(good, num=100, seed=2, focus=len(good)):
            (model / name).write_bytes(damaged)
            opens_or_is_refused(model)
    finally:
        (model / name).write_bytes(good)
