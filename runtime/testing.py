"""A worker without a model, a clock without time, and the two joined to a scheduler: for tests of everything above the worker.

`FakeWorker` carries out plans over simulated pages. Each KV slot holds the *identity* of what was written there, a hash of the
whole token prefix, and its model is a pure function of that. So whatever makes a row read another prefix than its own (a wrong
page table, a missing copy, a page reused too early, a slot written while somebody reads it) fails an assertion or changes the
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.runtime.messages import (
    Error,
    FromScheduler,
    RowError,
    SamplingParams,
    SlotLogprobs,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    ToScheduler,
    WorkerReady,
    as_ints,
    ints,
)

_MASK = (1 << 64) - 1
_EMPTY = 0x5EED
GREEDY_BELOW = 1e-5


class VirtualClock:
    """Time that passes only when told to."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time does not go back, got {seconds}"
        self._now += seconds


# ---------------------------------------------------------------- the model


def mix(a: int, b: int) -> int:
    """A hash of two 64-bit words; never 0, which stands for "nothing was written"."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) or 1


def mix_all(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`mix`, element by element."""
    x = a * np.uint64(0x9E3779B97F4A7C15) + b.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.where(x == 0, np.uint64(1), x)


def identity(token_ids: Sequence[int], start: int = _EMPTY) -> int:
    """What the KV slot of the last token holds."""
    for token in token_ids:
        start = mix(start, int(token))
    return start


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Draws from the identity of a prefix. Every function is pure: tests compute what they expect with the same ones."""

    vocab_size: int

    def greedy(self, prefix: int) -> int:
        return mix(prefix, 1) % self.vocab_size

    def logprob(self, prefix: int, token: int) -> float:
        return -(1 + mix(prefix, 1000 + token) % 1000) / 128  # exact in float32

    def tops(self, prefix: int, k: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        best = sorted(range(self.vocab_size), key=lambda token: (-self.logprob(prefix, token), token))[:k]
        return tuple(best), tuple(self.logprob(prefix, token) for token in best)

    def sample(
        self, prefix: int, params: SamplingParams, path: int, position: int, context: Sequence[int], generated: Sequence[int]
    ) -> int:
        """The token at `position`. With penalties it depends on the whole context, as a penalty would."""
        drawn = mix(prefix, 1)
        if params.temperature >= GREEDY_BELOW:
            drawn = mix(mix(mix(mix(prefix, 2), params.seed & _MASK), path), position)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            drawn = mix(drawn, identity([*context, -1 & _MASK, *generated]))
        token = drawn % self.vocab_size
        while len(generated) < params.min_tokens and token in params.banned_until_min:
            token = (token + 1) % self.vocab_size
        return token

    def forced(self, params: SamplingParams, token: int) -> list[int]:
        """What a grammar dictates after `token`: up to two more. None where logprobs are wanted."""
        if params.grammar is None or params.num_top_logprobs is not None:
            return []
        return [(token * 7 + i) % self.vocab_size for i in range(token % 3)]

    def is_grammar_done(self, params: SamplingParams, num_generated: int) -> bool:
        """A grammar's source is "length" or "length:refusals"; see `FakeWorker`."""
        return params.grammar is not None and num_generated >= int(params.grammar.source.split(":")[0])

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, path: int, max_tokens: int
    ) -> tuple[list[int], str, int | None]:
        """What a request must produce, alone and without a cache: (tokens, finish reason, matched stop token)."""
        generated: list[int] = []
        prefix = identity(prompt)
        while len(generated) < max_tokens:
            token = self.sample(prefix, params, path, len(prompt) + len(generated), prompt, generated)
            run = [token, *self.forced(params, token)]
            is_done = self.is_grammar_done(params, len(generated) + len(run))
            for token in run:
                if len(generated) == max_tokens:
                    break
                if token in params.stop_token_ids:
                    return generated, "stop", token
                generated.append(token)
                prefix = mix(prefix, token)
            else:
                if is_done:
                    return generated, "stop", None
        return generated, "length", None


# ---------------------------------------------------------------- the worker


@dataclass(slots=True)
class _Slot:
    start: SlotStart
    pages: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    refusals: int = 0


TOLD_TO_FAIL = Error("internal_error", "told to fail")


