"""Incremental text equals the text of the whole, at each prefix and for each tokenizer family."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import byte_bpe_tokenizer, puppet_tokenizer, sentencepiece_style_tokenizer

from anabranch.runtime.tokenizer.detokenizer import Detokenizer
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

VOCABULARIES = {
    "byte-level": Vocabulary(byte_bpe_tokenizer().tokenizer),
    "sentencepiece, legacy": Vocabulary(sentencepiece_style_tokenizer(legacy=True).tokenizer),
    "sentencepiece, metaspace": Vocabulary(sentencepiece_style_tokenizer(legacy=False).tokenizer),
}
families = pytest.mark.parametrize("family", VOCABULARIES)
TEXTS = ["Hello world", " two  spaces", "ünï日本語🙂👩‍👩‍👧", "a\nb\tc", "", "  ", "1 2 3 4"]


def ids_of(v: Vocabulary, data: st.DataObject) -> list[int]:
    """Ids of real text, and of no text at all: bytes that do not fit, special tokens."""
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(TEXTS), st.integers(0, v.num_tokens - 1)), max_size=12))
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else v.encode_plain(piece)
    return ids


@families
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_joined_text_equals_the_whole_decode_at_each_prefix(family: str, data: st.DataObject) -> None:
    v = VOCABULARIES[family]
    ids = ids_of(v, data)
    skip = data.draw(st.booleans())
    for length in range(len(ids) + 1):
        detokenizer = Detokenizer(v, skip_special_tokens=skip)
        text = "".join(detokenizer.push([i]) for i in ids[:length])
        assert text + detokenizer.finish() == v.decode(ids[:length], skip_special_tokens=skip)


@families
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_text_after_a_context_is_the_text_of_all_minus_that_of_the_context(family: str, data: st.DataObject) -> None:
    v = VOCABULARIES[family]
    context, ids = ids_of(v, data), ids_of(v, data)
    before, whole = v.decode(context), v.decode(context + ids)
    detokenizer = Detokenizer(v, context)
    text = detokenizer.push(ids) + detokenizer.finish()
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:  # a character that the context began was completed
        assert before.endswith("\ufffd") and whole == before[:-1] + text


@families
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_are_the_same_however_the_ids_are_grouped(family: str, data: st.DataObject) -> None:
    v = VOCABULARIES[family]
    ids = ids_of(v, data)
    one, many = Detokenizer(v), Detokenizer(v)
    assert one.push(ids) == "".join(many.push([i]) for i in ids)
    assert one.finish() == many.finish()


def test_a_character_split_over_tokens_is_held_until_it_is_whole() -> None:
    pieces: list[str | bytes] = [bytes([b]) for b in "🙂".encode()] + ["日本".encode()[:2], "日本".encode()[2:]]
    files, ids = puppet_tokenizer(pieces)
    detokenizer = Detokenizer(Vocabulary(files.tokenizer))
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🙂", "", "日本"]
    assert detokenizer.finish() == ""


def test_a_character_that_never_becomes_whole_is_replaced_at_the_end_only() -> None:
    files, ids = puppet_tokenizer(["ab", "🙂".encode()[:3]])
    detokenizer = Detokenizer(Vocabulary(files.tokenizer))
    assert [detokenizer.push([i]) for i in ids] == ["ab", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.tokens_for(3) == 2


@pytest.mark.parametrize(
    ("prompt", "generated", "text"),
    [("Hello", " world", " world"), ("Hello ", "world", "world"), ("", "Hello", "Hello"), ("a\n", " b", " b")],
)
@families
def test_the_space_at_the_seam_is_neither_added_nor_lost(family: str, prompt: str, generated: str, text: str) -> None:
    v = VOCABULARIES[family]
    prompt_ids = v.encode_plain(prompt, at_start=True)
    ids = v.encode_plain(generated, at_start=not prompt_ids)
    assert Detokenizer(v, prompt_ids).push(ids) == text


def test_special_tokens_before_the_first_word_do_not_count_as_text() -> None:
    v = VOCABULARIES["sentencepiece, legacy"]
    ids = v.encode_plain(" the", at_start=False)
    assert v.token(ids[0]) == "▁the"
    bos = v.special["<s>"]
    assert Detokenizer(v, [bos]).push(ids) == "the"
    assert Detokenizer(v, [bos], skip_special_tokens=False).push(ids) == " the"
    assert Detokenizer(v, [bos, *ids]).push(ids) == " the"


def test_a_character_that_the_context_began_is_completed() -> None:
    files, (first, second) = puppet_tokenizer(["🙂".encode()[:2], "🙂".encode()[2:]])
    v = Vocabulary(files.tokenizer)
    assert Detokenizer(v, [*v.encode_plain("abc"), first]).push([second]) == "🙂"


@families
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_least_number_of_tokens_for_each_length_of_text(family: str, data: st.DataObject) -> None:
    v = VOCABULARIES[family]
    ids = ids_of(v, data)
    detokenizer = Detokenizer(v)
    settled = [0]
    for i in ids:
        detokenizer.push([i])
        settled.append(detokenizer.chars_before(detokenizer.num_tokens))
    for num_chars in range(settled[-1] + 1):
        needed = detokenizer.tokens_for(num_chars)
        assert needed == next(n for n, chars in enumerate(settled) if chars >= num_chars)


def test_the_cost_of_a_long_context_is_its_end_only() -> None:
    class Counting(Vocabulary):
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            Counting.calls += 1
            return super().token_bytes(token_id)

    v = Counting(byte_bpe_tokenizer().tokenizer)
    Detokenizer(v, v.encode_plain("word " * 5000))
    assert Counting.calls < 20
