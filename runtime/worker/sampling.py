"""Drawing a step's tokens: slots to a `SamplingBatch`, the draw, and back into the slots.

Columns are read by fancy indexing. Only slots with extras (penalties, biases, bans, grammar) cost Python, one by one; what goes wrong with
one of them fails that slot alone.
"""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.interface import Backend, Logits
from anabranch.kernels.layout import Sampled, SamplingBatch
from anabranch.runtime.messages import NOT_FINITE, Error
from anabranch.runtime.worker.grammar import GrammarFailure
from anabranch.runtime.worker.slots import Extras, Slots

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

ALL_BITS = np.uint32(0xFFFFFFFF)
PATIENCE_S = 0.005  # how long a step waits for grammars to be compiled, when others wait for the step ...
LONELY_PATIENCE_S = 0.25  # ... and when nobody does
BROKEN = Error("internal_error", "the model's output is not finite (NaN or infinity)", code=NOT_FINITE)
NOTHING_LEFT = "nothing may be sampled: bans and biases exclude every token"
BROKEN_OR_BANNED = Error("internal_error", f"{BROKEN.message}, or {NOTHING_LEFT}", code=NOT_FINITE)


@dataclass(frozen=True, slots=True)
class Draws:
    """What a step samples: for draw i the slot, the row of logits, and the position of the token in its branch."""

    slots: Ints
    logit_rows: Ints
    positions: Ints

    def __len__(self) -> int:
        return len(self.slots)

    def where(self, chosen: NDArray[np.bool_]) -> "Draws":
        return Draws(self.slots[chosen], self.logit_rows[chosen], self.positions[chosen])


def rounds(draws: Draws) -> list[Draws]:
    """Parts in which each row of logits is drawn from once: siblings may share the logits of their prompt."""
    if len(draws) < 2 or (np.diff(draws.logit_rows) > 0).all():
        return [draws] if len(draws) else []
    order = np.argsort(draws.logit_rows, kind="stable")
    rows = draws.logit_rows[order]
    round_of = np.empty(len(rows), np.int64)
    round_of[order] = np.arange(len(rows)) - np.searchsorted(rows, rows)
    return [draws.where(round_of == i) for i in range(int(round_of.max()) + 1)]


@dataclass(slots=True)
class Drawn:
    """What came of them. `counts[i]` tokens of slots[i]; `logit_rows[i]` is -1 where nothing was drawn from the model.

    `failures` are by slot; such a slot is not among `slots`.
    """

    slots: Ints
    counts: Ints
    token_ids: Ints
    logit_rows: Ints
    sampled: Sampled | None = None
    failures: dict[int, Error] = field(default_factory=dict)


def draw_tokens(
    slots: Slots, backend: Backend, logits: Logits, draws: Draws, *, num_rows: int, vocab_size: int, vocab_limit: int
) -> Drawn:
    """Draw a token for each of `draws`, from `num_rows` rows of logits of which others may be nobody's.

    A slot whose grammar dictates its next tokens gets them without a draw; one that knows its token there already gets none. A slot
    whose grammar is still being compiled is left out of the result.
    """
    has_extras = slots.has_extras[draws.slots]
    if not has_extras.any():
        plain = backend.sample(logits, _batch(slots, draws, Edits(num_rows, vocab_size), num_rows, vocab_limit))
        return _keep_plain(slots, draws, plain)
    special = np.flatnonzero(has_extras)
    failures: dict[int, Error] = {}
    dictated = _dictated(slots, draws, special, failures)
    edits = Edits(num_rows, vocab_size)
    for i in special.tolist():
        slot = int(draws.slots[i])
        if i not in dictated and slot not in failures and not _edit(slots, draws, i, edits, failures):
            dictated[i] = None
    is_drawn = ~np.isin(draws.slots, list(failures))
    is_drawn[list(dictated)] = False
    drawn = draws.where(is_drawn)
    sampled = backend.sample(logits, _batch(slots, drawn, edits, num_rows, vocab_limit)) if len(drawn) else None
    return _keep(slots, draws, is_drawn, dictated, sampled, failures)


# ---------------------------------------------------------------- before the draw