class FakeWorker:
    """Carries out plans as the real one does, in order. Sees what a plan says and nothing else.

    A grammar with source "5:2" is done after five tokens, and answers the first two requests for a token with none, as if
    it were still being compiled. `fail` may name slots of a plan that are to fail, with the error `failure`.
    """

    def __init__(
        self, *, num_pages: int = 64, page_size: int = 4, max_slots: int = 8, vocab_size: int = 16,
        context_length: int = 256, shares_logits: bool = True, fail: Callable[[StepPlan], Sequence[int]] | None = None,
        failure: Error = TOLD_TO_FAIL,
    ) -> None:  # fmt: skip
        self.model = FakeModel(vocab_size)
        self.num_pages, self.page_size, self.max_slots = num_pages, page_size, max_slots
        self.context_length, self.shares_logits = context_length, shares_logits
        self.slots: dict[int, _Slot] = {}
        self.last_step_id = 0
        self.num_computed = 0  # tokens, over all steps
        self._fail, self.failure = fail, failure
        self._identity = np.zeros((num_pages, page_size), np.uint64)
        self._tokens = np.zeros((num_pages, page_size), np.int64)

    def ready(self) -> WorkerReady:
        return WorkerReady(
            num_pages=self.num_pages, page_size=self.page_size, max_slots=self.max_slots,
            vocab_size=self.model.vocab_size, context_length=self.context_length, load_report="fake",
            shares_logits=self.shares_logits,
        )  # fmt: skip

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id > self.last_step_id, f"step {plan.step_id} comes after step {self.last_step_id}"
        self.last_step_id = plan.step_id
        for slot in plan.ends:
            del self.slots[slot]
        for start in plan.starts:
            assert start.slot not in self.slots, f"slot {start.slot} is taken twice"
            self.slots[start.slot] = _Slot(start, generated=as_ints(start.generated).tolist())
        self._prepare_pages(plan)
        step = _Step(self, plan)
        step.check_reads()
        step.write()
        return step.sample(set(self._fail(plan)) if self._fail is not None else set())

    def _prepare_pages(self, plan: StepPlan) -> None:
        fresh = as_ints(plan.fresh_pages)
        self._identity[fresh] = 0
        for src, dst in zip(as_ints(plan.copy_src).tolist(), as_ints(plan.copy_dst).tolist()):
            assert src != dst, f"page {src} is copied over itself"
            self._identity[dst] = self._identity[src]
            self._tokens[dst] = self._tokens[src]


