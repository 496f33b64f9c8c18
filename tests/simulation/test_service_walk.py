"""Random clients against the tokenizer service and the real scheduler: one answer for every operation, and nothing left behind."""

import random
from collections import Counter

import pytest
from support.service import Desk

from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.messages import (
    Append,
    BranchOptions,
    Cancel,
    Close,
    Delta,
    Explain,
    FlushCache,
    Fork,
    Generate,
    GenerateParams,
    GetStats,
    GetTokens,
    Grammar,
    Join,
    Lease,
    Mark,
    Open,
    Prefill,
    RoleBegin,
    RoleEnd,
    Rollback,
    Score,
    Text,
    Tokenize,
    Tokens,
    TokensAre,
    ToTokenizer,
    as_ints,
)

WORDS = ["a", " river", " left", " its bed", "\n", "The quick", " brown", " fo", "x", "", " über", "🙂"]


class RandomClient:
    """Sends whatever comes to its mind, sense and nonsense; remembers what must be answered."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.rng, self.number = rng, number
        self.labels = 0
        self.branches: list[int] = []
        self.marks: dict[int, list[int]] = {}  # of each branch, those it was born with included
        self.ops: list[int] = []

    def label(self) -> int:
        self.labels += 1
        return self.labels

    def op(self) -> int:
        self.ops.append(self.label())
        return self.ops[-1]

    def branch(self) -> int:
        return self.rng.choice(self.branches) if self.branches and not self.is_nonsense() else 10**6

    def is_nonsense(self) -> bool:
        return self.rng.random() < 0.01

    def mark_of(self, branch: int) -> int:
        return self.rng.choice(self.marks.get(branch) or [0])

    def new_branches(self, n: int, parent: int = 0) -> tuple[int, ...]:
        labels = tuple(self.label() for _ in range(n))
        self.branches += labels
        self.marks |= {label: list(self.marks.get(parent, [])) for label in labels}
        return labels

    def params(self) -> GenerateParams:
        rng = self.rng
        return GenerateParams(
            max_tokens=rng.choice((0, 1, 3, 8, 30)), temperature=rng.choice((0.0, 1.0)), ignore_eos=rng.random() < 0.5,
            stop=rng.choice(((), ("e",), (" r", "x"))), stream=rng.random() < 0.5, seed=rng.choice((None, 5)),
            num_top_logprobs=rng.choice((None, None, 0, 2)), timeout_ms=rng.choice((*(None,) * 12, 3.0, 50.0)),
            min_tokens=99 if self.is_nonsense() else 0,
            grammar=Grammar("regex", "(") if self.is_nonsense() else rng.choice((None, None, Grammar("regex", "3:1"))),
            prompt_logprobs_from=rng.choice((None, None, 0)),
        )  # fmt: skip

    def segment(self) -> object:
        rng = self.rng
        if self.is_nonsense():
            return rng.choice([Tokens((-1,)), RoleBegin("user"), RoleEnd(), Text("x" * 5000)])
        return Tokens((5, 6, 7)) if rng.random() < 0.1 else Text(rng.choice(WORDS) * rng.choice((1, 1, 1, 40)))

    def message(self) -> ToTokenizer:
        rng, b = self.rng, self.branch()
        makers = {
            Open: 3, Append: 12, Generate: 8, Prefill: 2, Score: 2, Fork: 4, Mark: 4, Rollback: 3, Join: 3, Close: 5, Cancel: 2,
            GetTokens: 2, Explain: 1, Lease: 1, Tokenize: 1, GetStats: 1, FlushCache: 1,
        }  # fmt: skip
        kind = rng.choices(list(makers), list(makers.values()))[0]
        if kind is Rollback and not self.marks.get(b):
            kind = Mark
        if kind is Open or not self.branches:
            return Open(self.new_branches(1)[0], BranchOptions(rng.choice(("", "s")), None, rng.choice((0, 5)), rng.choice((0, 1))))
        if kind is Append:
            return Append(b, tuple(self.segment() for _ in range(rng.choice((1, 1, 2)))))  # type: ignore[arg-type]
        if kind is Generate:
            return Generate(self.op(), b, self.params())
        if kind is Prefill:
            return Prefill(self.op(), b, rng.choice((None, None, None, 5.0)))
        if kind is Score:
            method = rng.choice(("sum", "unconditional_likelihood_normalized", "greedy_token_selection"))
            choices = tuple(rng.choice(WORDS[:-3]) + "!" for _ in range(rng.choice((1, 3))))
            return Score(self.op(), b, choices, method, rng.random() < 0.5)  # type: ignore[arg-type]
        if kind is Fork:
            return Fork(b, self.new_branches(rng.choice((1, 2, 3)), b))
        if kind is Mark:
            self.marks.setdefault(b, []).append(self.label())
            return Mark(b, self.marks[b][-1])
        if kind is Join:
            drop = tuple(self.branch() for _ in range(rng.choice((0, 1))))
            sources = [self.branch() for _ in range(rng.choice((0, 1, 2)))]
            winner = self.branch() if rng.random() < 0.5 else None
            if winner is not None:
                self.marks[b] = list(self.marks.get(winner, []))
                if rng.random() < 0.7:  # else it goes on talking to what will be taken over
                    self.branches = [label for label in self.branches if label != winner]
            return Join(b, winner, tuple((s, self.mark_of(s)) for s in sources if self.marks.get(s)), drop)
        if kind is Close:
            self.branches = [label for label in self.branches if label != b]
            return Close((b,), rng.random() < 0.5)
        if kind is Cancel:
            return rng.choice((Cancel(tuple(self.ops[-2:])), Cancel(branches=(b,)), Cancel(programs=(1,))))
        if kind is Tokenize:
            return Tokenize(self.op(), (Text("x y"),))
        if kind in (GetStats, FlushCache):
            return kind(self.op())
        return {
            Rollback: lambda: Rollback(b, self.mark_of(b)), GetTokens: lambda: GetTokens(self.op(), b),
            Explain: lambda: Explain(self.op(), b), Lease: lambda: Lease(b, rng.choice((0.0, 0.01))),
        }[kind]()  # fmt: skip


def check_grammar(grammar: Grammar) -> None:
    if grammar.source == "(":
        raise InvalidRequest("unclosed", param="grammar")


@pytest.mark.parametrize("seed", range(40))
def test_every_operation_gets_one_answer_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk(
        num_pages=rng.choice((24, 64)), context=rng.choice((60, 200)), grammars=check_grammar,
        limits=LimitsConfig(inline_text_bytes=100, max_queued_ops=20),
    )  # fmt: skip
    clients = {n: RandomClient(rng, n) for n in (1, 2, 3)}
    gone: set[int] = set()
    for _ in range(250):
        number = rng.choice(sorted(clients))
        if rng.random() < 0.004 and len(clients) > 1:
            desk.service.disconnect(number)
            gone.add(number)
            del clients[number]
            continue
        desk.say(clients[number].message(), client=number)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            desk.tick()
        if rng.random() < 0.3:
            desk.work()
    desk.run()
    for number, client in clients.items():
        finals = Counter(m.op for m in desk.answers[number] if getattr(m, "op", None) and not isinstance(m, Delta))
        assert {op: finals[op] for op in client.ops if finals[op] != 1} == {}, f"seed {seed}"
        known = desk.service.clients[number].branches
        tokens = {label: 10**7 + label for label in known}
        desk.say(*(GetTokens(op, label) for label, op in tokens.items()), client=number)
        desk.run()
        for label, op in tokens.items():
            answer = desk.answer(op, number)
            branch = known[label]
            if isinstance(answer, TokensAre):  # what the scheduler holds is what the service says, but for what is pending
                held = desk.scheduler.state.branches.find(branch.branch_id)
                assert held is not None
                said = as_ints(answer.token_ids)[: len(branch.log)].tolist()
                assert held.known().tokens().tolist() == said, f"seed {seed}, branch {label}"
    for number, client in clients.items():
        desk.say(Close(tuple(client.branches)), Close(tuple(desk.service.clients[number].branches)), client=number)
    desk.clock.advance(10.0)
    desk.assert_nothing_is_left()
