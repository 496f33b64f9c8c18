"""Text to ids and ids to bytes, in each tokenizer family."""

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import (
    TokenizerFiles,
    byte_bpe_tokenizer,
    puppet_tokenizer,
    sentencepiece_style_tokenizer,
)
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.token_bytes import UnsupportedTokenizer
from anabranch.runtime.tokenizer.vocabulary import Part, Vocabulary

FAMILIES = {
    "byte-level": byte_bpe_tokenizer(),
    "byte-level with BOS": byte_bpe_tokenizer(add_bos=True),
    "sentencepiece, legacy": sentencepiece_style_tokenizer(legacy=True),
    "sentencepiece, metaspace": sentencepiece_style_tokenizer(legacy=False),
}
VOCABULARIES: dict[str, Vocabulary] = {}


def copy_of(files: TokenizerFiles) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(files.tokenizer.to_str())


for _name, _files in FAMILIES.items():
    VOCABULARIES[_name] = Vocabulary(copy_of(_files))

families = pytest.mark.parametrize("family", FAMILIES)
texts = st.text(st.sampled_from("aehto .,'\n\t12é日🙂▁<|>s/_im"), max_size=40)


@families
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_control_text_is_tokenized_as_the_tokenizer_library_does(family: str, text: str) -> None:
    text = text.replace("▁", "")
    theirs = FAMILIES[family].tokenizer.encode(text, add_special_tokens=False).ids
    assert VOCABULARIES[family].encode_control(text, at_start=True) == theirs


@families
@given(
    pieces=st.lists(
        st.sampled_from(["hi", " there", "<|im_start|>", "<|im_end|>", "</s>", "<s>", "\n", " "]), max_size=9
    )
)
@settings(max_examples=100, deadline=None)
def test_control_text_with_special_tokens_is_tokenized_as_the_library_does(family: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    theirs = FAMILIES[family].tokenizer.encode(text, add_special_tokens=False).ids
    assert VOCABULARIES[family].encode_control(text, at_start=True) == theirs


@families
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_plain_text_comes_back_byte_for_byte_wherever_it_stands(family: str, text: str) -> None:
    v = VOCABULARIES[family]
    text = text.replace("▁", " ")
    inside, first = (b"".join(map(v.token_bytes, v.encode_plain(text, at_start=at))).decode() for at in (False, True))
    assert inside == text, "no space is added or lost in the middle of a sequence"
    assert first in (text, " " + text)


@families
@given(
    pieces=st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>", "<unk>", "a", "<", " "])
    )
)
@settings(max_examples=150, deadline=None)
def test_plain_text_never_becomes_a_special_token(family: str, pieces: list[str]) -> None:
    v = VOCABULARIES[family]
    for at_start in (False, True):
        assert not any(v.is_special(i) for i in v.encode_plain("".join(pieces), at_start=at_start))


def test_the_special_tokens_in_control_parts_only_are_control_tokens() -> None:
    v = VOCABULARIES["byte-level"]
    ids = v.encode((Part("<|im_start|>user\n", control=True), Part("<|im_end|>"), Part("<|im_end|>", control=True)))
    special = [v.token(i) for i in ids if v.is_special(i)]
    assert special == ["<|im_start|>", "<|im_end|>"]
    assert v.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n<|im_end|><|im_end|>"


def test_a_control_token_cannot_be_put_together_from_two_parts() -> None:
    v = VOCABULARIES["byte-level"]
    ids = v.encode((Part("<|im_", control=True), Part("start|>"), Part("<|im_"), Part("end|>", control=True)))
    assert not any(map(v.is_special, ids))


@given(cuts=st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=100, deadline=None)
def test_adjacent_parts_are_tokenized_as_one_text(cuts: list[int]) -> None:
    v = VOCABULARIES["byte-level"]
    text = "The answer is 42. Let us count"
    bounds = [0, *sorted(cuts), len(text)]
    parts = [Part(text[a:b], control=i % 2 == 0) for i, (a, b) in enumerate(pairwise(bounds))]
    assert v.encode(parts) == v.encode_plain(text)


