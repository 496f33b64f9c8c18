"""The tokenizer service over the real scheduler and a worker without a model, in one thread and virtual time."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from support.tokenizers import TokenizerFiles, byte_bpe_tokenizer, puppet_tokenizer

from anabranch.runtime.config import CacheConfig, LimitsConfig, SchedulerConfig
from anabranch.runtime.messages import (
    Delta,
    Failed,
    Grammar,
    Hello,
    SamplingParams,
    SchedulerReady,
    StepResult,
    ToClient,
    ToTokenizer,
    Welcome,
)
from anabranch.runtime.scheduler.policy import Policy
from anabranch.runtime.scheduler.scheduler import Scheduler
from anabranch.runtime.testing import FakeModel, FakeWorker, VirtualClock
from anabranch.runtime.tokenizer.service import ModelSide, TokenizerService
from anabranch.runtime.tokenizer.templates import ChatTemplate
from anabranch.runtime.tokenizer.turns import TurnTexts
from anabranch.runtime.tokenizer.vocabulary import Vocabulary


def vocabulary_of(files: TokenizerFiles) -> Vocabulary:
    bos = files.config.get("bos_token")
    return Vocabulary(
        files.tokenizer, bos_token_id=files.id(bos) if bos else None, eos_token_ids=[files.eos_id],
        special_names=[files.config["eos_token"]],
    )  # fmt: skip


class ScriptModel(FakeModel):
    """Says the same ids after any prompt, then its `end` for ever. Scores and logprobs are the fake model's."""

    def __init__(self, vocab_size: int, script: Sequence[int], end: int) -> None:
        super().__init__(vocab_size)
        object.__setattr__(self, "script", list(script))  # the base class is frozen
        object.__setattr__(self, "end", end)

    def sample(
        self, prefix: int, params: SamplingParams, path: int, position: int, context: Sequence[int], generated: Sequence[int]
    ) -> int:
        script: list[int] = self.script  # type: ignore[attr-defined]
        end: int = self.end  # type: ignore[attr-defined]
        return script[len(generated)] if len(generated) < len(script) else end


class Desk:
    """What a test drives: messages in, answers out, and everything in between run to its end, or step by step.

    script     what the model says, a token a piece; None: the fake model's own hash of the prefix
    grammars   what stands in for the grammar check
    """

    def __init__(
        self,
        files: TokenizerFiles | None = None,
        *,
        script: Sequence[str | bytes] | None = None,
        num_pages: int = 256,
        context: int = 512,
        limits: LimitsConfig | None = None,
        grammars: Callable[[Grammar], None] | None = None,
        max_slots: int = 8,
    ) -> None:
        self.script: list[int] = []
        if script is not None:
            files, self.script = puppet_tokenizer(script)
        self.files = files or byte_bpe_tokenizer()
        self.vocabulary = vocabulary_of(self.files)
        size = self.vocabulary.vocab_size
        self.worker = FakeWorker(num_pages=num_pages, vocab_size=size, context_length=context, max_slots=max_slots)
        if script is not None:
            self.worker.model = ScriptModel(size, self.script, self.files.eos_id)
        ready = self.worker.ready()
        self.scheduler = Scheduler(
            SchedulerConfig(max_slots=max_slots, tokens_per_step=64), ready, cache=CacheConfig(page_size=4),
            policy=Policy(raise_errors=True),
        )  # fmt: skip
        self.clock = VirtualClock()
        template = self.files.config.get("chat_template")
        turns = None
        if template is not None:
            named = {"bos_token": self.files.config.get("bos_token", ""), "eos_token": self.files.config["eos_token"]}
            turns = TurnTexts(ChatTemplate(template, named_tokens=named, special=self.vocabulary.special))
        self.jobs: deque[tuple[str, int, Callable[[], Any]]] = deque()
        self.service = TokenizerService(
            ModelSide("fake", self.vocabulary, turns, grammars),
            SchedulerReady(ready.num_pages, ready.page_size, ready.vocab_size, ready.context_length),
            offload=lambda lane, job_id, work: self.jobs.append((lane, job_id, work)),
            clock=self.clock,
            limits=limits,
        )
        self.answers: dict[int, list[ToClient]] = {}
        self._results: list[StepResult] = []

    # ------------------------------------------------------------ driving

    def say(self, *messages: ToTokenizer, client: int = 1) -> None:
        """Hand messages over; nothing runs yet."""
        if client not in self.service.clients and not any(isinstance(m, Hello) for m in messages):
            self.service.handle(client, Hello())
        for message in messages:
            self.service.handle(client, message)
        self._collect()

    def tick(self, seconds: float = 0.001) -> bool:
        """One turn of the loop; True if anything happened."""
        self.clock.advance(seconds)
        self.service.poll(self.clock())
        inbox, self.service.to_scheduler = self.service.to_scheduler, []
        results, self._results = self._results, []
        decision = self.scheduler.step(self.clock(), [*inbox, *results])
        for message in decision.outbox:
            self.service.on_scheduler(message)
        if decision.plan is not None:
            self._results.append(self.worker.execute(decision.plan))
        self._collect()
        return bool(inbox or results or decision.outbox or decision.plan or self.service.to_scheduler)

    def work(self) -> None:
        """Do the offloaded work that waits now."""
        for _ in range(len(self.jobs)):
            _, job_id, work = self.jobs.popleft()
            try:
                result = work()
            except Exception as fault:
                result = fault
            self.service.on_job(job_id, result)
        self._collect()

    def run(self, max_ticks: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_ticks):
            self.work()
            if not self.tick() and not self.jobs and self.scheduler.is_idle:
                return
        raise AssertionError(f"not idle after {max_ticks} ticks: {self.service.stats()}")

    def _collect(self) -> None:
        events, self.service.to_clients = self.service.to_clients, []
        for client, message in events:
            self.answers.setdefault(client, []).append(message)

    # ------------------------------------------------------------ looking

    def ask(self, *messages: ToTokenizer, client: int = 1) -> Any:
        """Hand over, run, and return the answer of the last message."""
        self.say(*messages, client=client)
        self.run()
        return self.answer(messages[-1].op, client=client)  # type: ignore[union-attr]

    def all_answers(self, op: int, client: int = 1) -> list[ToClient]:
        return [m for m in self.answers.get(client, []) if not isinstance(m, Welcome) and getattr(m, "op", None) == op]

    def answer(self, op: int, client: int = 1) -> Any:
        """The one answer of an operation."""
        final = [m for m in self.all_answers(op, client) if not isinstance(m, Delta)]
        assert len(final) == 1, f"operation {op} has {len(final)} answers: {final}"
        return final[0]

    def error(self, op: int, client: int = 1) -> str:
        answer = self.answer(op, client)
        assert isinstance(answer, Failed), f"operation {op} did not fail: {answer}"
        return answer.error.message

    def assert_nothing_is_left(self) -> None:
        """After everybody closed what they had: no record in any stage, every page free or cached."""
        self.run()
        stats = self.service.stats()
        for name in ("branches", "programs", "operations", "labelled_operations", "awaited", "deadlines"):
            assert stats[name] == 0, f"{name}: {stats}"
        state = self.scheduler.state
        assert not len(state.branches) and not state.requests and not state.queued and not state.slots.used
        assert state.manager.num_locked() == 0 and state.manager.num_in_use() == 0
        from anabranch.radix import invariants

        invariants.check(state.manager)