def _dictated(
    slots: Slots, draws: Draws, special: NDArray[np.intp], failures: dict[int, Error]
) -> dict[int, list[int] | None]:
    """Tokens that need no draw, by index of the draw; None where the grammar is still being compiled."""
    dictated: dict[int, list[int] | None] = {}
    deadline = time.monotonic() + (PATIENCE_S if len(special) < len(draws) else LONELY_PATIENCE_S)
    for i in special.tolist():
        slot = int(draws.slots[i])
        grammar = _extras(slots, slot).grammar
        if grammar is None:
            continue
        try:
            if not grammar.wait(max(0.0, deadline - time.monotonic())):
                dictated[i] = None
            elif int(draws.positions[i]) - int(slots.prompt_lens[slot]) < len(grammar.generated):
                dictated[i] = []  # known already
            elif tokens := grammar.take_forced():
                dictated[i] = tokens
        except GrammarFailure as fault:
            failures[slot] = fault.to_wire()
    return dictated


def _edit(slots: Slots, draws: Draws, i: int, edits: "Edits", failures: dict[int, Error]) -> bool:
    """Whether the draw can be made now."""
    slot = int(draws.slots[i])
    num_generated = int(draws.positions[i]) - int(slots.prompt_lens[slot])
    try:
        return edits.add(int(draws.logit_rows[i]), _extras(slots, slot), num_generated)
    except GrammarFailure as fault:
        failures[slot] = fault.to_wire()
        return True


