"""Collecting a step's results into one `StepResult`."""

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.layout import Sampled
from anabranch.runtime.messages import Error, RowError, SlotLogprobs, StepResult, TokenLogprobs, ints

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Top = tuple[tuple[int, ...], tuple[float, ...]]


class Results:
    """What one step has found so far. One error per slot: the first."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self._samples: list[tuple[Ints, Ints, Ints, Ints]] = []
        self.logprobs: list[SlotLogprobs] = []
        self.prompt_logprobs: list[SlotLogprobs] = []
        self.score_logprobs: list[bytes] = []
        self.score_is_greedy: list[bytes] = []
        self.errors: dict[int, RowError] = {}

    def fail(self, slot: int, error: Error) -> RowError:
        return self.errors.setdefault(slot, RowError(slot, error))

    def add(self, slots: Ints, counts: Ints, token_ids: Ints, grammar_done: Ints) -> None:
        self._samples.append((slots, counts, token_ids, grammar_done))

    def message(self, forward_us: float) -> StepResult:
        slots, counts, token_ids, grammar_done = (
            (b"".join(map(ints, column)) for column in zip(*self._samples, strict=True))
            if self._samples
            else (b"", b"", b"", b"")
        )
        return StepResult(
            step_id=self.step_id,
            slots=slots,
            counts=counts,
            token_ids=token_ids,
            grammar_done=grammar_done,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            score_logprobs=tuple(self.score_logprobs),
            score_is_greedy=tuple(self.score_is_greedy),
            errors=tuple(self.errors.values()),
            forward_us=forward_us,
        )


def sampled_logprobs(slot: int, token_id: int, row: int, sampled: Sampled) -> SlotLogprobs:
    """Of one sampled token."""
    top = sampled.tops[row]
    return SlotLogprobs(
        slot,
        TokenLogprobs((token_id,), (float(sampled.logprobs[row]),), (as_top(*top) if top is not None else ((), ()),)),
    )


def known_logprobs(slot: int, token_ids: Ints, logprobs: Floats, tops: tuple[Ints, Floats] | None) -> SlotLogprobs:
    """Of a run of known tokens; `tops` are (ids, logprobs), each [tokens, k]."""
    listed = tuple(map(as_top, *tops)) if tops is not None else (((), ()),) * len(token_ids)
    return SlotLogprobs(slot, TokenLogprobs(tuple(token_ids.tolist()), tuple(logprobs.tolist()), listed))


def as_top(ids: Ints, logprobs: Floats) -> Top:
    return tuple(ids.tolist()), tuple(logprobs.tolist())
