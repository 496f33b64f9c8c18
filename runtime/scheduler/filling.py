"""Rows that fill KV: prompts in chunks, tokens that a grammar forced, resumed requests, and score trees.

First every row's share and pages are settled, which may cost a younger request its place. Only then are rows made of those that
are still there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anabranch.runtime.scheduler.decisions import LogitsBudget, TokenBudget
from anabranch.runtime.scheduler.following import Following
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.plans import Row
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.room import Room
from anabranch.runtime.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [first, stop) of a request, and its present score tree if `has_tree`.

    num_logit_rows   of these, besides the one that is sampled from
    """

    request: Request
    first: int
    stop: int
    has_tree: bool
    num_logit_rows: int


class Filling:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle, room: Room, following: Following) -> None:
        self.s = state
        self.lifecycle = lifecycle
        self.room = room
        self.following = following
        self._max_logit_rows = max(1, state.policy.logits_bytes // (4 * state.ready.vocab_size))

    def chunks(self, left: int) -> list[Chunk]:
        """What each filling request computes of the step's `left` tokens, with pages to write it.

        Tokens that a grammar forced go first; then the oldest request may have half, so that it always gets on; the rest
        goes to those that are done soonest; what is over, to the oldest again. Rows of logits have a budget of their own, by age.
        """
        columns = self.s.slots
        if not columns.filling.any():
            return []
        slots = np.flatnonzero(columns.filling & columns.live & ~columns.leaving & (columns.known > columns.planned))
        filling = sorted((columns.used[slot] for slot in slots.tolist()), key=Request.rank)
        if not filling:
            return []
        shares = self._share_out(filling, left)
        chunks, rows_left = [], self._max_logit_rows
        for request in filling:
            chunk = self._chunk(request, shares[request.request_id], rows_left, is_eldest=request is filling[0])
            if chunk is not None and self._has_room(chunk):
                chunks.append(chunk)
                rows_left = max(0, rows_left - chunk.num_logit_rows)
        return chunks

    def rows(self, chunks: list[Chunk]) -> list[Row]:
        """The rows of those chunks whose requests have not been preempted meanwhile, and of those that follow them."""
        rows: list[Row] = []
        for chunk in chunks:
            request = chunk.request
            if request.state is not State.RUNNING:
                continue
            slot = request.slot
            with self.lifecycle.guard(request, "planning"):
                row = self._tree_row(chunk) if chunk.has_tree else self._line_row(chunk)
                request.count_computed(chunk.first, chunk.stop)
                rows.append(row)
                if chunk.stop == request.fill_len and not chunk.has_tree:
                    rows += self.following.begin(request)
            if request.state is State.ENDED:  # by a fault of ours
                rows = [row for row in rows if slot not in (row.slot, row.host)]
        return rows

    # ------------------------------------------------------------ shares

    def _missing(self, request: Request) -> int:
        """Tokens that the request's rows still have to compute, those of its present score tree included."""
        columns, slot = self.s.slots, request.slot
        missing = int(columns.known[slot] - columns.planned[slot])
        return missing + (request.score.trie.num_nodes if request.score is not None else 0)

    def _share_out(self, filling: list[Request], left: int) -> dict[int, int]:
        eldest, *others = filling
        wanted = {r.request_id: self._missing(r) for r in filling}
        for_others = sum(wanted.values()) - wanted[eldest.request_id]
        first_share = min(wanted[eldest.request_id], max(left - for_others, -(-left // 2)))
        left -= first_share
        shares = {}
        for request in sorted(others, key=lambda r: (not r.is_forced, wanted[r.request_id], r.rank())):
            shares[request.request_id] = min(wanted[request.request_id], left)
            left -= shares[request.request_id]
        shares[eldest.request_id] = min(wanted[eldest.request_id], first_share + left)
        return shares

    def _chunk(self, request: Request, share: int, rows_left: int, *, is_eldest: bool) -> Chunk | None:
        columns, slot, size = self.s.slots, request.slot, self.s.page_size
        first, known = int(columns.planned[slot]), int(columns.known[slot])
        stop, has_tree, lacks_rows = min(first + share, known), False, False
        if request.score is not None:
            # A tree is never cut: the eldest may exceed its share for one that is larger than that.
            num_nodes = request.score.trie.num_nodes
            lacks_rows = num_nodes >= rows_left
            has_tree = (known - first + num_nodes <= share and not lacks_rows) or (is_eldest and first == known - 1)
            stop = known if has_tree else min(stop, known - 1)
        elif _num_logprobs(request, first, stop) > rows_left:
            wanted = request.prompt_logprobs
            assert wanted is not None
            lacks_rows = True
            stop = wanted.needs_kv_from if wanted.needs_kv_from > first else first + rows_left
        if stop < known and stop // size * size > first:
            stop = stop // size * size  # whole pages, unless it is the last chunk
        if stop <= first:
            self.s.deny(request, LogitsBudget(self._max_logit_rows) if lacks_rows else TokenBudget(self.s.config.tokens_per_step))
            return None
        num_rows = request.score.trie.num_nodes + 1 if has_tree and request.score is not None else _num_logprobs(request, first, stop)
        return Chunk(request, first, stop, has_tree, num_rows)

    def _has_room(self, chunk: Chunk) -> bool:
        request = chunk.request
        if request.state is not State.RUNNING:
            return False  # preempted for the sake of another chunk
        scratch = request.score.trie.num_nodes if request.score is not None and chunk.has_tree else 0
        return self.room.make(request, chunk.stop + scratch)

    # ------------------------------------------------------------ rows

    def _line_row(self, chunk: Chunk) -> Row:
        columns, request, first, stop = self.s.slots, chunk.request, chunk.first, chunk.stop
        kv = request.branch.known()
        is_last = stop == int(columns.known[request.slot])
        row = Row(request.slot, first, kv.tokens(first, stop), stop, samples=is_last and request.wants_tokens)
        if _num_logprobs(request, first, stop):
            row.logprobs_from = first + 1
            row.next_id = int(kv.tokens(stop, stop + 1)[0]) if stop < request.prompt_len else -1
        if is_last:
            columns.filling[request.slot] = not request.wants_tokens
            request.is_forced = False
        return row

    def _tree_row(self, chunk: Chunk) -> Row:
        """What is left of the prompt, and the tree. The last token's KV counts as written with the last tree only."""
        request, score = chunk.request, chunk.request.score
        assert score is not None
        tokens = np.concatenate([request.branch.known().tokens(chunk.first), np.array(score.trie.token_ids, np.int32)])
        return Row(request.slot, chunk.first, tokens, chunk.stop if score.is_last else chunk.stop - 1, trie=score.trie)


def _num_logprobs(request: Request, first: int, stop: int) -> int:
    """Positions of [first, stop) whose logits are wanted for logprobs of the prompt: all of them, or none."""
    wanted = request.prompt_logprobs
    if wanted is None or first >= request.prompt_len or wanted.next > min(stop, request.prompt_len - 1):
        return 0
    return stop - first
