"""A client of the scheduler that does everything at random, and knows what must come of it.

It mirrors every branch as a plain list of tokens with a path, and computes each answer alone, without a cache, from the fake
model. So whatever the scheduler does about pages, preemption, chunks, forks and pipelines, its answers must be these.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from anabranch.radix.invariants import check
from anabranch.runtime.config import SchedulerConfig
from anabranch.runtime.messages import (
    AbortRequests,
    CloseBranches,
    Finished,
    ForkBranch,
    FromScheduler,
    Grammar,
    JoinBranch,
    LeaseBranch,
    OpenBranch,
    Produced,
    QueryStats,
    Refused,
    RollbackBranch,
    SamplingParams,
    StatsReply,
    StopAt,
    Submit,
    SubmitScore,
    TokenLogprobs,
    ToScheduler,
    ints,
)
from anabranch.runtime.scheduler.headroom import Headroom
from anabranch.runtime.scheduler.paths import child_path, retry_path
from anabranch.runtime.scheduler.policy import Policy
from anabranch.runtime.scheduler.scheduler import Scheduler
from anabranch.runtime.testing import FakeEngine, FakeWorker, identity


@dataclass
class Mirror:
    """A branch as it must be once everything sent so far has been carried out up to `queue`."""

    branch_id: int
    program_id: int
    tokens: list[int] = field(default_factory=list)
    path: int = 0
    num_forked: int = 0
    num_retries: int = 0
    running: "Ask | None" = None
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    is_open: bool = True  # the client has not closed it
    is_made: bool = True  # the fork that makes it has been carried out

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.queue and self.is_made and self.is_open


@dataclass
class Ask:
    """A request, what was sent, and what must come back."""

    message: Submit | SubmitScore
    mirror: Mirror
    before: list[int] = field(default_factory=list)  # the branch's tokens before the request
    prompt: list[int] = field(default_factory=list)
    expected: tuple[list[int], str, int | None] = ([], "", None)
    produced: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    stop_at: int | None = None
    may_end_early: bool = False  # aborted, or its branch closed
    has_begun: bool = False  # as far as the mirror knows: its turn on the branch has come


class Optimistic(Headroom):
    """Expects every output to end at once: admission lets everybody in, and many are preempted."""

    def expect(self, generated: np.ndarray, limit: np.ndarray) -> np.ndarray:
        return np.zeros(len(generated), np.int64)


class Client:
    """Sends, receives and checks. One `tick` of the engine at a time."""

    def __init__(
        self, seed: int, *, num_pages: int, page_size: int, depth: int, budget: int, max_slots: int = 6,
        vocab_size: int = 5, context_length: int = 96, policy: Policy | None = None, check_each: bool = True,
        is_optimistic: bool = False,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.worker = FakeWorker(
            num_pages=num_pages, page_size=page_size, max_slots=max_slots, vocab_size=vocab_size,
            context_length=context_length, shares_logits=seed % 3 != 0,
        )  # fmt: skip
        policy = policy or Policy(pipeline_depth=depth, raise_errors=True, min_shared_tokens=page_size, fair_quantum=64)
        config = SchedulerConfig(max_slots=max_slots, tokens_per_step=budget)
        self.scheduler = Scheduler(config, self.worker.ready(), policy=policy)
        self.engine = FakeEngine(self.scheduler, self.worker)
        self.mirrors: dict[int, Mirror] = {}
        self.asks: dict[int, Ask] = {}
        self.num_ids = 0
        self.ended: dict[str, int] = {}
        self.check_each = check_each
        if is_optimistic:
            self.scheduler.state.headroom = Optimistic()

    def new_id(self) -> int:
        self.num_ids += 1
        return self.num_ids

    # ------------------------------------------------------------ doing things

    def act(self) -> None:
        """One random thing."""
        rng = self.random
        idle = [m for m in self.mirrors.values() if m.is_idle]
        busy = [m for m in self.mirrors.values() if m.is_open and m.is_made and not m.is_idle]
        options: list[tuple[int, Callable[[], None]]] = [(2 if len(self.mirrors) < 14 else 0, self.open)]
        if idle:
            mirror = rng.choice(idle)
            options += [
                (8, lambda: self.submit(mirror)),
                (2, lambda: self.score(mirror)),
                (3 if len(self.mirrors) < 20 else 0, lambda: self.fork(mirror)),
                (2, lambda: self.rollback(mirror)),
                (1, lambda: self.lease(mirror)),
                (2 if len(self.mirrors) < 18 else 0, lambda: self.burst(mirror)),
                (2, lambda: self.close([mirror])),
            ]
            kin = [m for m in idle if m is not mirror]
            if kin:
                winner = rng.choice(kin)
                options.append((1, lambda: self.join(mirror, winner)))
        if busy:
            other = rng.choice(busy)
            options += [
                (1, lambda: self.submit(other)),
                (1 if len(self.mirrors) < 20 else 0, lambda: self.fork(other)),
                (1, lambda: self.close([other])),
            ]
        live = list(self.asks.values())
        if live:
            ask = rng.choice(live)
            options += [(1, lambda: self.abort([ask])), (2, lambda: self.stop(ask))]
            options.append((0.1, lambda: self.abort_program(ask.mirror.program_id)))  # type: ignore[arg-type]
        options.append((0.3, self.nonsense))  # type: ignore[arg-type]
        options.append((0.2, self.lose_worker))  # type: ignore[arg-type]
        weights, actions = zip(*options)
        rng.choices(actions, weights)[0]()

    def send(self, *messages: ToScheduler) -> None:
        self.engine.send(*messages)

    def open(self, tokens: list[int] | None = None) -> Mirror:
        mirror = Mirror(self.new_id(), program_id=self.random.randint(1, 3))
        self.mirrors[mirror.branch_id] = mirror
        self.send(OpenBranch(mirror.branch_id, mirror.program_id, b"tenant", priority=self.random.choice([0, 0, 0, 1])))
        return mirror

    def some_tokens(self, most: int) -> list[int]:
        """Few letters and few beginnings, so that prefixes collide."""
        rng = self.random
        start = rng.choice([[0, 1, 2, 3] * 5, [3, 2] * 8, [1] * 7, []])
        tail = [rng.randrange(self.worker.model.vocab_size) for _ in range(rng.choice([0, 1, 2, 5, 9]))]
        return (start[: rng.choice([0, len(start), len(start)])] + tail)[:most]

    def some_params(self) -> SamplingParams:
        rng = self.random
        kind = rng.random()
        stop = (0,) if rng.random() < 0.6 else ()
        if kind < 0.15:
            source = f"{rng.randint(1, 8)}:{rng.choice([0, 0, 2])}"
            return SamplingParams(temperature=0.7, seed=rng.randint(0, 9), stop_token_ids=stop, grammar=Grammar("regex", source))
        if kind < 0.3:
            return SamplingParams(temperature=0.0, repetition_penalty=1.2, stop_token_ids=stop)
        if kind < 0.45:
            return SamplingParams(seed=rng.randint(0, 9), num_top_logprobs=rng.choice([0, 2]), stop_token_ids=stop)
        if kind < 0.55:
            return SamplingParams(seed=3, min_tokens=3, banned_until_min=(0,), stop_token_ids=(0,))
        return SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=rng.randint(0, 9), stop_token_ids=stop)

    def submit(self, mirror: Mirror, tokens: list[int] | None = None, max_tokens: int | None = None,
               params: SamplingParams | None = None) -> "Ask":  # fmt: skip
        rng = self.random
        wants_prompt_logprobs = rng.random() < 0.15 and tokens is None
        params = params or self.some_params()
        message = Submit(
            self.new_id(), mirror.branch_id, ints(self.some_tokens(30) if tokens is None else tokens),
            max_tokens=rng.choice([0, 1, 3, 8, 20]) if max_tokens is None else max_tokens,
            params=params,
            prompt_logprobs_from=rng.choice([0, 1, 5, 17]) if wants_prompt_logprobs else None,
            deadline=self.engine.clock() + rng.choice([0.002, 0.02]) if rng.random() < 0.05 and tokens is None else None,
        )  # fmt: skip
        return self._ask(message, mirror)

    def score(self, mirror: Mirror) -> "Ask":
        rng = self.random
        choices = [[rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 3, 6]))] for _ in range(rng.randint(1, 5))]
        message = SubmitScore(self.new_id(), mirror.branch_id, ints(self.some_tokens(12)), tuple(map(ints, choices)))
        return self._ask(message, mirror)

    def _ask(self, message: Submit | SubmitScore, mirror: Mirror) -> Ask:
        ask = Ask(message, mirror)
        self.asks[message.request_id] = ask
        self.send(message)
        self._then(mirror, lambda: self._begin(ask))
        return ask

    def fork(self, mirror: Mirror, n: int | None = None) -> list[Mirror]:
        ids = [self.new_id() for _ in range(self.random.randint(1, 3) if n is None else n)]
        self.send(ForkBranch(mirror.branch_id, tuple(ids)))
        children = [Mirror(branch_id, mirror.program_id, is_made=False) for branch_id in ids]
        self.mirrors |= {child.branch_id: child for child in children}

        def make() -> None:
            for child in children:
                child.tokens, child.is_made = list(mirror.tokens), True
                child.path = child_path(mirror.path, mirror.num_forked)
                mirror.num_forked += 1

        self._then(mirror, make)
        return children

    def burst(self, mirror: Mirror) -> None:
        """Siblings that go on from one and the same prompt, as in a search."""
        for child in self.fork(mirror, self.random.randint(2, 4)):
            self.submit(child, tokens=[], max_tokens=self.random.choice([1, 6, 15]))

    def rollback(self, mirror: Mirror) -> None:
        length = self.random.randint(0, len(mirror.tokens))
        self.send(RollbackBranch(mirror.branch_id, length))
        if length < len(mirror.tokens):
            del mirror.tokens[length:]
            mirror.path = retry_path(mirror.path, mirror.num_retries)
            mirror.num_retries += 1

    def join(self, mirror: Mirror, winner: Mirror) -> None:
        self.send(JoinBranch(mirror.branch_id, winner.branch_id))
        mirror.tokens, mirror.path = winner.tokens, winner.path
        mirror.num_forked, mirror.num_retries = winner.num_forked, winner.num_retries
        winner.is_open = False
        del self.mirrors[winner.branch_id]

    def lease(self, mirror: Mirror) -> None:
        until = self.random.choice([None, self.engine.clock() + 0.01, self.engine.clock() + 0.1])
        self.send(LeaseBranch(mirror.branch_id, until))

    def close(self, mirrors: list[Mirror]) -> None:
        self.send(CloseBranches(tuple(m.branch_id for m in mirrors), superseded=self.random.random() < 0.5))
        for mirror in mirrors:
            mirror.is_open = False
            del self.mirrors[mirror.branch_id]
            for ask in self.asks.values():
                ask.may_end_early |= ask.mirror is mirror

    def abort(self, asks: list[Ask]) -> None:
        self.send(AbortRequests(request_ids=tuple(ask.message.request_id for ask in asks)))
        for ask in asks:
            ask.may_end_early = True

    def abort_program(self, program_id: int) -> None:
        self.send(AbortRequests(program_ids=(program_id,)))
        for ask in self.asks.values():
            ask.may_end_early |= ask.mirror.program_id == program_id

    def stop(self, ask: Ask) -> None:
        if ask.stop_at is None and ask.produced and isinstance(ask.message, Submit) and not ask.mirror.queue:
            ask.stop_at = self.random.randint(0, len(ask.produced))
            self.send(StopAt(ask.message.request_id, ask.stop_at))

    def nonsense(self) -> None:
        """Late and unknown ids: dropped, or refused, and nobody else notices."""
        unknown = 10**6 + self.new_id()
        self.send(
            StopAt(unknown, 1), AbortRequests((unknown,)), RollbackBranch(unknown, 0), JoinBranch(unknown, unknown + 1),
            LeaseBranch(unknown, None), CloseBranches((unknown,)), ForkBranch(unknown, (unknown + 1,)),
        )  # fmt: skip

    def lose_worker(self) -> None:
        """The worker dies with what it was doing; a result that it had sent may still arrive."""
        worker = self.worker
        self.worker = self.engine.worker = FakeWorker(
            num_pages=worker.num_pages, page_size=worker.page_size, max_slots=worker.max_slots,
            vocab_size=worker.model.vocab_size, context_length=worker.context_length, shares_logits=worker.shares_logits,
        )  # fmt: skip
        self.engine.plans.clear()
        self.scheduler.restart(self.engine.clock(), self.worker.ready())

    # ------------------------------------------------------------ the mirror

    def _then(self, mirror: Mirror, effect: Callable[[], None]) -> None:
        """The effect on the mirror, now or when what is in front of it has ended."""
        mirror.queue.append(effect)
        self._advance(mirror)

    def _advance(self, mirror: Mirror) -> None:
        while mirror.running is None and mirror.queue:
            mirror.queue.popleft()()

    def _begin(self, ask: Ask) -> None:
        mirror, message = ask.mirror, ask.message
        if message.request_id not in self.asks:
            return  # it was refused while it was queued
        ask.has_begun = True
        ask.before = list(mirror.tokens)
        ask.prompt = ask.before + list(memory(message.token_ids))
        mirror.running = ask
        if isinstance(message, Submit):
            most = min(message.max_tokens, self.worker.context_length - len(ask.prompt))
            if ask.prompt and most >= 0:
                ask.expected = self.worker.model.generate(ask.prompt, message.params, mirror.path, most)

    # ------------------------------------------------------------ what comes back

    def tick(self, *, works: bool | None = None) -> None:
        works = self.random.random() < 0.8 if works is None else works
        for event in self.engine.tick(works=works, seconds=self.random.choice([0.0, 0.001])):
            self.receive(event)
        if self.check_each:
            check(self.scheduler.state.manager)

    def receive(self, event: FromScheduler) -> None:
        match event:
            case Produced():
                ask = self.asks[event.request_id]
                ask.produced += event.token_ids
                if isinstance(ask.message, Submit) and ask.message.params.num_top_logprobs is not None:
                    assert event.logprobs is not None and event.logprobs.token_ids == event.token_ids
                    ask.logprobs += event.logprobs.logprobs
            case Finished():
                self._finished(self.asks.pop(event.request_id), event)
            case Refused():
                self._refused(self.asks.pop(event.request_id), event)

    def _finished(self, ask: Ask, event: Finished) -> None:
        self.ended[event.reason] = self.ended.get(event.reason, 0) + 1
        tokens, reason, matched = ask.expected
        produced = ask.produced
        usage = event.usage
        assert produced == tokens[: len(produced)], f"request {event.request_id} produced {produced} instead of {tokens}"
        assert usage.prompt_tokens == len(ask.prompt) and usage.cached_tokens <= len(ask.prompt), usage
        if event.reason == "abort":
            assert ask.may_end_early, f"request {event.request_id} was not aborted"
            assert event.length == len(ask.prompt) + len(produced)
        elif isinstance(ask.message, SubmitScore):
            self._check_scores(ask, event)
        elif ask.stop_at is not None and event.length == len(ask.prompt) + ask.stop_at and event.reason == "stop":
            assert event.matched_token_id is None or event.matched_token_id == matched
        else:
            assert event.length == len(ask.prompt) + len(produced)
            if produced != tokens:  # the one other end: the whole pool is full of it
                assert event.reason == "length" and self._fills_pool(event.length), (ask, event)
            else:
                assert (event.reason, event.matched_token_id) == (reason, matched) or self._fills_pool(event.length)
            assert usage.completion_tokens == len(produced)
        if event.reason != "abort":
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens, usage
            self._check_logprobs(ask, event)
        length = event.length if ask.stop_at is None else min(event.length, len(ask.prompt) + ask.stop_at)
        self._end(ask, (ask.prompt + produced)[:length])

    def _fills_pool(self, length: int) -> bool:
        return length > (self.worker.num_pages - 1) * self.worker.page_size

    def _check_logprobs(self, ask: Ask, event: Finished) -> None:
        model, message = self.worker.model, ask.message
        if not isinstance(message, Submit):
            return
        if message.params.num_top_logprobs is not None:
            sequence = ask.prompt + ask.produced
            wanted = [model.logprob(identity(sequence[:i]), sequence[i]) for i in range(len(ask.prompt), len(sequence))]
            assert ask.logprobs == wanted
        if message.prompt_logprobs_from is not None and message.prompt_logprobs_from < len(ask.prompt):
            first = message.prompt_logprobs_from
            found: TokenLogprobs | None = event.prompt_logprobs
            assert found is not None and found.token_ids == tuple(ask.prompt[first:])
            values = [model.logprob(identity(ask.prompt[:i]), ask.prompt[i]) if i else None for i in range(first, len(ask.prompt))]
            assert found.logprobs == tuple(values) and len(found.tops) == len(values)
            assert event.usage.cached_tokens <= max(0, first - 1) or event.usage.num_preemptions

    def _check_scores(self, ask: Ask, event: Finished) -> None:
        assert isinstance(ask.message, SubmitScore) and event.length == len(ask.prompt)
        model = self.worker.model
        for choice, logprobs, greedy in zip(ask.message.choices, event.choice_logprobs, event.choice_is_greedy, strict=True):
            prefix = identity(ask.prompt)
            for token, logprob, is_greedy in zip(memory(choice), logprobs, greedy, strict=True):
                assert logprob == model.logprob(prefix, token) and is_greedy == (model.greedy(prefix) == token)
                prefix = identity([token], prefix)

    def _refused(self, ask: Ask, event: Refused) -> None:
        self.ended[event.error.type] = self.ended.get(event.error.type, 0) + 1
        assert ask.produced == ask.expected[0][: len(ask.produced)]
        kind, message = event.error.type, ask.message
        size = len(ask.prompt)
        assert kind != "internal_error", event
        if kind == "cancelled":
            assert ask.may_end_early, event
        elif kind == "timeout_error":
            assert message.deadline is not None and message.deadline <= self.engine.clock()
        elif event.error.code == "context_length_exceeded":
            assert size >= self.worker.context_length - 6
        elif event.error.code == "kv_capacity_exceeded":
            assert size + 6 >= self.worker.num_pages * self.worker.page_size
        else:
            assert kind == "invalid_request_error" and not ask.prompt, event
        self._end(ask, ask.before)

    def _end(self, ask: Ask, tokens: list[int]) -> None:
        mirror = ask.mirror
        if mirror.running is ask:
            mirror.tokens, mirror.running = tokens, None
            self._advance(mirror)

    # ------------------------------------------------------------ at rest

    def settle(self, max_ticks: int = 4000) -> None:
        """Let everything end."""
        for _ in range(max_ticks):
            self.tick(works=True)
            if not self.engine.inbox and not self.engine.plans and self.scheduler.is_idle:
                assert not self.asks, f"requests {list(self.asks)} have no end"
                return
        raise AssertionError(f"not idle after {max_ticks} ticks: {self.scheduler.state.line._members} {self.engine.decision}")

    def check_pool_is_exact(self) -> None:
        """O-pool: when idle, free and cached pages are all pages, no lock, no slot, no record."""
        self.engine.clock.advance(1000.0)
        self.send(QueryStats(self.new_id(), check=True))
        reply = next(event for event in self.engine.run_until_idle() if isinstance(event, StatsReply))
        stats = reply.stats
        assert stats["check"] == "ok", stats["check"]
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], stats  # type: ignore[operator]
        assert not any(stats[name] for name in ("pages_locked", "pages_in_use", "slots_in_use", "waiting", "requests")), stats
        assert not self.worker.slots, "the worker still has slots"
        state = self.scheduler.state
        assert not len(state.frontier) and not state.copies and not state.fresh and not state.queued
        assert stats["branches"] == len(self.mirrors)

    def close_everything(self) -> None:
        self.close(list(self.mirrors.values()))
        self.settle()
        self.check_pool_is_exact()
        state = self.scheduler.state
        assert not state.programs and not state.ended and not state.requests and not len(state.branches)


def memory(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