class _Step:
    """One plan in the works."""

    def __init__(self, worker: FakeWorker, plan: StepPlan) -> None:
        self.w, self.plan = worker, plan
        self.slots = as_ints(plan.slots).tolist()
        n = len(self.slots)
        assert len(set(self.slots)) == n, f"a slot has two rows: {self.slots}"
        self.num_new = as_ints(plan.num_new).tolist()
        self.first_pos = as_ints(plan.first_pos).tolist()
        self.feedback = as_ints(plan.feedback).tolist()
        self.sample_flags = as_ints(plan.sample).tolist()
        self.asks_logprobs = as_ints(plan.prompt_logprobs).tolist() or [0] * n
        self.next_ids = as_ints(plan.next_ids).tolist() or [-1] * n
        self.logits_of = as_ints(plan.logits_of).tolist() or list(range(n))
        self.trees = {tree.row: tree for tree in plan.trees}
        self.tokens: list[list[int]] = []
        self.prefixes: list[list[int]] = []  # identity after each new token of the row
        self.before: list[int] = []  # identity before the row's first token
        columns = (self.num_new, self.first_pos, self.feedback, self.sample_flags, self.asks_logprobs, self.next_ids)
        assert all(len(column) == n for column in columns), "columns of different lengths"
        self._take_tables()
        self._take_tokens()

    def _take_tables(self) -> None:
        keep, counts = as_ints(self.plan.page_keep).tolist(), as_ints(self.plan.page_counts).tolist()
        page_ids, at = as_ints(self.plan.page_ids).tolist(), 0
        for slot, kept, count in zip(self.slots, keep, counts):
            pages = self.w.slots[slot].pages
            assert kept <= len(pages), f"slot {slot} keeps {kept} of {len(pages)} pages"
            pages[kept:] = page_ids[at : at + count]
            at += count
        assert at == len(page_ids), f"{len(page_ids)} page ids, {at} are somebody's"

    def _take_tokens(self) -> None:
        ids, at = as_ints(self.plan.token_ids).tolist(), 0
        for row, slot in enumerate(self.slots):
            state, first, n = self.w.slots[slot], self.first_pos[row], self.num_new[row]
            if self.feedback[row]:
                assert n == 1, f"row {row} feeds {n} tokens back"
                assert state.start.params.grammar is None, f"slot {slot} has a grammar and must wait for its result"
                index = first - state.start.prompt_len
                assert 0 <= index < len(state.generated), f"slot {slot} has not sampled position {first}"
                self.tokens.append([state.generated[index]])
            else:
                self.tokens.append(ids[at : at + n])
                at += n
        assert at == len(ids), f"{len(ids)} token ids, {at} are somebody's"

    # ------------------------------------------------------------ KV

    def check_reads(self) -> None:
        """Every row finds its own prefix: written, and an unbroken chain from the first token."""
        for row, slot in enumerate(self.slots):
            if not self.num_new[row]:
                self.before.append(0)
                continue
            first = self.first_pos[row]
            identities, tokens = self._read(self.w.slots[slot].pages, first, slot)
            if first:
                chain = np.concatenate([np.array([_EMPTY], np.uint64), identities[:-1]])
                broken = np.flatnonzero(mix_all(chain, tokens) != identities)
                assert not len(broken), f"slot {slot} reads a foreign token at position {broken[0]} (step {self.plan.step_id})"
            self.before.append(int(identities[-1]) if first else _EMPTY)
        self._check_groups()

    def _read(self, pages: list[int], stop: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.w.page_size
        num_pages = -(-stop // size)
        assert num_pages <= len(pages), f"slot {slot} reads {stop} positions from {len(pages)} pages"
        chosen = np.array(pages[:num_pages], np.int64)
        identities = self.w._identity[chosen].reshape(-1)[:stop]
        missing = np.flatnonzero(identities == 0)
        assert not len(missing), f"slot {slot} reads position {missing[0]}, which nobody wrote (step {self.plan.step_id})"
        return identities, self.w._tokens[chosen].reshape(-1)[:stop]

    def _check_groups(self) -> None:
        size, last = self.w.page_size, 0
        for group in self.plan.groups:
            assert last <= group.first_row < group.last_row - 1, f"{group} overlaps, or has one row"
            last = group.last_row
            assert group.num_tokens % size == 0 and group.num_tokens > 0, f"{group} is not whole pages"
            rows = range(group.first_row, group.last_row)
            tables = {tuple(self.w.slots[self.slots[r]].pages[: group.num_tokens // size]) for r in rows}
            assert len(tables) == 1, f"{group}: rows do not hold the same pages"
            assert all(self.first_pos[r] >= group.num_tokens for r in rows), f"{group}: a row writes into it"

    def write(self) -> None:
        size = self.w.page_size
        readable = self._readable()
        written: set[tuple[int, int]] = set()
        for row, slot in enumerate(self.slots):
            parents = self._parents(row)
            prefixes: list[int] = []
            for i, token in enumerate(self.tokens[row]):
                prefixes.append(mix(parents(i, prefixes), token))
                position = self.first_pos[row] + i
                page = self.w.slots[slot].pages[position // size]
                place = (page, position % size)
                readers = readable.get(place, set()) - {slot}
                assert not readers, f"slot {slot} writes position {position}, which slots {readers} read"
                assert place not in written, f"two rows write {place}"
                written.add(place)
                self.w._identity[place] = prefixes[-1]
                self.w._tokens[place] = token
            self.prefixes.append(prefixes)
            self.w.num_computed += self.num_new[row]

    def _readable(self) -> dict[tuple[int, int], set[int]]:
        """(page, offset) -> slots whose rows read it in this step. (What a later step reads, it checks itself.)"""
        size, found = self.w.page_size, dict[tuple[int, int], set[int]]()
        for row, slot in enumerate(self.slots):
            pages = self.w.slots[slot].pages
            for position in range(self.first_pos[row] if self.num_new[row] else 0):
                found.setdefault((pages[position // size], position % size), set()).add(slot)
        return found

    def _parents(self, row: int) -> Callable[[int, list[int]], int]:
        """The identity that new token i of the row continues."""
        before, tree = self.before[row], self.trees.get(row)
        parents = as_ints(tree.parents).tolist() if tree is not None else []
        trunk = self.num_new[row] - len(parents)
        assert tree is None or trunk >= 1, f"row {row} is a tree without a token before it"

        def parent(i: int, prefixes: list[int]) -> int:
            if i < trunk:
                return prefixes[i - 1] if i else before
            node = parents[i - trunk]
            assert node < i - trunk, f"node {i - trunk} comes before its parent {node}"
            return prefixes[trunk + node] if node >= 0 else prefixes[trunk - 1]

        return parent

    # ------------------------------------------------------------ results

    def sample(self, doomed: set[int]) -> StepResult:
        slots, counts, ids, done = [], [], [], []
        logprobs: list[SlotLogprobs] = []
        for row, slot in enumerate(self.slots):
            if not self.sample_flags[row] or slot in doomed:
                continue
            state = self.w.slots[slot]
            if self._refuses(state):
                continue
            run = self._draw(row, state)
            slots.append(slot)
            counts.append(len(run))
            ids += run
            done.append(self.w.model.is_grammar_done(state.start.params, len(state.generated)))
            if state.start.params.num_top_logprobs is not None:
                logprobs.append(SlotLogprobs(slot, self._logprobs([self._last(row)], run, state)))
        return StepResult(
            step_id=self.plan.step_id, slots=ints(slots), counts=ints(counts), token_ids=ints(ids), grammar_done=ints(done),
            logprobs=tuple(logprobs), prompt_logprobs=self._prompt_logprobs(),
            errors=tuple(RowError(slot, self.w.failure) for slot in sorted(doomed)),
            **self._scores(),  # type: ignore[arg-type]  # two fields of tuples
        )  # fmt: skip

    def _refuses(self, state: _Slot) -> bool:
        grammar = state.start.params.grammar
        if grammar is None or ":" not in grammar.source or state.refusals >= int(grammar.source.split(":")[1]):
            return False
        state.refusals += 1
        return True

    def _last(self, row: int) -> int:
        """Identity of the prefix whose logits the row samples from."""
        host = self.logits_of[row]
        assert (host == row) == (self.num_new[row] > 0), f"row {row} computes {self.num_new[row]} tokens and samples from {host}"
        assert host not in self.trees, f"row {row} samples from a tree"
        return self.prefixes[host][-1]

    def _draw(self, row: int, state: _Slot) -> list[int]:
        params, prompt_len = state.start.params, state.start.prompt_len
        position = self.first_pos[row] + self.num_new[row]
        # A row that is planned again draws again; what came of the first try is void.
        del state.generated[position - prompt_len :]
        assert position == prompt_len + len(state.generated), f"position {position} is sampled before those in front of it"
        context = as_ints(state.start.context).tolist()
        token = self.w.model.sample(self._last(row), params, state.start.path, position, context, state.generated)
        run = [token, *self.w.model.forced(params, token)]
        state.generated += run
        return run

    def _logprobs(self, prefixes: list[int], tokens: list[int], state: _Slot) -> TokenLogprobs:
        model, k = self.w.model, state.start.params.num_top_logprobs or 0
        return TokenLogprobs(
            tuple(tokens),
            tuple(model.logprob(prefix, token) for prefix, token in zip(prefixes, tokens)),
            tuple(model.tops(prefix, k) for prefix in prefixes),
        )

    def _prompt_logprobs(self) -> tuple[SlotLogprobs, ...]:
        found = []
        for row, slot in enumerate(self.slots):
            if self.asks_logprobs[row]:
                following = [*self.tokens[row][1:], *([self.next_ids[row]] if self.next_ids[row] >= 0 else [])]
                prefixes = self.prefixes[row][: len(following)]
                found.append(SlotLogprobs(slot, self._logprobs(prefixes, following, self.w.slots[slot])))
        return tuple(found)

    def _scores(self) -> dict[str, tuple[bytes, ...]]:
        logprobs, greedy = [], []
        for tree in self.plan.trees:
            prefixes = self.prefixes[tree.row]
            trunk = len(prefixes) - len(as_ints(tree.parents))
            pairs = [
                (prefixes[trunk + node], token)
                for node, token in zip(as_ints(tree.target_nodes).tolist(), as_ints(tree.target_token_ids).tolist())
            ]
            logprobs.append(np.array([self.w.model.logprob(p, t) for p, t in pairs], "<f4").tobytes())
            greedy.append(np.array([self.w.model.greedy(p) == t for p, t in pairs], np.uint8).tobytes())
        return {"score_logprobs": tuple(logprobs), "score_is_greedy": tuple(greedy)}


# ---------------------------------------------------------------- worker, clock and scheduler together


class FakeEngine:
    """A scheduler, a `FakeWorker` and a `VirtualClock`. A message sent is taken by the next `tick`; so is a finished step's result."""

    def __init__(self, scheduler: object, worker: FakeWorker, clock: VirtualClock | None = None) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.clock = clock or VirtualClock()
        self.inbox: list[ToScheduler | StepResult] = []
        self.plans: deque[StepPlan] = deque()
        self.events: list[FromScheduler] = []
        self.decision: object = None
        self.num_ticks = 0

    def send(self, *messages: ToScheduler) -> None:
        self.inbox += messages

    def tick(self, *, works: bool = True, seconds: float = 0.001) -> list[FromScheduler]:
        """One step of the scheduler. `works`: then the worker carries out the oldest plan it has; returns the new events."""
        self.clock.advance(seconds)
        inbox, self.inbox = self.inbox, []
        decision = self.scheduler.step(self.clock(), inbox)  # type: ignore[attr-defined]  # any scheduler: no import, no cycle
        self.decision = decision
        self.num_ticks += 1
        self.events += decision.outbox
        if decision.plan is not None:
            self.plans.append(decision.plan)
        if works and self.plans:
            self.inbox.append(self.worker.execute(self.plans.popleft()))
        return decision.outbox

    def run_until_idle(self, max_ticks: int = 10_000) -> list[FromScheduler]:
        """Tick until nothing is left to do; returns the events since the call."""
        first = len(self.events)
        for _ in range(max_ticks):
            self.tick()
            if not self.inbox and not self.plans and self.scheduler.is_idle:  # type: ignore[attr-defined]
                return self.events[first:]
        raise AssertionError(f"not idle after {max_ticks} ticks: {self.decision}")