def test_the_dummy_space_of_sentencepiece_comes_at_the_start_only() -> None:
    for family, after_special in (("sentencepiece, legacy", "▁"), ("sentencepiece, metaspace", "")):
        v = VOCABULARIES[family]
        tokens = [v.token(i) for i in v.encode_plain("the", at_start=True)]
        assert tokens[0] is not None and tokens[0].startswith("▁")
        assert "".join(map(str, map(v.token, v.encode_plain("the")))) == "the"
        ids = v.encode((Part("</s>", control=True), Part("x")))
        assert "".join(map(str, map(v.token, ids[1:]))) == after_special + "x"
        continued = v.encode((Part("x"),), previous=v.special["</s>"])
        assert continued == ids[1:], "what follows a special token does not depend on who wrote it when"


@pytest.mark.parametrize(("lstrip", "rstrip"), [(True, False), (False, True), (True, True)])
def test_special_tokens_that_swallow_white_space_do_so_as_in_the_library(lstrip: bool, rstrip: bool) -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.add_special_tokens([AddedToken("<sep>", lstrip=lstrip, rstrip=rstrip, special=True, normalized=False)])
    theirs = tokenizer.encode("a  <sep>  b <sep>", add_special_tokens=False).ids
    v = Vocabulary(tokenizer)
    assert v.encode_control("a  <sep>  b <sep>", at_start=True) == theirs
    assert v.encode((Part("a  "), Part("<sep>", control=True), Part("  b "), Part("<sep>", control=True))) == theirs


def test_the_longest_special_token_wins() -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.add_special_tokens(["<a>", "<a><b>"])
    v = Vocabulary(tokenizer)
    assert [v.token(i) for i in v.encode_control("<a><b><a>")] == ["<a><b>", "<a>"]


def test_added_tokens_that_are_not_special_are_ordinary_text() -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    v = Vocabulary(tokenizer)
    (think,) = v.encode_plain("<think>")
    assert v.token(think) == "<think>" and not v.is_special(think)
    assert v.decode([think]) == "<think>"


def test_named_tokens_of_the_config_are_special_even_where_the_tokenizer_says_otherwise() -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    v = Vocabulary(tokenizer, special_names=["<end>", "<no such token>"])
    assert not any(map(v.is_special, v.encode_plain("<end>")))
    assert [v.token(i) for i in v.encode_control("<end>")] == ["<end>"]


def test_a_unigram_model_that_would_spell_a_special_token_is_kept_from_it() -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<", -5.0), ("/", -5.0), ("s", -5.0), (">", -5.0), ("a", -5.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens(["</s>"])
    v = Vocabulary(tokenizer)
    assert [v.token(i) for i in v.encode_plain("a</s>a</s>")] == ["a", *"</s>", "a", *"</s>"]
    assert [v.token(i) for i in v.encode_control("a</s>")] == ["a", "</s>"]
    assert len(v.encode_plain("</s>" * 5000)) == 20_000


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    v = Vocabulary(tokenizer)
    assert v.decode(v.encode_plain("The quick brown fox")) == "The quick brown fox"
    assert len(v.encode_plain("x")) == 1


@families
def test_bytes_of_all_tokens_join_to_what_the_library_decodes(family: str) -> None:
    v, tokenizer = VOCABULARIES[family], FAMILIES[family].tokenizer
    for token_id in range(v.num_tokens):
        theirs = tokenizer.decode([token_id], skip_special_tokens=False)
        ours = v.token_bytes(token_id)
        try:
            text = ours.decode()
        except UnicodeDecodeError:
            assert "\ufffd" in theirs
            continue
        assert text.removeprefix(" ") == theirs.removeprefix(" ")


@families
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_whole_decode_equals_the_library_where_the_bytes_are_text(family: str, data: st.DataObject) -> None:
    v, tokenizer = VOCABULARIES[family], FAMILIES[family].tokenizer
    ids = data.draw(st.lists(st.integers(0, v.num_tokens - 1), max_size=20))
    for skip in (True, False):
        ours = v.decode(ids, skip_special_tokens=skip)
        if "\ufffd" not in ours:
            assert ours == tokenizer.decode(ids, skip_special_tokens=skip)


