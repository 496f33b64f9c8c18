"""What one step computes, as host arrays: the contract between the worker and every backend."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class LayoutError(ValueError):
    """Arrays, shapes or sizes that do not fit together. Names the value and the limit."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The last `len(parents)` new tokens of row `row` form a tree instead of a line.

    Tree token i sees the row's KV before the tree, its ancestors and itself. It occupies KV slot (row's kv_len - len(parents) + i),
    while `StepBatch.positions` holds its depth-based position. parents[i] < i, or -1 for the KV before the tree.
    """

    row: int
    parents: Ints


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Rows [first_row, last_row) hold identical page ids for their first `num_tokens` KV slots (a whole number of pages)."""

    first_row: int
    last_row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Ragged rows of new tokens over paged KV. A row is one sequence's contiguous new tokens in this step.

    token_ids    [num_tokens]      new tokens of all rows, concatenated
    positions    [num_tokens]      rotary position of each
    q_indptr     [num_rows + 1]    row r owns tokens q_indptr[r]:q_indptr[r + 1]
    kv_lens      [num_rows]        KV slots visible to the row's last token, this step's tokens included
    page_indptr  [num_rows + 1]    row r's page table is page_ids[page_indptr[r]:page_indptr[r + 1]]
    page_ids     [num_pages_used]  in order; enough pages for kv_lens
    logit_rows   [num_logits]      indices into the new tokens whose logits are wanted, ascending
    trees, groups                  see their types; each row has at most one tree

    New token i of row r writes KV slot kv_lens[r] - n_r + i, where n_r is the row's number of new tokens: page
    page_ids[page_indptr[r] + slot // page_size], offset slot % page_size; and sees slots [0, slot] unless a tree says otherwise.
    """

    token_ids: Ints
    positions: Ints
    q_indptr: Ints
    kv_lens: Ints
    page_indptr: Ints
    page_ids: Ints
    logit_rows: Ints
    trees: tuple[TreeMask, ...] = ()
    groups: tuple[SharedPrefix, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a KV pool. Bytes per token: 2 * num_layers * num_kv_heads * head_dim * itemsize."""

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "f16"  # f32 | f16 | bf16 | int16 | int8 (integers with scales per token and head)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose one token for each row of logits; columns have one entry per row of logits.

    Order of precedence: raw logits -> repetition, presence, frequency penalties -> logit bias -> bans -> grammar mask ->
    (greedy: argmax, ties to the lowest id) or temperature -> top-k -> top-p -> min-p -> draw. A token that a mask or ban forbids stays
    forbidden whatever its bias. `temperature` 0 is greedy. The draw inverts the CDF over ids in ascending order with the
    uniform number of (seed, path, position), see `kernels/random.py`.
    """

    temperature: NDArray[np.float32]
    top_k: Ints  # 0: off
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    paths: NDArray[np.uint64]
    positions: NDArray[np.uint64]  # of the sampled token in its branch
    num_top_logprobs: Ints  # -1: no logprobs; 0: the sampled token's; k: and the k most likely
    vocab_limit: int = 0  # ids at or above it have no token and are never sampled; 0: no limit
    mask: NDArray[np.uint32] | None = None  # [rows, ceil(vocab / 32)] allowed bits; None: all rows unconstrained
    # Sparse edits, sorted by row: entry j applies to row edit_rows[j], token edit_ids[j].
    bias_rows: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    bias_ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))  # -inf: banned
    penalty_rows: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    penalty_ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # each distinct id of the context
    penalty_counts: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # times generated; 0: prompt only
    repetition_penalty: NDArray[np.float32] | None = None
    presence_penalty: NDArray[np.float32] | None = None
    frequency_penalty: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids [rows]; logprobs [rows] of the raw distribution (NaN where not asked); tops[r] is (ids, logprobs) or None.

    A row whose logits are not finite, or whose mask is empty, has token id -1: the caller fails that row only.
    """

    token_ids: Ints
    logprobs: NDArray[np.float32]
    tops: tuple[tuple[Ints, NDArray[np.float32]] | None, ...]
