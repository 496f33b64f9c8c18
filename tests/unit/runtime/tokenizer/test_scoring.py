"""Choices in context, and the rules that prefer one, against their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.service import vocabulary_of
from support.tokenizers import byte_bpe_tokenizer, sentencepiece_style_tokenizer

from anabranch.runtime.tokenizer.scoring import (
    METHODS,
    best_of,
    rank_greedily,
    relative_to_no_context,
    tokenize_choices,
)
from anabranch.runtime.tokenizer.vocabulary import Part, Vocabulary

TEXTS = st.text(st.sampled_from("the quick brownfx.\n"), min_size=1, max_size=12)
VOCABULARIES = [vocabulary_of(byte_bpe_tokenizer()), vocabulary_of(sentencepiece_style_tokenizer())]
logprobs = st.lists(st.lists(st.integers(-8, 0).map(float), min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["bytes", "sentencepiece"])
@given(context=st.text(st.sampled_from("the quick brownfx.\n"), max_size=12), choices=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_every_choice_is_tokenized_as_one_text_with_what_stands_before(
    vocabulary: Vocabulary, context: str, choices: list[str]
) -> None:
    made = tokenize_choices(vocabulary, [Part(context)] if context else [], choices, at_start=True, previous=None)
    assert made.before == vocabulary.encode_plain(context, at_start=True) if context else made.before == []
    for i, choice in enumerate(choices):
        whole = [*made.before[: made.shared], *made.ids[i]]
        assert whole == vocabulary.encode_plain(context + choice, at_start=True)
        assert len(made.scored(i)) >= 1
        skipped = whole[: made.shared + made.skipped[i]]
        assert skipped == made.before[: len(skipped)], "only the context's own tokens are left out of the score"


def test_token_choices_are_taken_as_they_are() -> None:
    made = tokenize_choices(VOCABULARIES[0], [Part("the fo")], [(5, 6), (7,)], at_start=True, previous=None)
    assert made.shared == len(made.before) and made.ids == [[5, 6], [7]] and made.skipped == [0, 0]


@given(logprobs)
def test_greedy_ranking_keeps_the_likeliest_at_each_place(choices: list[list[float]]) -> None:
    """The definition, with a matrix: short choices go on with their mean; the first of what is left wins."""
    width = max(map(len, choices))
    matrix = np.array([[*c, *[sum(c) / len(c)] * (width - len(c))] for c in choices])
    left = np.arange(len(choices))
    for column in range(width):
        best = matrix[left, column].max()
        left = left[matrix[left, column] == best]
        if len(left) == 1:
            break
    assert best_of(rank_greedily(choices)) == left[0]


@given(logprobs)
def test_means_and_sums(choices: list[list[float]]) -> None:
    assert METHODS["token_length_normalized"](choices) == [pytest.approx(np.mean(c)) for c in choices]
    assert METHODS["sum"](choices) == [pytest.approx(np.sum(c)) for c in choices]


def test_without_a_context_the_first_token_counts_as_zero() -> None:
    assert relative_to_no_context([[-1.0, -2.0]], [[-9.0, -4.0]]) == [pytest.approx((-1.0 + (-2.0 + 4.0)) / 2)]


def test_long_options_do_not_lose_by_their_length() -> None:
    scores = METHODS["token_length_normalized"]([[-1.0], [-0.5] * 9])
    assert best_of(scores) == 1