class Edits:
    """Sparse edits of the logits, gathered row by row."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.shape = num_rows, -(-vocab_size // 32)
        self.mask: NDArray[np.uint32] | None = None
        self.bias: list[tuple[int, Ints, Floats]] = []
        self.penalties: list[tuple[int, Ints, Ints]] = []
        self.strengths: Floats | None = None  # [3, rows]: repetition, presence, frequency

    def add(self, row: int, extras: Extras, num_generated: int) -> bool:
        """False, and nothing is added, if the grammar is being compiled anew. Raises GrammarFailure."""
        banned = extras.banned_ids if num_generated < extras.params.min_tokens else extras.banned_ids[:0]
        if extras.grammar is not None:
            allowed = np.zeros(self.shape[1], np.uint32)
            is_ready, lifts_bans = extras.grammar.write_mask(allowed, banned)
            if not is_ready:
                return False
            if self.mask is None:
                self.mask = np.full(self.shape, ALL_BITS)
            self.mask[row] = allowed
            banned = banned[:0] if lifts_bans else banned
        if len(extras.bias_ids):
            self.bias.append((row, extras.bias_ids, extras.bias_values))
        if len(banned):
            self.bias.append((row, banned, np.full(len(banned), -np.inf, np.float32)))
        if extras.penalties is not None:
            self._penalise(row, extras)
        return True

    def _penalise(self, row: int, extras: Extras) -> None:
        if self.strengths is None:
            self.strengths = np.repeat(np.array([[1], [0], [0]], np.float32), self.shape[0], axis=1)
        params, penalties = extras.params, extras.penalties
        assert penalties is not None
        self.strengths[:, row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.penalties.append((row, penalties.ids[: penalties.num_ids], penalties.counts[: penalties.num_ids]))

    def columns(self) -> dict[str, object]:
        columns: dict[str, object] = {"mask": self.mask}
        if self.bias:
            rows, ids, values = zip(*sorted(self.bias, key=_row_of), strict=True)
            columns |= {
                "bias_rows": _repeated(rows, ids), "bias_ids": np.concatenate(ids), "bias_values": np.concatenate(values),
            }  # fmt: skip
        if self.strengths is not None:
            rows, ids, counts = zip(*sorted(self.penalties, key=_row_of), strict=True)
            columns |= {
                "penalty_rows": _repeated(rows, ids), "penalty_ids": np.concatenate(ids),
                "penalty_counts": np.concatenate(counts), "repetition_penalty": self.strengths[0],
                "presence_penalty": self.strengths[1], "frequency_penalty": self.strengths[2],
            }  # fmt: skip
        return columns


def _batch(slots: Slots, draws: Draws, edits: Edits, num_rows: int, vocab_limit: int) -> SamplingBatch:
    """Rows that nobody draws from are greedy, and not looked at."""
    drawn: dict[str, NDArray[np.generic]] = {
        "temperature": slots.temperature[draws.slots],
        "top_k": slots.top_k[draws.slots],
        "top_p": slots.top_p[draws.slots],
        "min_p": slots.min_p[draws.slots],
        "seeds": slots.seeds[draws.slots],
        "paths": slots.paths[draws.slots],
        "num_top_logprobs": slots.num_top_logprobs[draws.slots],
        "positions": draws.positions.astype(np.uint64),
    }
    if num_rows != len(draws) or (np.diff(draws.logit_rows) < 0).any():
        drawn = {name: _scattered(name, column, draws.logit_rows, num_rows) for name, column in drawn.items()}
    return SamplingBatch(**drawn, vocab_limit=vocab_limit, **edits.columns())  # type: ignore[arg-type]


# ---------------------------------------------------------------- after the draw


def _keep_plain(slots: Slots, draws: Draws, sampled: Sampled) -> Drawn:
    token_ids = sampled.token_ids[draws.logit_rows]
    failures: dict[int, Error] = {}
    if (token_ids < 0).any():
        failures = dict.fromkeys(draws.slots[token_ids < 0].tolist(), BROKEN)
        draws, token_ids = draws.where(token_ids >= 0), token_ids[token_ids >= 0]
    slots.last_tokens[draws.slots] = token_ids
    return Drawn(draws.slots, np.ones(len(draws), np.int32), token_ids, draws.logit_rows, sampled, failures)


def _keep(
    slots: Slots, draws: Draws, is_drawn: NDArray[np.bool_], dictated: dict[int, list[int] | None], sampled: Sampled | None,
    failures: dict[int, Error],
) -> Drawn:  # fmt: skip
    tokens: list[list[int]] = []
    kept: list[int] = []
    for i, slot in enumerate(draws.slots.tolist()):
        if slot in failures:
            continue
        if is_drawn[i]:
            assert sampled is not None
            emitted: list[int] | None = _follow(slots, slot, int(sampled.token_ids[draws.logit_rows[i]]), failures)
        else:
            emitted = dictated[i]
        if slot in failures or emitted is None:
            continue
        _count(slots, slot, emitted)
        kept.append(i)
        tokens.append(emitted)
    counts = np.array([len(emitted) for emitted in tokens], np.int32)
    token_ids = np.array([token_id for emitted in tokens for token_id in emitted], np.int32)
    logit_rows = np.where(is_drawn, draws.logit_rows, -1)[kept].astype(np.int32)
    return Drawn(draws.slots[kept], counts, token_ids, logit_rows, sampled, failures)


def _follow(slots: Slots, slot: int, token_id: int, failures: dict[int, Error]) -> list[int]:
    """The drawn token, and those that the slot's grammar dictates after it."""
    extras = slots.extras[slot]
    if token_id < 0:
        constrained = extras is not None and (extras.grammar is not None or len(extras.bias_ids) > 0)
        failures[slot] = BROKEN_OR_BANNED if constrained else BROKEN
        return []
    if extras is None or extras.grammar is None:
        return [token_id]
    try:
        extras.grammar.advance(token_id)
        return [token_id] if token_id in extras.stop_ids else [token_id, *extras.grammar.take_forced()]
    except GrammarFailure as fault:
        failures[slot] = fault.to_wire()
        return []


def _count(slots: Slots, slot: int, token_ids: list[int]) -> None:
    if not token_ids:
        return
    slots.last_tokens[slot] = token_ids[-1]
    extras = slots.extras[slot]
    if extras is not None and extras.penalties is not None:
        for token_id in token_ids:
            extras.penalties.add(token_id)


def _extras(slots: Slots, slot: int) -> Extras:
    extras = slots.extras[slot]
    assert extras is not None, f"slot {slot} is said to have extras"
    return extras


def _row_of(edit: tuple[int, Ints, NDArray[np.generic]]) -> int:
    return edit[0]


def _scattered(name: str, column: NDArray[np.generic], rows: Ints, num_rows: int) -> NDArray[np.generic]:
    wide = np.full(num_rows, {"top_p": 1, "num_top_logprobs": -1}.get(name, 0), column.dtype)
    wide[rows] = column
    return wide


def _repeated(rows: tuple[int, ...], ids: tuple[Ints, ...]) -> Ints:
    return np.repeat(np.array(rows, np.int32), [len(part) for part in ids])
