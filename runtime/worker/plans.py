"""A `StepPlan` decoded, and what follows from it alone: positions, and the rows of logits that are wanted."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.runtime.messages import ScoreTree, StepPlan, as_ints

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Samples:
    """What a plan samples: for each, the slot, the token after which it comes (an index into the step's), its position in its branch."""

    slots: Ints
    tokens: Ints
    positions: Ints


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that compute something; row r owns the step's tokens q_indptr[r]:q_indptr[r + 1]. One entry per row.

    number    the row's number in the plan, where rows that only sample from another's logits have one too
    """

    number: Ints
    slots: Ints
    num_new: Ints
    first_pos: Ints
    feedback: NDArray[np.bool_]
    prompt_logprobs: NDArray[np.bool_]
    next_ids: Ints
    q_indptr: Ints
    samples: Samples

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def last_tokens(self) -> Ints:
        """Index of each row's last token."""
        return self.q_indptr[1:] - 1

    def index(self, number: int) -> int:
        """The row with this number in the plan, or the next one that computes something."""
        return int(np.searchsorted(self.number, number))


def decode_rows(plan: StepPlan) -> Rows:
    slots, num_new, first_pos = as_ints(plan.slots), as_ints(plan.num_new), as_ints(plan.first_pos)
    q_indptr = indptr(num_new)
    sampling = np.flatnonzero(as_ints(plan.sample))
    hosts = as_ints(plan.logits_of)[sampling] if plan.logits_of else sampling
    samples = Samples(slots[sampling], q_indptr[hosts + 1] - 1, (first_pos + num_new)[sampling])
    feedback = as_ints(plan.feedback).astype(np.bool_)
    asked = as_ints(plan.prompt_logprobs).astype(np.bool_) if plan.prompt_logprobs else np.zeros(len(slots), np.bool_)
    next_ids = as_ints(plan.next_ids) if plan.next_ids else np.full(len(slots), -1, np.int32)
    number = np.arange(len(slots), dtype=np.int32)
    if plan.logits_of:
        number = np.flatnonzero(num_new).astype(np.int32)
        slots, num_new, first_pos = slots[number], num_new[number], first_pos[number]
        feedback, asked, next_ids = feedback[number], asked[number], next_ids[number]
        q_indptr = indptr(num_new)
    return Rows(number, slots, num_new, first_pos, feedback, asked, next_ids, q_indptr, samples)


def token_positions(rows: Rows, trees: tuple[ScoreTree, ...]) -> Ints:
    """Rotary position of each token: in a line, but by depth inside a tree."""
    if len(rows.num_new) == rows.q_indptr[-1]:
        return rows.first_pos  # one token each
    positions = np.arange(rows.q_indptr[-1], dtype=np.int32) + np.repeat(
        rows.first_pos - rows.q_indptr[:-1], rows.num_new
    )
    for tree in trees:
        end = rows.q_indptr[rows.index(tree.row) + 1]
        parents = as_ints(tree.parents)
        if len(parents):
            first = end - len(parents)
            positions[first:end] = positions[first] + depths(parents)
    return positions


def depths(parents: Ints) -> Ints:
    """Number of ancestors of each node; parents[i] < i, or -1."""
    found = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents.tolist()):
        assert parent < i, f"node {i} of a tree comes before its parent {parent}"
        if parent >= 0:
            found[i] = found[parent] + 1
    return found


def wanted_logits(rows: Rows, trees: tuple[ScoreTree, ...]) -> Ints:
    """Indices, ascending, of the tokens whose logits somebody looks at."""
    sampled = rows.samples.tokens
    if not trees and not rows.prompt_logprobs.any() and (len(sampled) < 2 or (np.diff(sampled) > 0).all()):
        return sampled
    wanted = [sampled, *(prompt_tokens(rows, r) for r in np.flatnonzero(rows.prompt_logprobs).tolist())]
    wanted += [target_tokens(rows, tree) for tree in trees]
    return np.unique(np.concatenate(wanted)).astype(np.int32)


def prompt_tokens(rows: Rows, row: int) -> Ints:
    """The row's tokens whose successor is known: all but the last, and that too if the plan says what follows."""
    end = rows.q_indptr[row + 1] - (rows.next_ids[row] < 0)
    return np.arange(rows.q_indptr[row], end, dtype=np.int32)


def target_tokens(rows: Rows, tree: ScoreTree) -> Ints:
    """The token that each target of a tree follows."""
    row = rows.index(tree.row)
    tokens = rows.q_indptr[row + 1] - len(as_ints(tree.parents)) + as_ints(tree.target_nodes)
    assert not len(tokens) or tokens.min() >= rows.q_indptr[row], "a target needs the token before the tree, in its row"
    return tokens


def indptr(counts: Ints) -> Ints:
    """[0, counts[0], counts[0] + counts[1], ...]"""
    ends = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    return ends
