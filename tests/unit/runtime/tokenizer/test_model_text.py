"""Config, vocabulary and template out of model directories and GGUF files."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import mutations
from support.tiny_models import make_puppet, make_tiny_gguf, make_tiny_llama
from support.tokenizers import CHATML, byte_bpe_tokenizer, sentencepiece_style_tokenizer

from anabranch.runtime.tokenizer.gguf_vocabulary import adds_bos, gguf_tokenizer, unused_ids
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.tokenizer.vocabulary import Vocabulary
from anabranch.runtime.worker.loading.errors import CheckpointError

FILE = Path("model.gguf")


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny")


def test_a_directory_gives_vocabulary_template_and_named_tokens(tiny: Path) -> None:
    text = open_model_text(tiny)
    assert text.template == CHATML
    assert text.named_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert text.vocabulary.eos_token_ids == (2,)
    assert text.vocabulary.vocab_size == text.config.vocab_size == 512
    assert text.warnings == ()


def test_a_gguf_file_gives_the_same_as_the_directory_it_was_made_from(tiny: Path, tmp_path: Path) -> None:
    ours, theirs = open_model_text(tiny), open_model_text(make_tiny_gguf(tmp_path / "tiny.gguf"))
    assert ours.template == theirs.template and ours.named_tokens == theirs.named_tokens
    assert ours.vocabulary.special == theirs.vocabulary.special
    for text in ("The quick brown fox", " 12  é🙂\n\n", "<|im_start|>x<|im_end|>"):
        assert ours.vocabulary.encode_plain(text) == theirs.vocabulary.encode_plain(text)
        assert ours.vocabulary.encode_control(text) == theirs.vocabulary.encode_control(text)


def test_the_weights_are_not_read(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes(b"not weights")
    open_model_text(tiny)


def test_another_tokenizer_can_be_given(tiny: Path, tmp_path: Path) -> None:
    sentencepiece_style_tokenizer(400).save(tmp_path / "other")
    text = open_model_text(tiny, tokenizer=tmp_path / "other")
    assert text.config.vocab_size == 512 and text.vocabulary.num_tokens == 400
    assert open_model_text(tiny, tokenizer=make_tiny_gguf(tmp_path / "t.gguf")).template == CHATML


def test_the_template_is_found_where_transformers_looks_for_it(tiny: Path) -> None:
    config = tiny / "tokenizer_config.json"
    edit(config, chat_template=[{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}])
    assert open_model_text(tiny).template == "listed"
    (tiny / "chat_template.json").write_text(json.dumps({"chat_template": "own json"}))
    assert open_model_text(tiny).template == "own json"
    (tiny / "chat_template.jinja").write_text("own file é")
    assert open_model_text(tiny).template == "own file é"


def test_a_model_without_template_or_tokenizer_config_opens(tiny: Path) -> None:
    (tiny / "tokenizer_config.json").unlink()
    text = open_model_text(tiny)
    assert text.template is None and text.named_tokens == {}
    assert text.vocabulary.eos_token_ids == (2,), "config.json names it too"


def test_end_tokens_come_from_the_tokenizer_as_well(tiny: Path) -> None:
    edit(tiny / "config.json", eos_token_id=0)
    assert open_model_text(tiny).vocabulary.eos_token_ids == (0, 2)
    edit(tiny / "config.json", eos_token_id=None)
    (tiny / "tokenizer_config.json").unlink()
    text = open_model_text(tiny)
    assert text.vocabulary.eos_token_ids == () and "end-of-sequence" in text.warnings[0]


def test_a_token_given_as_an_object_is_its_content(tiny: Path) -> None:
    edit(tiny / "tokenizer_config.json", eos_token={"content": "<|im_start|>", "special": True}, pad_token=None)
    text = open_model_text(tiny)
    assert text.named_tokens["eos_token"] == "<|im_start|>" and text.vocabulary.eos_token_ids == (2, 1)


def test_a_tokenizer_larger_than_the_model_is_refused(tiny: Path) -> None:
    byte_bpe_tokenizer(512).save(tiny)
    edit(tiny / "config.json", vocab_size=500)
    with pytest.raises(CheckpointError, match=r"512 tokens.*500"):
        open_model_text(tiny)


def test_added_tokens_beyond_the_model_are_a_warning(tiny: Path) -> None:
    tokenizer = byte_bpe_tokenizer(512)
    tokenizer.tokenizer.add_special_tokens(["<pad>", "<more>"])
    tokenizer.save(tiny)
    text = open_model_text(tiny)
    assert "'<pad>' (512)" in text.warnings[0] and "512 embeddings" in text.warnings[0]


def test_a_smaller_tokenizer_leaves_padding(tmp_path: Path) -> None:
    text = open_model_text(make_tiny_llama(tmp_path / "m", vocab=512, tokenizer=byte_bpe_tokenizer(500)))
    assert (text.vocabulary.vocab_size, text.vocabulary.num_tokens) == (512, 500)


def test_a_puppet_has_one_id_per_piece(tmp_path: Path) -> None:
    puppet = make_puppet(tmp_path / "p", ["one ", "two", "one ", "🙂".encode()[:2], "🙂".encode()[2:]])
    v = open_model_text(puppet.path).vocabulary
    assert v.decode(puppet.script_ids) == "one twoone 🙂"
    assert puppet.script_ids[-1] in v.eos_token_ids


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("tokenizer.json", b"{}", "not a usable tokenizer"),
        ("tokenizer.json", b"\x80\x04." + b"x" * 50, "not a usable tokenizer"),
        ("tokenizer_config.json", b"[]", "object"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
        ("generation_config.json", b'{"eos_token_id": 99999}', "99999"),
    ],
)
def test_damaged_text_files_are_refused_by_name(tiny: Path, name: str, data: bytes, words: str) -> None:
    (tiny / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_model_text(tiny)
    assert name in str(caught.value) or "chat_template" in str(caught.value)


def test_a_directory_without_tokenizer_json_says_how_to_make_one(tiny: Path) -> None:
    (tiny / "tokenizer.json").rename(tiny / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model.*save_pretrained"):
        open_model_text(tiny)


def test_a_pickle_beside_the_tokenizer_is_never_opened(tiny: Path, tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.write_text, (tmp_path / "canary", "ran"))

    for name in ("tokenizer.pkl", "tokenizer_config.bin", "special_tokens_map.pt"):
        (tiny / name).write_bytes(pickle.dumps(Canary()))
    open_model_text(tiny)
    assert not (tmp_path / "canary").exists()


def test_random_damage_to_a_tokenizer_meets_only_refusals(tiny: Path) -> None:
    path = tiny / "tokenizer.json"
    good = path.read_bytes()
    refused = 0
    for data in mutations(good, num=150, seed=11, focus=2500):
        path.write_bytes(data)
        try:
            open_model_text(tiny).vocabulary.encode_plain("the end 12 é", at_start=True)
        except CheckpointError:
            refused += 1
    assert refused > 50


# ---------------------------------------------------------------- vocabularies in GGUF metadata


def sentencepiece_metadata(spec: dict[str, Any]) -> dict[str, Any]:
    """The metadata that describes a SentencePiece-style tokenizer.json: scores fall with the order of merges."""
    import numpy as np

    vocab: dict[str, int] = spec["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in spec["model"]["merges"]]
    rank = {"".join(pair): -float(i) for i, pair in reversed(list(enumerate(merges)))}
    kinds = [6 if t.startswith("<0x") else {"<unk>": 2, "<s>": 3, "</s>": 3}.get(t, 1) for t in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([rank.get(t, -1e6) for t in tokens], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    }


_SPM = json.loads(sentencepiece_style_tokenizer().tokenizer.to_str())
_FROM_GGUF = Vocabulary(gguf_tokenizer(FILE, sentencepiece_metadata(_SPM)))
_FROM_JSON = Vocabulary(sentencepiece_style_tokenizer().tokenizer)


@given(text=st.text(st.sampled_from("theo quickbrwnfx .1é🙂\n"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_sentencepiece_vocabulary_with_scores_tokenizes_as_its_merges_do(text: str) -> None:
    for at_start in (False, True):
        ids = _FROM_GGUF.encode_plain(text, at_start=at_start)
        assert ids == _FROM_JSON.encode_plain(text, at_start=at_start)
        assert _FROM_GGUF.decode(ids) == _FROM_JSON.decode(ids)


def test_the_dummy_space_can_be_switched_off_in_the_metadata() -> None:
    v = Vocabulary(gguf_tokenizer(FILE, sentencepiece_metadata(_SPM) | {"tokenizer.ggml.add_space_prefix": False}))
    assert v.encode_plain("the", at_start=True) == _FROM_JSON.encode_plain("the")
    assert v.strips_leading_space == 0


def test_rows_that_the_file_calls_unused_have_no_token() -> None:
    import numpy as np

    metadata = sentencepiece_metadata(_SPM)
    tokens = [*metadata["tokenizer.ggml.tokens"], "[PAD512]", "[PAD513]"]
    kinds = np.append(metadata["tokenizer.ggml.token_type"], [5, 5])
    assert unused_ids({"tokenizer.ggml.token_type": kinds}) == [512, 513]
    scores = np.append(metadata["tokenizer.ggml.scores"], [0.0, 0.0])
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.scores": scores}
    v = Vocabulary(gguf_tokenizer(FILE, metadata | more), vocab_size=520, unused=[512, 513])
    assert (v.num_tokens, v.vocab_size, v.token(512), v.token_bytes(513)) == (512, 520, None, b"")
    assert max(v.encode_plain("[PAD512]")) < 512


SPLITS = [
    ("gpt-2", "it's 123 x\n\n y", ["it", "'s", " 123", " x", "\n\n", " y"]),
    ("smollm", "a 12", ["a", " ", "1", "2"]),
    ("llama-bpe", "I'M 12345 a\n\n  b!?\n", ["I", "'M", " ", "123", "45", " a", "\n\n", " ", " b", "!?\n"]),
    ("qwen2", "I'm 123 (x)", ["I", "'m", " ", "1", "2", "3", " (", "x", ")"]),
    ("default", "it's 12345!", ["it", "'", "s", " ", "123", "45", "!"]),
]


@pytest.mark.parametrize(("pre", "text", "pieces"), SPLITS)
def test_a_named_splitting_rule_cuts_text_as_the_original_does(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(FILE, byte_level_metadata() | {"tokenizer.ggml.pre": pre})
    cut = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def byte_level_metadata() -> dict[str, Any]:
    spec = json.loads(byte_bpe_tokenizer().tokenizer.to_str())
    vocab: dict[str, int] = spec["model"]["vocab"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.merges": merges,
    }


def test_whole_words_win_where_the_original_ignores_merges() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "Ġzebra"]
    word = tokenizers.Tokenizer.from_str(gguf_tokenizer(FILE, metadata | {"tokenizer.ggml.pre": "llama-bpe"}).to_str())
    assert word.encode(" zebra").tokens == ["Ġzebra"]
    assert gguf_tokenizer(FILE, metadata).encode(" zebra").tokens != ["Ġzebra"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' twice"),
        ({"tokenizer.ggml.tokens": ["a" * 5000]}, "4096 characters"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": None}, "gpt2 and llama"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'.*smollm"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "nospace"),
        ({"tokenizer.ggml.merges": ["x zzz"]}, "x zzz"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ],
)
def test_a_damaged_vocabulary_is_refused_naming_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        gguf_tokenizer(FILE, byte_level_metadata() | change)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}, False),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_a_beginning_of_sequence_is_added_as_the_file_says(metadata: dict[str, Any], expected: bool) -> None:
    assert adds_bos(metadata) is expected
