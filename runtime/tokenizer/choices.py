"""Which of several scored choices is best. Rules as SGLang's front end defines them (`docs/language.md`, select).

Input: per choice, one logprob per token in context. Output: per choice, one score, higher is better.
"""

from collections.abc import Sequence

Logprobs = Sequence[Sequence[float]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def token_length_normalized(rows: Logprobs) -> list[float]:
    return [mean(row) for row in rows]


def summed(rows: Logprobs) -> list[float]:
    return [sum(row) for row in rows]


def unconditional_likelihood_normalized(rows: Logprobs, alone: Logprobs) -> list[float]:
    """Mean of (logprob in context - logprob without it); the first token alone has none, and counts as 0."""
    return [mean([a - b for a, b in zip(row, bare, strict=True)]) for row, bare in zip(rows, alone, strict=True)]


def greedy_token_selection(rows: Logprobs) -> list[float]:
    """How many tokens long each choice stayed among the best: token by token, those with the most likely next token remain.

    A choice that is over goes on with its mean. Ties that last to the end go to the first choice.
    """
    width = max(map(len, rows))
    filled = [[*row, *[mean(row)] * (width - len(row))] for row in rows]
    remaining, scores = list(range(len(rows))), [0.0] * len(rows)
    for column in range(width):
        best = max(filled[i][column] for i in remaining)
        remaining = [i for i in remaining if filled[i][column] == best]
        for i in remaining:
            scores[i] = column + 1.0
    return scores


def first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
