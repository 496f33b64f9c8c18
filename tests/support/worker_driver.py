"""Drives a `Worker` by hand, as the scheduler would: branches with pages of their own, plans built row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.runtime.messages import (
    RowError,
    SamplingParams,
    ScoreTree,
    SharedPrefix,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    as_ints,
    ints,
)
from anabranch.runtime.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Branch:
    slot: int
    tokens: list[int]
    prompt_len: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    sent: int = 0  # pages that the worker knows
    done: bool = False
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True, slots=True)
class Row:
    """The next `num_new` tokens of a branch (None: all that are not computed)."""

    branch: Branch
    num_new: int | None = None
    sample: bool = True
    feedback: bool = False
    prompt_logprobs: bool = False
    tree: tuple[list[int], list[int], list[tuple[int, int]]] | None = None  # tokens, parents, targets
    host: Branch | None = None  # sample from the last logits of this branch's row


class Driver:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.ready = worker.ready()
        self.page_size = self.ready.page_size
        self.free = list(range(self.ready.num_pages))
        self.step_id = 0
        self._starts: list[SlotStart] = []
        self._ends: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._fresh: list[int] = []
        self._slots = list(range(self.ready.max_slots))

    def open(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, *, path: int = 0, generated: Sequence[int] = ()
    ) -> Branch:
        """A branch in a slot of its own. With `generated` it resumes."""
        branch = Branch(self._slots.pop(0), [*prompt, *generated], len(prompt))
        self._starts.append(
            SlotStart(branch.slot, params, path, len(prompt), context=ints(prompt), generated=ints(list(generated)))
        )
        return branch

    def close(self, branch: Branch) -> None:
        self._ends.append(branch.slot)
        self._slots.append(branch.slot)
        self.free += [page for page in branch.pages if page not in self.free]

    def fork(self, branch: Branch, params: SamplingParams = GREEDY, *, path: int = 0) -> Branch:
        """A branch that shares the full pages and gets a copy of the last one."""
        child = self.open(branch.tokens[: branch.computed + 1], params, path=path)
        child.computed = branch.computed
        full = branch.computed // self.page_size
        child.pages = branch.pages[:full]
        if branch.computed % self.page_size:
            child.pages.append(self._take_page())
            self._copies.append((branch.pages[full], child.pages[-1]))
        return child

    def step(self, *rows: Row | Branch, groups: Sequence[SharedPrefix] = ()) -> StepResult:
        """One plan with these rows; results are written back into the branches."""
        wanted = [row if isinstance(row, Row) else Row(row) for row in rows]
        result = self.worker.execute(self.plan(wanted, groups))
        self.take(wanted, result)
        return result

    def plan(self, rows: Sequence[Row], groups: Sequence[SharedPrefix] = ()) -> StepPlan:
        self.step_id += 1
        columns: dict[str, list[int]] = {name: [] for name in (
            "slots", "num_new", "first_pos", "page_keep", "page_counts", "page_ids", "token_ids", "feedback", "sample",
            "prompt_logprobs", "next_ids",
        )}  # fmt: skip
        trees = []
        for number, row in enumerate(rows):
            branch = row.branch
            known = [] if row.host else branch.tokens[branch.computed :]
            known = known if row.num_new is None else known[: row.num_new]
            tree_tokens = row.tree[0] if row.tree else []
            new = 1 if row.feedback else len(known) + len(tree_tokens)
            if not row.host:
                self._reserve(branch, branch.computed + new)
            end = branch.computed + len(known)
            columns["slots"].append(branch.slot)
            columns["num_new"].append(new)
            columns["first_pos"].append(len(branch.tokens) if row.host else branch.computed)
            columns["page_keep"].append(branch.sent)
            columns["page_counts"].append(len(branch.pages) - branch.sent)
            columns["page_ids"] += branch.pages[branch.sent :]
            columns["token_ids"] += [] if row.feedback else known + tree_tokens
            columns["feedback"].append(row.feedback)
            columns["sample"].append(row.sample)
            columns["prompt_logprobs"].append(row.prompt_logprobs)
            columns["next_ids"].append(branch.tokens[end] if row.prompt_logprobs and end < len(branch.tokens) else -1)
            branch.sent = len(branch.pages)
            if row.tree:
                _, parents, targets = row.tree
                trees.append(
                    ScoreTree(number, ints(parents), ints([n for n, _ in targets]), ints([t for _, t in targets]))
                )
        hosts = [next((i for i, other in enumerate(rows) if other.branch is row.host), n) for n, row in enumerate(rows)]
        plan = StepPlan(
            step_id=self.step_id, starts=tuple(self._starts), ends=tuple(self._ends),
            copy_src=ints([s for s, _ in self._copies]), copy_dst=ints([d for _, d in self._copies]),
            trees=tuple(trees), groups=tuple(groups), fresh_pages=ints(self._fresh),
            logits_of=ints(hosts) if any(row.host for row in rows) else b"",
            **{name: ints(column) for name, column in columns.items()},
        )  # fmt: skip
        self._starts, self._ends, self._copies, self._fresh = [], [], [], []
        return plan

    def take(self, rows: Sequence[Row], result: StepResult) -> None:
        branches = {row.branch.slot: row.branch for row in rows}
        for row in rows:
            tokens = (
                1
                if row.feedback
                else (row.num_new if row.num_new is not None else len(row.branch.tokens) - row.branch.computed)
            )
            row.branch.computed += 0 if row.host else tokens
            row.branch.steps += 1
        for error in result.errors:
            branches[error.slot].error = error.error.message
        ids, at = as_ints(result.token_ids).tolist(), 0
        columns = (as_ints(result.slots), as_ints(result.counts), as_ints(result.grammar_done))
        for slot, count, done in zip(*(column.tolist() for column in columns), strict=True):
            branches[slot].tokens += ids[at : at + count]
            branches[slot].done = bool(done)
            at += count
        for entry in result.logprobs:
            branches[entry.slot].logprobs.append(entry.logprobs)
        for entry in result.prompt_logprobs:
            branches[entry.slot].prompt_logprobs.append(entry.logprobs)

    def generate(
        self, branch: Branch, num_tokens: int, *, stop: Sequence[int] = (), max_steps: int = 1000
    ) -> list[int]:
        """Alone, until enough tokens, a stop token, the end of its grammar, or an error."""
        for _ in range(max_steps):
            if len(branch.output) >= num_tokens or branch.done or branch.error or set(branch.output) & set(stop):
                return branch.output
            if branch.computed == len(branch.tokens):  # its grammar was not ready: ask again
                branch.computed -= 1
            self.step(branch)
        raise AssertionError(f"{max_steps} steps were not enough for {num_tokens} tokens")

    def _take_page(self) -> int:
        self._fresh.append(self.free.pop())
        return self._fresh[-1]

    def _reserve(self, branch: Branch, length: int) -> None:
        while len(branch.pages) * self.page_size < length:
            branch.pages.append(self._take_page())


def errors_of(result: StepResult) -> dict[int, RowError]:
    return {error.slot: error for error in result.errors}


def scores_of(result: StepResult) -> list[np.ndarray]:
    return [np.frombuffer(data, "<f4") for data in result.score_logprobs]
