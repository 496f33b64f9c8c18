"""The default model as its files have it: config, weights, tokenizer and template, against published readers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from anabranch.runtime.models_cache import DEFAULT, default_model_path, verify
from anabranch.runtime.tokenizer.detokenizer import Detokenizer
from anabranch.runtime.tokenizer.model_text import ModelText, open_model_text
from anabranch.runtime.tokenizer.templates import ChatTemplate, encode_chat
from anabranch.runtime.tokenizer.turns import ChatTurns, TurnTexts
from anabranch.runtime.tokenizer.vocabulary import Part
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.loading.gguf_names import half_split_rows

TEXT = (
    "Once upon a time, 3 apples cost $4.50...\n\n  def f(x):\n\treturn x**2  # it's fine\nnaïve café 日本語 🙂👩‍👩‍👧 ĠĊ"
)


@pytest.fixture(scope="module")
def path() -> Path:
    return default_model_path()


@pytest.fixture(scope="module")
def text(path: Path) -> ModelText:
    return open_model_text(path)


@pytest.fixture(scope="module")
def published(path: Path) -> Any:
    """transformers' tokenizer over the file's vocabulary, with the splitting of the model's own tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    fields = gguf.GGUFReader(path).fields
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type"))
    pairs = [tuple(line.split(" ")) for line in merges]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds) if kind == 3])
    template = fields["tokenizer.chat_template"].contents()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=template
    )


def test_the_cached_file_is_the_pinned_one(path: Path) -> None:
    assert verify(path, DEFAULT)


def test_the_config_is_that_of_smollm2_135m(text: ModelText) -> None:
    c = text.config
    assert (c.family, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (
        "llama",
        30,
        576,
        9,
        3,
        64,
    )
    assert (c.inner_size, c.vocab_size, c.context_length, c.rope_theta) == (1536, 49152, 8192, 100000.0)
    assert c.tie_embeddings and not c.qkv_bias and c.rope_scaling.kind == "none"
    assert text.vocabulary.eos_token_ids == (2,) and not text.vocabulary.adds_bos


def test_every_tensor_is_taken_once_and_its_bytes_are_those_of_the_file(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    q = checkpoint.tensors["model.layers.7.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q.data, theirs["blk.7.attn_q.weight"].data[half_split_rows(576, 64)])
    v = checkpoint.tensors["model.layers.7.self_attn.v_proj.weight"]
    np.testing.assert_array_equal(v.data, theirs["blk.7.attn_v.weight"].data)
    for name in list(checkpoint.tensors):
        checkpoint.take(name, checkpoint.tensors[name].shape)
    report = checkpoint.finish()
    assert len(report.taken) == len(theirs) == 272
    assert report.num_bytes == sum(t.data.nbytes for t in theirs.values())


@given(piece=st.text(st.sampled_from(TEXT), max_size=60))
@settings(max_examples=300, deadline=None)
def test_text_is_tokenized_as_transformers_does(text: ModelText, published: Any, piece: str) -> None:
    assert text.vocabulary.encode_plain(piece) == published(piece, add_special_tokens=False).input_ids


@given(ids=st.lists(st.integers(0, 49151), max_size=30))
@settings(max_examples=300, deadline=None)
def test_ids_are_detokenized_as_transformers_does(text: ModelText, published: Any, ids: list[int]) -> None:
    for skip in (True, False):
        detokenizer = Detokenizer(text.vocabulary, skip_special_tokens=skip)
        ours = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
        assert ours == published.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


CHATS = [
    [("user", "What is 2 + 2?")],
    [("system", "Be brief."), ("user", TEXT), ("assistant", " Four.\n"), ("user", "And 3 + 3? ")],
    [("user", ""), ("assistant", ""), ("user", "\n\n")],
]


@pytest.mark.parametrize("turns", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_a_chat_is_tokenized_as_transformers_does(text: ModelText, published: Any, turns: Any, generate: bool) -> None:
    assert text.template is not None
    chat = ChatTemplate(text.template, named_tokens=text.named_tokens, special=text.vocabulary.special)
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = published.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    assert encode_chat(text.vocabulary, chat, messages, add_generation_prompt=generate) == theirs
    written = ChatTurns(TurnTexts(chat))
    pieces = []
    for role, content in turns:
        pieces += [Part(written.begin(role), control=True), Part(content), Part(written.end(), control=True)]
    if generate:
        pieces.append(Part(written.begin("assistant"), control=True))
    assert text.vocabulary.encode(pieces, at_start=True) == theirs
