"""What the worker sent back: KV that is there now, and tokens.

Most rows of most steps are decode rows with one token and nothing special about it. They are handled in columns; all others
one by one.
"""

from __future__ import annotations

import numpy as np

from anabranch.runtime.messages import Error, Produced, SlotLogprobs, StepResult, TokenLogprobs, as_ints
from anabranch.runtime.scheduler.lifecycle import Lifecycle
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.slots import BUFFER
from anabranch.runtime.scheduler.state import Flight, Note, SchedulerState


class Results:
    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self.s = state
        self.lifecycle = lifecycle

    def take(self, result: StepResult) -> None:
        """The oldest plan in flight has been carried out. Anything else is a leftover of a worker that is gone: dropped."""
        s = self.s
        if not s.flights or s.flights[0].step_id != result.step_id:
            s.counters["dropped_result"] += 1
            return
        flight = s.flights.popleft()
        s.slots.in_flight[flight.slots] -= 1
        if not s.copies and not any(other.has_copies for other in s.flights):
            s.manager.settle()
        for row_error in result.errors:
            self._fail(row_error.slot, row_error.error)
        sampled, counts = as_ints(result.slots), as_ints(result.counts)
        self._commit(flight, sampled[counts > 0])
        self._take_notes(flight, result)
        self._take_tokens(flight, result, sampled, counts)
        self._let_go(flight)

    def _fail(self, slot: int, error: Error) -> None:
        request = self.s.slots.owner[slot] if 0 <= slot < self.s.slots.num_slots else None
        if request is not None and request.state is not State.ENDED:
            self.lifecycle.refuse(request, error)

    # ------------------------------------------------------------ KV

    def _commit(self, flight: Flight, sampled: np.ndarray) -> None:
        slots = self.s.slots
        slots.committed[flight.slots] = flight.upto
        if len(sampled) == np.count_nonzero(flight.samples):
            return
        # A row was asked for a token and gave none (its grammar is still being compiled): ask again, by computing
        # its last position once more.
        without = flight.slots[flight.samples & ~np.isin(flight.slots, sampled)]
        for slot in without[slots.live[without]].tolist():
            if slot in flight.notes and flight.notes[slot].is_follower:
                self.lifecycle.give_up_seat(slots.used[slot])
                continue
            if slots.in_flight[slot]:  # a later row was planned on the token that did not come
                self._fail(slot, Error("internal_error", "the worker sampled nothing for a row that had to", code="no_token"))
                continue
            slots.planned[slot] = slots.committed[slot] = slots.committed[slot] - 1
            self.s.counters["asked_again"] += 1

    def _take_notes(self, flight: Flight, result: StepResult) -> None:
        """Rows that filled KV: publish it, collect logprobs and scores, and end what only computes."""
        slots = self.s.slots
        found = {entry.slot: entry.logprobs for entry in result.prompt_logprobs}
        for slot, note in flight.notes.items():
            request = slots.owner[slot]
            if request is None or request.state is State.ENDED or note.is_follower:
                continue
            with self.lifecycle.guard(request, "taking the result of"):
                if note.logprobs_from is not None and slot in found and request.prompt_logprobs is not None:
                    request.prompt_logprobs.add(note.logprobs_from, found[slot])
                if note.tree is not None:
                    self._take_scores(request, note, result)
                else:
                    self._take_filled(request)

    def _take_filled(self, request: Request) -> None:
        self.lifecycle.publish(request)
        is_all = self.s.slots.committed[request.slot] >= request.prompt_len
        if is_all and not request.wants_tokens and request.score is None:
            self.lifecycle.finish(request, "length")

    def _take_scores(self, request: Request, note: Note, result: StepResult) -> None:
        assert request.score is not None and note.tree is not None
        s, slot = self.s, request.slot
        request.score.take(result.score_logprobs[note.tree], result.score_is_greedy[note.tree])
        if request.score.is_done:
            self.lifecycle.finish(request, "stop")
        else:  # the next trie hangs on the same last token, whose KV is written once more
            s.slots.committed[slot] = s.slots.planned[slot] = request.prompt_len - 1
            self.lifecycle.publish(request)

    # ------------------------------------------------------------ tokens

    def _take_tokens(self, flight: Flight, result: StepResult, sampled: np.ndarray, counts: np.ndarray) -> None:
        if not len(sampled):
            return
        slots, ids = self.s.slots, as_ints(result.token_ids)
        starts = np.cumsum(counts) - counts
        plain = slots.is_plain[sampled] & (counts == 1) & slots.live[sampled]
        self._take_plain(sampled[plain], ids[starts[plain]])
        if not plain.all():
            special = np.flatnonzero(~plain & slots.live[sampled])
            done = _flags(result.grammar_done, len(sampled))
            logprobs = {entry.slot: entry for entry in result.logprobs}
            for i in special.tolist():
                slot, first = int(sampled[i]), int(starts[i])
                request = slots.used[slot]
                run = ids[first : first + int(counts[i])].tolist()
                with self.lifecycle.guard(request, "taking the tokens of"):
                    self._take_run(request, run, logprobs.get(slot), is_done=bool(done[i]))

    def _take_plain(self, sampled: np.ndarray, ids: np.ndarray) -> None:
        """One token for each of these slots, without logprobs or grammar."""
        s, slots = self.s, self.s.slots
        stops = (slots.stops[sampled] == ids[:, None]).any(axis=1) | (ids < 0)
        goes_on = ~stops
        kept, tokens = sampled[goes_on], ids[goes_on]
        slots.buffer[kept, slots.buffered[kept]] = tokens
        slots.buffered[kept] += 1
        slots.last_token[kept] = tokens
        slots.known[kept] += 1
        s.outbox += [
            Produced(request_id, (token,))
            for request_id, token in zip(slots.request_id[kept].tolist(), tokens.tolist())
        ]
        for slot in kept[slots.known[kept] == slots.prompt_len[kept] + 1].tolist():
            self._note_first(slots.used[slot])
        for slot in kept[slots.buffered[kept] == BUFFER].tolist():
            self.lifecycle.sync(slot)
        for slot, token in zip(sampled[stops].tolist(), ids[stops].tolist()):
            self._end_at(slots.used[slot], token)
        for slot in kept[slots.known[kept] >= slots.limit[kept]].tolist():
            self.lifecycle.finish(slots.used[slot], "length")

    def _note_first(self, request: Request) -> None:
        if request.first_token_at is None:
            request.first_token_at = self.s.now

    def _end_at(self, request: Request, token: int) -> None:
        """The request sampled a token that ends it, and that is not part of it."""
        if token < 0:
            error = Error("internal_error", "the model's output was not finite, or nothing could be sampled", code="no_token")
            self.lifecycle.refuse(request, error)
        else:
            self._note_first(request)
            self.lifecycle.finish(request, "stop", matched=token)

    def _take_run(self, request: Request, run: list[int], entry: SlotLogprobs | None, *, is_done: bool) -> None:
        """A sampled token, and those that a grammar forced after it: each one through the same checks."""
        slots, slot = self.s.slots, request.slot
        room = int(slots.limit[slot] - slots.known[slot])
        stops = request.params.stop_token_ids
        num_kept = next((i for i, token in enumerate(run[:room]) if token in stops or token < 0), min(len(run), room))
        self._append_run(request, run[:num_kept], entry)
        if num_kept < min(len(run), room):
            self._end_at(request, run[num_kept])
        elif is_done and num_kept == len(run):
            self.lifecycle.finish(request, "stop")
        elif slots.known[slot] >= slots.limit[slot]:
            self.lifecycle.finish(request, "length")

    def _append_run(self, request: Request, run: list[int], entry: SlotLogprobs | None) -> None:
        s, slots, slot = self.s, self.s.slots, request.slot
        if not run:
            return
        self._note_first(request)
        self.lifecycle.sync(slot)
        s.manager.append(request.branch.known(), run)
        slots.known[slot] += len(run)
        slots.last_token[slot] = run[-1]
        request.forced_tokens += len(run) - 1
        if slots.known[slot] - slots.planned[slot] > 1:
            slots.filling[slot] = request.is_forced = True
        logprobs = _first(entry.logprobs, len(run)) if entry is not None else None
        s.outbox.append(Produced(request.request_id, tuple(run), logprobs, len(run) - 1))

    # ------------------------------------------------------------ leaving

    def _let_go(self, flight: Flight) -> None:
        """Requests that ended or were preempted, and of which nothing is in flight any more."""
        slots = self.s.slots
        for slot in flight.slots[slots.leaving[flight.slots] & (slots.in_flight[flight.slots] == 0)].tolist():
            request = slots.owner[slot]
            if request is not None:
                self.lifecycle.leave(request)


def _flags(data: bytes, n: int) -> np.ndarray:
    """0 | 1 per entry, as bytes or as int32; empty means all 0."""
    if not data:
        return np.zeros(n, np.bool_)
    return np.frombuffer(data, np.uint8 if len(data) == n else "<i4").astype(np.bool_)


def _first(logprobs: TokenLogprobs, n: int) -> TokenLogprobs:
    if len(logprobs.token_ids) <= n:
        return logprobs
    return TokenLogprobs(logprobs.token_ids[:n], logprobs.logprobs[:n], logprobs.tops[:n])
