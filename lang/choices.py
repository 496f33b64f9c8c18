"""How `select` decides between choices: SGLang's three rules, plus plain likelihood, and rules of your own.

The rules are computed by the runtime, in one forward over the trie of choices. The objects here name them; each can
also be called on logprobs, which is how a rule of your own decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.lang.backend import Method


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod:
    """A rule. Subclass it and define `__call__` for one of your own: it gets the logprobs that `select` measured.

    `input_token_logprobs[i]` holds one (logprob, token id, text or None) triple per token of choice i.
    """

    backend_method: Method | None = None  # set: the runtime applies the rule itself

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return False

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[Any]],
        output_token_logprobs: Sequence[Sequence[Any]] = (),
        unconditional_token_logprobs: Sequence[Sequence[Any]] | None = None,
    ) -> ChoicesDecision:
        raise NotImplementedError


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The choice whose tokens have the highest mean logprob. Favours no length as such."""

    backend_method = "token_length_normalized"

    def __call__(
        self, *, choices: Sequence[str], normalized_prompt_logprobs: Sequence[float], **_: Any
    ) -> ChoicesDecision:
        return ChoicesDecision(choices[first_best(normalized_prompt_logprobs)])


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token, keep the choices whose next token is the most likely; a finished choice goes on with its mean."""

    backend_method = "greedy_token_selection"

    def __call__(
        self, *, choices: Sequence[str], input_token_logprobs: Sequence[Sequence[Any]], **_: Any
    ) -> ChoicesDecision:
        rows = [[entry[0] for entry in entries] for entries in input_token_logprobs]
        matrix = greedy_matrix(rows)
        return ChoicesDecision(choices[greedy_best(matrix)], {"greedy_logprob_matrix": matrix})


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The choice that the context made more likely, by mean: logprob in context minus logprob without it."""

    backend_method = "unconditional_likelihood_normalized"

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def __call__(
        self,
        *,
        choices: Sequence[str],
        input_token_logprobs: Sequence[Sequence[Any]],
        unconditional_token_logprobs: Sequence[Sequence[Any]] | None = None,
        **_: Any,
    ) -> ChoicesDecision:
        if unconditional_token_logprobs is None:
            raise ValueError("unconditional_likelihood_normalized needs unconditional_token_logprobs")
        scores = [
            mean([got[0] - (alone[0] or 0.0) for got, alone in zip(entries, bare, strict=True)])
            for entries, bare in zip(input_token_logprobs, unconditional_token_logprobs, strict=True)
        ]
        key = "normalized_unconditional_prompt_logprobs"
        return ChoicesDecision(choices[first_best(scores)], {key: scores})


class Likelihood(ChoicesSamplingMethod):
    """The choice with the highest probability as a whole: the sum of its logprobs. Favours short choices."""

    backend_method = "sum"

    def __call__(
        self, *, choices: Sequence[str], input_token_logprobs: Sequence[Sequence[Any]], **_: Any
    ) -> ChoicesDecision:
        return ChoicesDecision(choices[first_best([sum(e[0] for e in entries) for entries in input_token_logprobs])])


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
likelihood = Likelihood()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -math.inf


def first_best(values: Sequence[float]) -> int:
    """Index of the largest value; the first of equals."""
    return max(range(len(values)), key=values.__getitem__)


def greedy_matrix(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Every row as long as the longest, filled up with the row's own mean."""
    width = max(len(row) for row in rows)
    return [list(row) + [mean(row)] * (width - len(row)) for row in rows]


def greedy_best(matrix: Sequence[Sequence[float]]) -> int:
    remaining = list(range(len(matrix)))
    for column in range(len(matrix[0])):
        top = max(matrix[i][column] for i in remaining)
        remaining = [i for i in remaining if matrix[i][column] == top]
        if len(remaining) == 1:
            break
    return remaining[0]


def apply_rule(
    method: Method, rows: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]
) -> tuple[int, list[float]]:
    """The best choice by a rule, and every choice's score. `rows` are token logprobs in context, `alone` without it."""
    match method:
        case "greedy_token_selection":
            return greedy_best(greedy_matrix(rows)), [mean(row) for row in rows]
        case "unconditional_likelihood_normalized":
            scores = [mean([a - b for a, b in zip(*pair, strict=True)]) for pair in zip(rows, alone, strict=True)]
        case "sum":
            scores = [float(sum(row)) for row in rows]
        case _:
            scores = [mean(row) for row in rows]
    return first_best(scores), scores
