"""The rows of one step, and the message that carries them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from anabranch.runtime.messages import ScoreTree, SharedPrefix, SlotStart, StepPlan, ints
from anabranch.runtime.scheduler.scores import Trie
from anabranch.runtime.scheduler.state import Note, SchedulerState

_NO_INTS = np.empty(0, np.int32)


@dataclass(slots=True)
class Row:
    """A row that is more than one decode token.

    first     first position it computes
    tokens    ids from there on; with a tree, its nodes at the end
    upto      positions below it have KV afterwards
    next_id   the token that follows, for prompt logprobs across chunks, or -1
    host      slot whose logits it samples from, if it computes nothing itself
    """

    slot: int
    first: int
    tokens: np.ndarray
    upto: int
    samples: bool = False
    logprobs_from: int | None = None
    next_id: int = -1
    trie: Trie | None = None
    host: int | None = None


@dataclass(slots=True)
class StepRows:
    """What a step computes: decode rows by slot, and the others."""

    decode: np.ndarray = field(default_factory=lambda: _NO_INTS)
    others: list[Row] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.decode) + len(self.others)


def build_plan(s: SchedulerState, rows: StepRows, starts: list[SlotStart]) -> tuple[StepPlan, dict[int, Note]]:
    """The message, and what to do with the results of rows that are more than a decode token.

    Cost     numpy over the decode rows; Python over the others, and over rows whose page table changed
    """
    slots, row_of = _order(s, rows)
    first = s.slots.planned[slots]
    num_new = np.ones(len(slots), np.int32)
    feedback = (first >= s.slots.known[slots]).astype(np.int32)
    sample = np.ones(len(slots), np.int32)
    asks_logprobs = np.zeros(len(slots), np.int32)
    next_ids = np.full(len(slots), -1, np.int32)
    for row in rows.others:
        i = row_of[row.slot]
        first[i], num_new[i], feedback[i], sample[i] = row.first, len(row.tokens), 0, row.samples
        asks_logprobs[i], next_ids[i] = row.logprobs_from is not None, row.next_id
    has_followers = any(row.host is not None for row in rows.others)
    logits_of = np.arange(len(slots), dtype=np.int32)
    notes, trees = _notes_and_trees(rows, row_of, logits_of)

    keep, counts, page_ids = _page_columns(s, slots)
    copy_src, copy_dst, fresh = _take_page_work(s, slots)
    plan = StepPlan(
        step_id=s.num_steps,
        starts=tuple(starts),
        ends=tuple(s.slots.ends),
        copy_src=ints(copy_src),
        copy_dst=ints(copy_dst),
        slots=ints(slots),
        num_new=ints(num_new),
        first_pos=ints(first),
        page_keep=ints(keep),
        page_counts=ints(counts),
        page_ids=ints(page_ids),
        token_ids=ints(_token_ids(s, rows, slots, num_new, feedback, row_of)),
        feedback=ints(feedback),
        sample=ints(sample),
        prompt_logprobs=ints(asks_logprobs) if asks_logprobs.any() else b"",
        next_ids=ints(next_ids) if asks_logprobs.any() else b"",
        trees=trees,
        groups=_groups(s, slots, first) if len(slots) > 1 else (),
        fresh_pages=ints(fresh),
        logits_of=ints(logits_of) if has_followers else b"",
    )
    s.slots.ends = []
    return plan, notes


def _order(s: SchedulerState, rows: StepRows) -> tuple[np.ndarray, dict[int, int]]:
    """The rows' slots in the order of the step, and the row of each slot (empty if all are decode rows, which are in order)."""
    if not rows.others:
        return rows.decode, {}
    slots = np.concatenate([rows.decode, np.array([row.slot for row in rows.others], np.int32)]).astype(np.int32)
    slots = slots[np.argsort(s.slots.rank[slots], kind="stable")]
    return slots, {slot: i for i, slot in enumerate(slots.tolist())}


def _notes_and_trees(
    rows: StepRows, row_of: dict[int, int], logits_of: np.ndarray
) -> tuple[dict[int, Note], tuple[ScoreTree, ...]]:
    notes: dict[int, Note] = {}
    trees: list[ScoreTree] = []
    for row in rows.others:
        tree = None
        if row.trie is not None:
            tree = len(trees)
            trees.append(row.trie.message(row_of[row.slot]))
        if row.host is not None:
            logits_of[row_of[row.slot]] = row_of[row.host]
        notes[row.slot] = Note(row.first, row.logprobs_from, tree, row.host is not None)
    return notes, tuple(trees)


def _token_ids(
    s: SchedulerState, rows: StepRows, slots: np.ndarray, num_new: np.ndarray, feedback: np.ndarray, row_of: dict[int, int]
) -> np.ndarray:
    """Ids of all rows without feedback, in the order of the rows."""
    if not rows.others:
        return s.slots.last_token[slots[feedback == 0]]
    lengths = np.where(feedback == 1, 0, num_new)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ids = np.empty(int(ends[-1]), np.int32)
    single = np.flatnonzero(lengths == 1)
    ids[starts[single]] = s.slots.last_token[slots[single]]
    for row in rows.others:
        i = row_of[row.slot]
        ids[starts[i] : ends[i]] = row.tokens
    return ids


def _page_columns(s: SchedulerState, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What of its page table each row keeps, and what it appends, since the slot's last row."""
    columns = s.slots
    keep = columns.pages_sent[slots].astype(np.int32)
    counts = np.zeros(len(slots), np.int32)
    new: list[np.ndarray] = []
    for i in np.flatnonzero(columns.is_dirty[slots]).tolist():
        slot = int(slots[i])
        kv = columns.used[slot].branch.known()
        if not kv.attached:
            continue  # it follows another request
        stable = kv.stable_since(int(columns.table_version[slot])) if columns.pages_sent[slot] else 0
        keep[i] = min(keep[i], stable)
        new.append(kv.page_table[keep[i] :])
        counts[i] = len(new[-1])
        columns.pages_sent[slot] = kv.num_pages
        columns.table_version[slot] = kv.table_version
        columns.is_dirty[slot] = False
    return keep, counts, np.concatenate(new) if new else _NO_INTS


def _take_page_work(s: SchedulerState, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies and fresh pages of these rows."""
    if not s.copies and not s.fresh:
        return _NO_INTS, _NO_INTS, _NO_INTS
    sources, targets, fresh = [_NO_INTS], [_NO_INTS], [_NO_INTS]
    in_step = set(slots.tolist())
    for slot in [slot for slot in s.copies if slot in in_step]:
        src, dst = s.copies.pop(slot)
        sources.append(src)
        targets.append(dst)
    for slot in [slot for slot in s.fresh if slot in in_step]:
        fresh += s.fresh.pop(slot)
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(fresh)


def _groups(s: SchedulerState, slots: np.ndarray, first: np.ndarray) -> tuple[SharedPrefix, ...]:
    """Runs of neighbouring rows that are members of one group."""
    group = s.slots.group[slots]
    if not (group >= 0).any():
        return ()
    edges = np.flatnonzero(np.diff(group)) + 1
    found = []
    for a, b in zip([0, *edges.tolist()], [*edges.tolist(), len(slots)]):
        if b - a > 1 and group[a] >= 0:
            num_tokens = s.group_tokens[int(group[a])]
            if first[a:b].min() >= num_tokens:
                found.append(SharedPrefix(int(a), int(b), num_tokens))
    return tuple(found)
