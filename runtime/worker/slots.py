"""What the worker remembers of each running request, as columns: row i of every array is slot i.

Columns are read by fancy indexing, so a step's cost per row without penalties or grammar is that of numpy, not of Python.
State that few requests have (penalties, biases, grammar) hangs in `extras`, reached only where `has_extras` says so.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.runtime.messages import RowError, SamplingParams, SlotStart, as_ints
from anabranch.runtime.worker.grammar import GrammarState

Ints = NDArray[np.int32]

GREEDY_BELOW = 1e-5  # a smaller temperature means greedy


class PenaltyCounts:
    """Distinct ids of a context, and how often each was generated (0: only in the prompt). Appending is O(1) amortised."""

    def __init__(self, context: Ints, generated: Ints) -> None:
        prompt_ids = np.unique(context)
        self.ids = prompt_ids.astype(np.int32)
        self.counts = np.zeros(len(self.ids), np.int32)
        self.num_ids = len(self.ids)
        self._place = {int(token_id): i for i, token_id in enumerate(prompt_ids)}
        for token_id in generated.tolist():
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self.num_ids
            if place == len(self.ids):
                room = max(16, len(self.ids))
                self.ids = np.concatenate([self.ids, np.zeros(room, np.int32)])
                self.counts = np.concatenate([self.counts, np.zeros(room, np.int32)])
            self.ids[place] = token_id
            self.num_ids += 1
        self.counts[place] += 1


@dataclass(slots=True)
class Extras:
    """The rare parts of a slot's state."""

    params: SamplingParams
    penalties: PenaltyCounts | None
    bias_ids: Ints
    bias_values: NDArray[np.float32]
    banned_ids: Ints  # not before min_tokens
    stop_ids: frozenset[int]
    grammar: GrammarState | None


class Slots:
    """`max_slots` slots. A slot's page table is pages[slot, :page_counts[slot]]."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.prompt_lens = np.zeros(max_slots, np.int32)
        self.last_tokens = np.zeros(max_slots, np.int32)
        self.temperature = np.zeros(max_slots, np.float32)
        self.top_k = np.zeros(max_slots, np.int32)
        self.top_p = np.ones(max_slots, np.float32)
        self.min_p = np.zeros(max_slots, np.float32)
        self.seeds = np.zeros(max_slots, np.uint64)
        self.paths = np.zeros(max_slots, np.uint64)
        self.num_top_logprobs = np.full(max_slots, -1, np.int32)
        self.has_extras = np.zeros(max_slots, np.bool_)
        self.extras: list[Extras | None] = [None] * max_slots
        self.failures: dict[int, RowError] = {}
        self.pages = np.zeros((max_slots, 64), np.int32)
        self.page_counts = np.zeros(max_slots, np.int32)

    def start(self, message: SlotStart, grammar: GrammarState | None) -> None:
        """A request takes a slot; whatever the slot held is gone."""
        slot, params = message.slot, message.params
        self.end(slot)
        generated = as_ints(message.generated)
        self.prompt_lens[slot] = message.prompt_len
        self.last_tokens[slot] = generated[-1] if len(generated) else 0
        self.temperature[slot] = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.paths[slot] = message.path & 0xFFFF_FFFF_FFFF_FFFF
        self.num_top_logprobs[slot] = -1 if params.num_top_logprobs is None else params.num_top_logprobs
        self.extras[slot] = extras = extras_of(message, generated, grammar)
        self.has_extras[slot] = extras is not None

    def end(self, slot: int) -> None:
        self.page_counts[slot] = 0
        self.last_tokens[slot] = 0
        self.extras[slot] = None
        self.has_extras[slot] = False
        self.failures.pop(slot, None)

    def known_tokens(self, slots: Ints, positions: Ints) -> Ints:
        """The token at each position, which this worker sampled or its grammar dictated; 0 for a slot that has failed."""
        tokens = self.last_tokens[slots]
        for i in np.flatnonzero(self.has_extras[slots]).tolist():
            extras = self.extras[slots[i]]
            if extras is not None and extras.grammar is not None and slots[i] not in self.failures:
                index = int(positions[i] - self.prompt_lens[slots[i]])
                assert 0 <= index < len(extras.grammar.generated), f"slot {slots[i]} has no token at {positions[i]} yet"
                tokens[i] = extras.grammar.generated[index]
        return tokens

    def grammar_done(self, slots: Ints) -> Ints:
        """1 where only end-of-sequence may follow, else 0."""
        done = np.zeros(len(slots), np.int32)
        for i in np.flatnonzero(self.has_extras[slots]).tolist():
            extras = self.extras[slots[i]]
            done[i] = extras is not None and extras.grammar is not None and extras.grammar.is_done
        return done

    def extend_pages(self, slots: Ints, keep: Ints, counts: Ints, page_ids: Ints) -> None:
        """Truncate each slot's table to `keep` pages and append its share of `page_ids`. Slots are distinct."""
        if len(page_ids):
            self._widen(int((keep + counts).max()))
            starts = slots.astype(np.int64) * self.pages.shape[1] + keep
            self.pages.reshape(-1)[ragged_indices(starts, counts)] = page_ids
        self.page_counts[slots] = keep + counts

    def page_tables(self, slots: Ints, num_pages: Ints) -> Ints:
        """The first num_pages[i] pages of slots[i], concatenated."""
        assert (num_pages <= self.page_counts[slots]).all(), "a row needs more pages than its slot was given"
        return self.pages.reshape(-1)[ragged_indices(slots.astype(np.int64) * self.pages.shape[1], num_pages)]

    def _widen(self, num_pages: int) -> None:
        if num_pages > self.pages.shape[1]:
            wider = np.zeros((self.max_slots, max(num_pages, 2 * self.pages.shape[1])), np.int32)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider


def extras_of(message: SlotStart, generated: Ints, grammar: GrammarState | None) -> Extras | None:
    params = message.params
    penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    banned = params.banned_until_min if params.min_tokens > 0 else ()
    if not (penalised or params.logit_bias or banned or grammar is not None):
        return None
    return Extras(
        params,
        PenaltyCounts(as_ints(message.context), generated) if penalised else None,
        np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias)),
        np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
        np.array(banned, np.int32),
        frozenset(params.stop_token_ids),
        grammar,
    )


def ragged_indices(starts: NDArray[np.int64], counts: Ints) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... counts[0] of them, then the same for starts[1], and so on."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
