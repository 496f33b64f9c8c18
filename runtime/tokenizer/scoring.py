"""Choices in context: their tokens, and the rules by which one is preferred. The methods are SGLang's, by name and number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.runtime.tokenizer.vocabulary import Part, Vocabulary

Logprobs = Sequence[float]
MAX_JOINT_CHARS = 1 << 20  # text before the choices times choices, up to which they are tokenized together


@dataclass(frozen=True, slots=True)
class Choices:
    """`before` is what stands before the choices; the first `shared` of its ids are common to all of them.

    ids[i]      tokens after the shared ones that make choice i
    skipped[i]  how many of these are still the context's own: they are not scored
    """

    before: list[int]
    shared: int
    ids: list[list[int]]
    skipped: list[int]

    def scored(self, i: int) -> list[int]:
        return self.ids[i][self.skipped[i] :]


def tokenize_choices(
    vocabulary: Vocabulary, tail: Sequence[Part], choices: Sequence[str | tuple[int, ...]], *, at_start: bool, previous: int | None
) -> Choices:
    """Tokenize text that is still pending together with each choice, as one text: a word may be completed by a choice.

    Choices that are ids are taken as they are. Without pending text, choices continue what stands before.
    """
    before = vocabulary.encode(tail, at_start=at_start, previous=previous) if tail else []
    num_chars = sum(len(part.text) for part in tail)
    is_joint = bool(tail) and num_chars * len(choices) <= MAX_JOINT_CHARS
    whole: list[list[int]] = []
    for choice in choices:
        if not isinstance(choice, str):
            whole.append([*before, *choice])
        elif is_joint:
            whole.append(vocabulary.encode([*tail, Part(choice)], at_start=at_start, previous=previous))
        else:
            after = before[-1] if before else previous
            own = vocabulary.encode([Part(choice)], at_start=at_start and not before, previous=after)
            whole.append([*before, *own])
    common = [min(_common(before, ids), len(ids) - 1) for ids in whole]
    shared = min(common)
    return Choices(before, shared, [ids[shared:] for ids in whole], [own - shared for own in common])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


# ---------------------------------------------------------------- methods


def mean(values: Logprobs) -> float:
    return sum(values) / len(values)


def rank_greedily(choices: Sequence[Logprobs]) -> list[float]:
    """Compare token by token, keeping the likeliest at each place; a choice that has ended goes on with its mean.

    The score is the number of places a choice survived; the earliest of equals wins.
    """
    longest = max(map(len, choices))
    rows = [[*logprobs, *[mean(logprobs)] * (longest - len(logprobs))] for logprobs in choices]
    survived = [0.0] * len(rows)
    left = list(range(len(rows)))
    for place in range(longest):
        best = max(rows[i][place] for i in left)
        left = [i for i in left if rows[i][place] == best]
        for i in left:
            survived[i] += 1
        if len(left) == 1:
            survived[left[0]] = float(longest)
            break
    return survived


def relative_to_no_context(choices: Sequence[Logprobs], alone: Sequence[Logprobs]) -> list[float]:
    """Mean of the logprobs less those of the same tokens without a context; the first of these counts as 0."""
    return [mean([a - b for a, b in zip(own, (0.0, *without[1:]), strict=True)]) for own, without in zip(choices, alone)]


METHODS: dict[str, Callable[[Sequence[Logprobs]], list[float]]] = {
    "token_length_normalized": lambda choices: [mean(logprobs) for logprobs in choices],
    "sum": lambda choices: [float(sum(logprobs)) for logprobs in choices],
    "greedy_token_selection": rank_greedily,
}


def best_of(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
