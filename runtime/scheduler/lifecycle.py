"""A request's way from its arrival to its one terminal event, and what it holds on the way.

Pages, slot and KV position hang on the request. Whatever ends it (its last token, a stop, an abort, a deadline, an error, a
closed branch) goes through `_end`, once. What a step in flight may still touch is given back when that step has returned;
until then the branch counts as busy, and operations on it wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from anabranch.radix.branch import Tail
from anabranch.radix.manager import Copies
from anabranch.runtime.errors import internal, invalid
from anabranch.runtime.messages import (
    NOT_FINITE,
    Error,
    Finished,
    FinishReason,
    Refused,
    SamplingParams,
    Submit,
    SubmitScore,
    Usage,
    as_ints,
)
from anabranch.runtime.scheduler.branches import BranchRecord
from anabranch.runtime.scheduler.decisions import Preempted
from anabranch.runtime.scheduler.requests import PromptLogprobs, Request, State
from anabranch.runtime.scheduler.scores import ScoreTask
from anabranch.runtime.scheduler.state import SchedulerState

log = logging.getLogger(__name__)


class Lifecycle:
    def __init__(self, state: SchedulerState) -> None:
        self.s = state

    # ------------------------------------------------------------ arrival

    def begin(self, message: Submit | SubmitScore, record: BranchRecord) -> None:
        """The branch is idle: put the request in the waiting line, or refuse it."""
        s, kv = self.s, record.known()
        tokens = as_ints(message.token_ids)
        choices = _choices(message)
        error = self._fault(message, choices, tokens, len(kv))
        if error is not None:
            self.refuse_message(message, error)
            return
        start_len = len(kv)
        s.manager.append(kv, tokens)
        self.forget_last(record)
        s.num_requests += 1
        request = Request(
            request_id=message.request_id, branch=record, seq=s.num_requests,
            arrival=message.arrival or s.now, params=SamplingParams(), start_len=start_len,
            prompt_len=len(kv), limit=len(kv), deadline=message.deadline,
        )  # fmt: skip
        if isinstance(message, Submit):
            self._set_generation(request, message)
        else:
            request.score = ScoreTask(choices, self._max_score_nodes(len(kv)))
        record.request = request
        s.requests[request.request_id] = request
        s.push_deadline(request.deadline, request.request_id)
        s.line.add(request)

    def _set_generation(self, request: Request, message: Submit) -> None:
        request.params = message.params
        request.limit = min(request.prompt_len + message.max_tokens, self.s.ready.context_length)
        first = message.prompt_logprobs_from
        if first is not None and first < request.prompt_len:
            request.prompt_logprobs_from = first
            request.prompt_logprobs = PromptLogprobs(max(0, first), request.branch.known().tokens())

    def _max_score_nodes(self, prompt_len: int) -> int:
        s = self.s
        room = s.manager.pool.num_pages * s.page_size - prompt_len
        return max(1, min(s.config.tokens_per_step // 4 - 1, room))

    def _fault(
        self, message: Submit | SubmitScore, choices: list[tuple[int, ...]], tokens: np.ndarray, start_len: int
    ) -> Error | None:
        """Why the request can never run; the same arithmetic as admission."""
        s = self.s
        prompt_len = start_len + len(tokens)
        capacity = s.manager.pool.num_pages * s.page_size
        context = s.ready.context_length
        if prompt_len == 0:
            return invalid("the prompt is empty: there is nothing to continue; send at least one token", "prompt")
        if isinstance(message, Submit):
            more = min(message.max_tokens, 1)
        else:
            more = max(map(len, choices)) if choices and all(choices) else 0
            if not more:
                return invalid("choices must be one or more runs of at least one token each", "choices")
        for run in (tokens, *map(np.asarray, choices)):
            if len(run) and not (run.min() >= 0 and run.max() < s.ready.vocab_size):
                wrong = int(run.min()) if run.min() < 0 else int(run.max())
                return invalid(f"token id {wrong} is outside the vocabulary: ids go from 0 to {s.ready.vocab_size - 1}", "prompt")
        if prompt_len + more > context:
            return invalid(
                f"the prompt has {prompt_len} tokens and needs {more} more, but the context has only {context}: shorten it",
                "prompt", "context_length_exceeded",
            )  # fmt: skip
        if prompt_len + more > capacity:
            return over_capacity(prompt_len, more, s.manager.pool.num_pages, s.page_size)
        if len(s.line) >= s.config.max_waiting:
            return Error("overloaded_error", f"{len(s.line)} requests are waiting, the limit is {s.config.max_waiting}: try again later")
        return None

    def refuse_message(self, message: Submit | SubmitScore, error: Error) -> None:
        """Refuse a request that has no record: its branch is as it was."""
        self.s.counters["refused"] += 1
        self.s.outbox.append(Refused(message.request_id, error))

    # ------------------------------------------------------------ slot and pages

    def attach(self, request: Request) -> int:
        """Start from the longest cached prefix that the request can use; returns how much is cached, used or not."""
        s, record = self.s, request.branch
        if not s.cache.enabled:
            self._forget_kv(record)
        kv = record.known()
        cached = s.manager.attach(kv)
        wanted = request.prompt_logprobs
        if wanted is not None and wanted.next < request.prompt_len and kv.computed > wanted.needs_kv_from:
            first = max(0, wanted.needs_kv_from)
            tail = kv.tokens(first).copy()
            s.manager.rollback(kv, first, superseded=False)
            s.manager.append(kv, tail)
        return cached

    def _forget_kv(self, record: BranchRecord) -> None:
        """The cache is switched off: go on in a namespace that nobody has used."""
        s, old = self.s, record.known()
        s.counters["uncached_runs"] += 1
        kv = s.manager.open(b"uncached %d" % s.counters["uncached_runs"])
        s.manager.append(kv, old.tokens())
        s.manager.release(old, superseded=True)
        record.kv = kv

    def seat(self, request: Request, cached: int) -> None:
        """The request's attached branch has its pages: fill the columns of its slot. `cached` is what `attach` found."""
        s, kv = self.s, request.branch.known()
        slots, slot = s.slots, request.slot
        slots.committed[slot] = slots.planned[slot] = kv.computed
        slots.known[slot] = request.fill_len = len(kv)
        slots.last_token[slot] = int(kv.tokens(len(kv) - 1)[0])
        slots.capacity[slot] = kv.reserved
        slots.filling[slot] = kv.computed < len(kv)  # the first row goes by the book, also if it has one token
        slots.is_dirty[slot] = True
        request.count_attached(kv.computed)
        s.frontier.move(request, cached)

    def publish(self, request: Request) -> None:
        """Let others use what the request has computed so far."""
        s, kv = self.s, request.branch.known()
        self.sync(request.slot)
        s.manager.publish(kv)
        s.slots.is_dirty[request.slot] |= kv.table_version != s.slots.table_version[request.slot]
        if request.frontier is not None and kv.computed > request.frontier[1]:
            s.frontier.move(request, kv.computed)

    def stop_following(self, request: Request) -> None:
        """The request goes its own way; its host may be planned ahead again when it was the last one."""
        host, slots = request.host, self.s.slots
        if host is None:
            return
        request.host = None
        slots.follows[request.slot] = False
        slots.num_following -= 1
        host.num_followers -= 1
        if not host.num_followers and host.slot >= 0:
            slots.set_rules(host.slot, host)

    def give_up_seat(self, request: Request) -> None:
        """Back to the waiting line, without anything having been taken from it."""
        request.state = State.LEAVING_TO_WAIT
        self.leave(request)

    def reserve(self, request: Request, upto: int) -> bool:
        """Make the slot's positions below `upto` writable; False if pages are short. Takes the rest of the last page, too."""
        s, slot, kv = self.s, request.slot, request.branch.known()
        if kv.tail is Tail.SHARED:  # only then does it matter how far the branch itself knows to be
            self.sync(slot)
        num_before, version = kv.num_pages, kv.table_version
        copies = s.manager.reserve(kv, -(-upto // s.page_size) * s.page_size)
        if copies is None:
            return False
        if kv.num_pages > num_before:
            s.fresh.setdefault(slot, []).append(kv.page_table[num_before:].copy())
            s.slots.is_dirty[slot] = True
        if kv.table_version != version:
            self._note_replaced(request, copies, num_before - 1)
        s.slots.capacity[slot] = kv.reserved
        return True

    def _note_replaced(self, request: Request, copies: Copies, index: int) -> None:
        """The branch left a page that others read: its own is a copy, or, where nothing of the old one is needed, fresh."""
        s, slot = self.s, request.slot
        s.slots.is_dirty[slot] = True
        if len(copies.src):
            s.copies[slot] = (copies.src, copies.dst)
            request.copied_pages += len(copies.src)
        else:
            s.fresh.setdefault(slot, []).append(request.branch.known().page_table[index : index + 1].copy())

    def sync(self, slot: int) -> None:
        """Hand sampled tokens and committed positions, which the columns have, to the branch."""
        s, request = self.s, self.s.slots.owner[slot]
        assert request is not None
        kv = request.branch.known()
        if s.slots.buffered[slot]:
            s.manager.append(kv, s.slots.unbuffered(slot))
        if not kv.attached:
            return
        committed = min(int(s.slots.committed[slot]), len(kv))
        if committed > kv.computed:
            s.manager.commit(kv, committed)

    # ------------------------------------------------------------ leaving

    def preempt(self, request: Request, by: Request) -> None:
        """Take the request's pages: to the tree at once, or when the step in flight has returned."""
        s = self.s
        assert request.state is State.RUNNING, f"request {request.request_id} is {request.state.value}"
        request.state = State.LEAVING_TO_WAIT
        request.num_preemptions += 1
        s.counters["preemptions"] += 1
        s.slots.leaving[request.slot] = True
        s.frontier.remove(request)
        s.deny(request, Preempted(by.request_id))
        if not s.slots.in_flight[request.slot]:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Nothing of the request is in flight any more: give back its slot and pages."""
        s, slot, record = self.s, request.slot, request.branch
        kv = record.known()
        self.sync(slot)
        self.stop_following(request)
        request.twins.clear()
        request.num_steps += int(s.slots.num_steps[slot])
        request.reached = max(request.reached, int(s.slots.committed[slot]))
        s.line.charge(record.program, len(kv) - request.charged_upto)  # give back what was expected and did not come
        s.copies.pop(slot, None)
        s.fresh.pop(slot, None)
        if request.state is State.ENDED:
            self._cut(request)
        if kv.attached and request.is_tainted:
            s.manager.discard(kv)
        elif kv.attached:
            s.manager.detach(kv)
        if request.state is State.ENDED:
            self._cut(request, is_last=True)
        s.slots.give_back(slot)
        if request.state is State.ENDED:
            self._release_branch(record)
        else:
            request.state = State.WAITING
            s.line.add(request)

    def _cut(self, request: Request, *, is_last: bool = False) -> None:
        """Go back to the length at which the request ends. What nobody will want goes before it reaches the tree."""
        kv = request.branch.known()
        if request.cut_len is not None and (is_last or request.is_cut_superseded) and request.cut_len < len(kv):
            self.s.manager.rollback(kv, request.cut_len, superseded=request.is_cut_superseded)

    def _release_branch(self, record: BranchRecord) -> None:
        s = self.s
        record.request = None
        if record.leased_until is not None and record.leased_until > s.now:
            s.lease(record, record.leased_until)
        s.branches.wake(record)

    # ------------------------------------------------------------ the end

    def num_generated(self, request: Request) -> int:
        known = int(self.s.slots.known[request.slot]) if request.slot >= 0 else len(request.branch.known())
        return max(0, known - request.prompt_len)

    def finish(self, request: Request, reason: FinishReason, *, keep: int | None = None, matched: int | None = None) -> None:
        """End with the tokens generated so far, or with the first `keep` of them."""
        s = self.s
        generated = self.num_generated(request)
        if keep is not None and keep < generated:
            generated = keep
            request.is_cut_superseded = True
        length = request.prompt_len + generated
        request.cut_len = length
        if request.wants_tokens and reason != "abort":
            s.headroom.observe(generated, was_cut=reason == "length")
        logprobs, is_greedy = request.score.result() if request.score is not None and request.score.is_done else ((), ())
        prompt_logprobs = request.prompt_logprobs.result() if request.prompt_logprobs is not None else None
        usage = self._end(request, generated)
        s.ended[request.request_id] = request.branch.branch_id
        request.branch.last_request = (request.request_id, request.prompt_len)
        self._send_end(
            request,
            Finished(request.request_id, reason, length, usage, matched, prompt_logprobs, logprobs, is_greedy),
        )

    def refuse(self, request: Request, error: Error) -> None:
        """End with an error; the branch goes back to what it was. What was computed stays in the cache, unless it is what failed."""
        request.cut_len = request.start_len
        request.is_tainted = error.code == NOT_FINITE
        usage = self._end(request, self.num_generated(request))
        self.s.counters["refused"] += 1
        self._send_end(request, Refused(request.request_id, error, usage))

    def abort(self, request: Request, error: Error) -> None:
        """Somebody does not want it any more. If it ran, what it has is kept; if not, it never was."""
        if request.scheduled_at is None:
            self.refuse(request, error)
        else:
            self.finish(request, "abort")

    @contextmanager
    def guard(self, request: Request, doing: str) -> Iterator[None]:
        """A fault of ours inside ends this request with an error, and nobody else's."""
        try:
            yield
        except Exception as fault:
            if self.s.policy.raise_errors:
                raise
            log.exception("%s request %d failed", doing, request.request_id)
            self.s.counters["internal_errors"] += 1
            self.fail(request, internal(fault, f"{doing} the request"))

    def fail(self, request: Request, error: Error) -> None:
        """A fault of ours while something was done for the request, in whatever state that left it."""
        if request.request_id not in self.s.requests:
            return
        kv = request.branch.known()
        if request.slot < 0 and kv.attached:
            self.s.manager.detach(kv)
        self.refuse(request, error)

    def _end(self, request: Request, generated: int) -> Usage:
        s = self.s
        assert request.state is not State.ENDED, f"request {request.request_id} has ended already"
        was_waiting = request.state is State.WAITING
        request.state = State.ENDED
        del s.requests[request.request_id]
        if was_waiting:
            s.line.remove(request)
        else:
            s.slots.live[request.slot] = False
            s.slots.leaving[request.slot] = True
            s.frontier.remove(request)
        s.counters["generated_tokens"] += generated
        s.counters["prompt_tokens"] += request.prompt_len
        for name in ("cached_tokens", "computed_tokens", "recomputed_tokens"):
            s.counters[name] += getattr(request, name)
        pending = int(s.slots.num_steps[request.slot]) if request.slot >= 0 else 0
        request.num_steps += pending
        usage = request.usage(s.now, generated)
        request.num_steps -= pending
        return usage

    def _send_end(self, request: Request, event: Finished | Refused) -> None:
        s = self.s
        s.outbox.append(event)
        if request.slot < 0:
            self.give_back_branch(request)
        elif not s.slots.in_flight[request.slot]:
            self.leave(request)

    def give_back_branch(self, request: Request) -> None:
        """The request has ended and holds no slot: its branch takes the next operation."""
        self._cut(request, is_last=True)
        self._release_branch(request.branch)

    def forget_last(self, record: BranchRecord) -> None:
        """Something else happened on the branch: a late `StopAt` of its last request means nothing any more."""
        if record.last_request is not None:
            self.s.ended.pop(record.last_request[0], None)
            record.last_request = None


def over_capacity(prompt_len: int, more: int, num_pages: int, page_size: int) -> Error:
    """A prompt that no amount of waiting makes room for."""
    return invalid(
        f"the prompt has {prompt_len} tokens and needs {more} more, but the KV pool holds only {num_pages * page_size} "
        f"({num_pages} pages of {page_size}): shorten it or give the engine more memory",
        "prompt", "kv_capacity_exceeded",
    )  # fmt: skip


def _choices(message: Submit | SubmitScore) -> list[tuple[int, ...]]:
    return [tuple(as_ints(choice).tolist()) for choice in message.choices] if isinstance(message, SubmitScore) else []