def test_several_ids_may_have_one_text() -> None:
    files, ids = puppet_tokenizer(["go", "go", b"\xf0\x9f", b"\x99\x82", "<|im_end|>"])
    v = Vocabulary(copy_of(files))
    assert len(set(ids)) == 5
    assert [v.token_bytes(i) for i in ids[:4]] == [b"go", b"go", b"\xf0\x9f", b"\x99\x82"]
    assert v.decode(ids) == "gogo🙂" == files.tokenizer.decode(ids)


class TestDisagreement:
    """The tokenizer and the model are of different sizes."""

    def test_ids_beyond_the_embedding_are_refused_by_name(self) -> None:
        tokenizer = copy_of(FAMILIES["byte-level"])
        tokenizer.add_special_tokens(["<pad>"])
        v = Vocabulary(tokenizer, vocab_size=512)
        assert v.unusable == {"<pad>": 512}
        with pytest.raises(InvalidRequest, match=r"'<pad>' with id 512.*512 embeddings"):
            v.encode_control("a<pad>")
        assert v.decode(v.encode_plain("a<pad>")) == "a<pad>"
        with pytest.raises(InvalidRequest, match="512"):
            v.check_ids([1, 512])

    def test_padding_of_the_embedding_has_no_tokens(self) -> None:
        v = Vocabulary(byte_bpe_tokenizer(500).tokenizer, vocab_size=512)
        assert (v.vocab_size, v.num_tokens) == (512, 500)
        assert v.token_bytes(501) == b"" and v.token(501) is None
        v.check_ids(range(500))
        for bad in (500, 511, 512, 200_000, -1):
            with pytest.raises(InvalidRequest, match=str(bad)):
                v.check_ids([3, bad])


def test_text_that_is_no_unicode_is_refused() -> None:
    for v in VOCABULARIES.values():
        with pytest.raises(InvalidRequest, match="surrogate"):
            v.encode_plain("a\ud800b")


@families
@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_the_cheap_bound_never_exceeds_the_real_number_of_tokens(family: str, text: str) -> None:
    v = VOCABULARIES[family]
    assert v.least_tokens(text) <= len(v.encode_plain(text)) + (not text)


def test_the_cheap_bound_shows_that_huge_texts_are_huge() -> None:
    v = VOCABULARIES["byte-level"]
    assert v.least_tokens("a" * 5_000_000) > 100_000
    assert v.least_tokens("🙂" * 1_000_000) > 100_000


def test_nothing_is_promised_where_text_may_vanish() -> None:
    for normalizer, splitter in (
        (normalizers.Lowercase(), None),
        (None, pre_tokenizers.Split(" ", "removed")),
        (normalizers.Replace("aa", "a"), None),
    ):
        tokenizer = copy_of(FAMILIES["byte-level"])
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        if splitter is not None:
            tokenizer.pre_tokenizer = splitter
        assert Vocabulary(tokenizer).least_tokens("a" * 1_000_000) == 0


def test_beginning_of_sequence_is_read_off_the_post_processor() -> None:
    assert not VOCABULARIES["byte-level"].adds_bos
    v = VOCABULARIES["byte-level with BOS"]
    assert v.adds_bos and v.bos_token_id == v.special["<|endoftext|>"]
    assert VOCABULARIES["sentencepiece, legacy"].bos_token_id == 1


def test_a_decoder_without_bytes_per_token_is_refused() -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        Vocabulary(tokenizer)


def test_byte_level_with_a_prefix_space_adds_it_as_the_library_does() -> None:
    tokenizer = copy_of(FAMILIES["byte-level"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    for text in ("the", " the", "a<|im_end|>b", "<|im_end|>"):
        theirs = tokenizer.encode(text, add_special_tokens=False).ids
        assert (
            Vocabulary(tokenizers.Tokenizer.from_str(tokenizer.to_str())).encode_control(text, at_start=True) == theirs
        )
