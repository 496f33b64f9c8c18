"""One record per request, one state machine, one terminal transition.

```
            ┌───────── preempted ─────────┐
            v                             │
 QUEUED → WAITING → RUNNING → LEAVING_TO_WAIT
   │         │         │             │
   └─────────┴────┬────┴─────────────┘
                  v
               ENDED  (its one terminal event is out; pages and slot stay until no step in flight can touch them)
```

QUEUED is the time behind another operation of the branch, while there is no record yet but the message itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from anabranch.runtime.messages import SamplingParams, TokenLogprobs, Usage
from anabranch.runtime.scheduler.scores import ScoreTask

if TYPE_CHECKING:
    from anabranch.runtime.scheduler.branches import BranchRecord


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING_TO_WAIT = "leaving to wait"  # preempted while a step is in flight: leaves its slot when that has returned
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """What is known of one Submit or SubmitScore from its arrival to its terminal event.

    start_len    length of the branch before the request's own tokens: what a refusal goes back to
    prompt_len   position of the first token that may be generated
    limit        length that ends generation: max_tokens or the context's end
    reached      positions below it had KV at some time on behalf of this request: computing them again is recomputing
    """

    request_id: int
    branch: BranchRecord
    seq: int  # order of arrival
    arrival: float
    params: SamplingParams
    start_len: int
    prompt_len: int
    limit: int
    deadline: float | None = None
    prompt_logprobs_from: int | None = None
    score: ScoreTask | None = None

    state: State = State.WAITING
    slot: int = -1  # -1: none
    line_key: tuple[int, int, int] = (0, 0, 0)  # its place in the waiting line, see `policy.py`
    lcps: dict[int, int] = field(default_factory=dict)  # request_id -> tokens in common with a running request
    reached: int = 0
    is_forced: bool = False  # a grammar dictated several tokens, whose KV is missing
    frontier: tuple[bytes, int, int] | None = None  # its entry in the index of prefixes being computed
    fill_len: int = 0  # tokens known when it got its slot
    prompt_logprobs: PromptLogprobs | None = None
    twins: list[Request] = field(default_factory=list)  # have the very same prompt, and wait for its logits
    host: Request | None = None  # the running request that it follows, see `following.py`
    agreed: int = 0  # length up to which its tokens are known to be its host's
    num_followers: int = 0
    cut_len: int | None = None  # length to go back to when it leaves its slot
    is_cut_superseded: bool = False
    is_tainted: bool = False  # its KV gave logits that are no numbers: nobody else may use it
    charged_upto: int = 0  # length that its program has been charged for
    expected: int = 0  # further tokens, as of `expected_at`: (generated, outputs seen)
    expected_at: tuple[int, int] = (-1, -1)
    must_start_over: bool = False  # when it is alone again: without any cached page

    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    forced_tokens: int = 0
    num_steps: int = 0
    copied_pages: int = 0
    num_preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    wait_reason: str = ""

    @property
    def wants_tokens(self) -> bool:
        """Whether it generates at all; otherwise it only computes, or scores."""
        return self.limit > self.prompt_len

    def rank(self) -> tuple[int, int]:
        """Seniority: the smallest is served first and preempted last."""
        return (-self.branch.priority, self.seq)

    def count_attached(self, attached: int) -> None:
        """It starts, or goes on, from `attached` tokens of KV that it did not compute now."""
        fresh = min(attached, self.prompt_len) - min(self.reached, self.prompt_len)
        self.cached_tokens += max(0, fresh)
        self.reached = max(self.reached, attached)

    def count_computed(self, first: int, stop: int) -> None:
        """A row computes positions [first, stop)."""
        again = max(0, min(stop, self.reached) - first)
        self.recomputed_tokens += again
        self.computed_tokens += max(0, min(stop, self.prompt_len) - max(first, min(self.reached, self.prompt_len)))
        self.reached = max(self.reached, stop)

    def usage(self, now: float, num_generated: int) -> Usage:
        def since_arrival(at: float | None) -> float:
            return 0.0 if at is None else max(0.0, (at - self.arrival) * 1e3)

        return Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            completion_tokens=num_generated,
            recomputed_tokens=self.recomputed_tokens,
            forced_tokens=min(self.forced_tokens, num_generated),
            num_steps=self.num_steps,
            copied_pages=self.copied_pages,
            queue_ms=since_arrival(self.scheduled_at if self.scheduled_at is not None else now),
            ttft_ms=since_arrival(self.first_token_at),
            total_ms=since_arrival(now),
            num_preemptions=self.num_preemptions,
            wait_reason=self.wait_reason,
        )


class PromptLogprobs:
    """Collects the logprobs of tokens [first, prompt_len) chunk by chunk, over preemptions."""

    def __init__(self, first: int, tokens: np.ndarray) -> None:
        self.next = first  # position whose logprob is missing
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._tops: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        if first == 0 and len(tokens):
            self._add(int(tokens[0]), None, ((), ()))

    @property
    def needs_kv_from(self) -> int:
        """The forward must run from here on: a token's logprob comes from the position before it."""
        return self.next - 1

    def add(self, first: int, found: TokenLogprobs) -> None:
        """Logprobs of the tokens from position `first` on; those that are known already are left out."""
        skip = self.next - first
        assert skip >= 0, f"prompt logprobs from {first} on, but those from {self.next} on are missing"
        for i in range(skip, len(found.token_ids)):
            self._add(found.token_ids[i], found.logprobs[i], found.tops[i] if found.tops else ((), ()))

    def result(self) -> TokenLogprobs:
        return TokenLogprobs(tuple(self._ids), tuple(self._logprobs), tuple(self._tops))

    def _add(self, token_id: int, logprob: float | None, top: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
        self._ids.append(token_id)
        self._logprobs.append(logprob)
        self._tops.append(top)
        self.next += 1
