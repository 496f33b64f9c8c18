"""A backend without a model: programs run against scripted replies, the same way every time.

```python
backend = ScriptedBackend({"capital of France": " Paris"})
state = capital.run(country="France", backend=backend)
assert state["answer"] == " Paris" and backend.open_branches() == 1
```
It has the semantics of the real one - branches, forks, rollbacks, joins, spans, order, streams, cancelling,
timeouts, failures - with fake tokens (words), fake logprobs and a simulated prefix cache. One thread serves any
number of branches; `Gate` holds a reply back until the test opens it, so that no test needs to sleep.
"""

import itertools
import math
import random
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from anabranch.lang import fake_text
from anabranch.lang.backend import (
    Explanation,
    Generation,
    RoleBegin,
    RoleEnd,
    Sampling,
    Scores,
    Segment,
    Text,
    TokenLogprobs,
    Tokens,
    TokenSpan,
)
from anabranch.lang.choices import apply_rule
from anabranch.lang.ordered import Core, Machine, Op, OrderedBackend

PAGE_SIZE = 16


class Gate:
    """Holds a reply back until `open()`."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[Callable[[], None]] = []

    def open(self) -> None:
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def _call_when_open(self, go_on: Callable[[], None]) -> None:
        self._waiting.append(go_on)
        if self.is_open:  # opened meanwhile, by another thread
            self.open()


class Reply:
    """What a generation gives: pieces of text, streamed one by one; a Gate among them waits, an exception fails.

    logprob  of each of its tokens; None: made up from the text
    scores   for `select`: the token logprobs of each choice
    """

    def __init__(
        self,
        *pieces: "str | Gate | Exception",
        finish_reason: Any = "stop",
        logprob: float | None = None,
        scores: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.logprob = logprob
        self.scores = scores

    @property
    def text(self) -> str:
        return "".join(p for p in self.pieces if isinstance(p, str))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a script sees: the branch's text (turns as `<|role|>...<|end|>`), the parameters, and which branch asks."""

    text: str
    sampling: Sampling
    seed: int
    path: tuple[int, ...]
    choices: tuple[str, ...] = ()

    @property
    def last_line(self) -> str:
        return self.text.rsplit("\n", 1)[-1]


Answer = str | Reply | Exception
Script = Callable[[Prompt], Answer | None] | Mapping[str, Answer] | Sequence[Answer]


class _Words:
    """A branch's content in fake tokens, and how each came to be."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.origin: list[str] = []
        self.shares_page = False
        self._unread = ""  # text that was appended and not yet made tokens: adjacent text is tokenized together

    def append(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            match segment:
                case Text():
                    self._unread += segment.text
                case RoleBegin():
                    self.add([f"<|{segment.role}|>"], "pending")
                case RoleEnd():
                    self.add(["<|end|>"], "pending")
                case Tokens():
                    self.add([fake_text.piece_of(t) for t in segment.token_ids], "pending")

    def add(self, pieces: Sequence[str], origin: str) -> None:
        self._settle()
        self.pieces.extend(pieces)
        self.origin.extend([origin] * len(pieces))

    def _settle(self) -> None:
        text, self._unread = self._unread, ""
        pieces = fake_text.tokenize(text)
        self.pieces.extend(pieces)
        self.origin.extend(["pending"] * len(pieces))

    def end(self) -> int:
        self._settle()
        return len(self.pieces)

    def cut(self, position: int) -> None:
        self._unread = ""
        del self.pieces[position:], self.origin[position:]

    def copy(self) -> "_Words":
        twin = _Words()
        twin.pieces, twin.origin = list(self.pieces), list(self.origin)
        self.shares_page = twin.shares_page = True
        return twin

    def since(self, position: int) -> list[str]:
        self._settle()
        return self.pieces[position:]

    def extend(self, part: Sequence[str]) -> None:
        self.add(part, "pending")

    def text(self) -> str:
        return "".join(self.pieces) + self._unread


class ScriptedBackend(OrderedBackend):
    """Implements `anabranch.lang.backend.Backend`.

    script          how to reply: a function of the Prompt; a mapping from a piece of the prompt to the reply (the key
                    that occurs last wins); or a list, used up in order. What it does not answer gets made-up text that
                    fits the constraint.
    context_length  in fake tokens; a branch that exceeds it fails
    calls           how often each operation was asked for: calls["fork"] ...
    prompts         the text before each generation and select, in the order in which they ran
    """

    def __init__(self, script: Script | None = None, *, context_length: int = 1 << 20) -> None:
        super().__init__(_ScriptMachine(script, context_length))

    @property
    def prompts(self) -> list[str]:
        self.settle()
        return list(self._machine.prompts)  # type: ignore[attr-defined]


class _ScriptMachine(Machine):
    def __init__(self, script: Script | None, context_length: int) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self.computed: set[tuple[str, int]] = set()  # (salt, hash) of every prefix that has KV
        is_list = isinstance(script, Sequence) and not isinstance(script, str)
        self.replies = deque(script) if is_list else None  # type: ignore[arg-type]
        self.script = script
        self.context_length = context_length

    def new_content(self) -> _Words:
        return _Words()

    def info(self) -> dict[str, Any]:
        return {
            "model": "scripted", "vocab_size": fake_text.VOCAB_SIZE, "context_length": self.context_length,
            "page_size": PAGE_SIZE, "num_pages": 1 << 16, "has_chat_template": True, "kv_bytes_per_token": 0,
        }  # fmt: skip

    def do_flush_cache(self, future: "Future[None]") -> None:
        self.computed.clear()
        future.set_result(None)

    def op_prefill(self, core: Core, op: Op) -> bool:
        return self.resolve(op, self.compute(core))

    def op_token_ids(self, core: Core, op: Op) -> bool:
        core.content.end()
        return self.resolve(op, [fake_text.token_id(p) for p in core.content.pieces])

    def op_explain(self, core: Core, op: Op) -> bool:
        length = core.content.end()
        spans, start = [], 0
        cached = self.cached_prefix(core)
        seen: list[Any] = [
            "cached" if (i < core.inherited and o == "computed") or (i < cached and o == "pending") else o
            for i, o in enumerate(core.content.origin)
        ]
        for origin, run in itertools.groupby(seen):
            stop = start + len(list(run))
            spans.append(TokenSpan(start, stop, origin, "".join(core.content.pieces[start:stop])))
            start = stop
        miss = "" if cached == length else "these tokens were never computed"
        return self.resolve(op, Explanation(length, cached, tuple(spans), miss, core.content.text()))

    # ---------------------------------------------------------------- generating and scoring

    def op_generate(self, core: Core, op: Op) -> bool:
        if op.run is None:
            op.run = self.begin(core, op.args["sampling"])
        run = op.run
        while run.pieces:
            piece = run.pieces[0]
            if isinstance(piece, Gate) and not piece.is_open:
                if run.waiting_at is not piece:
                    run.waiting_at = piece
                    piece._call_when_open(lambda: self.inbox.put(("advance", core)))
                return False
            run.pieces.popleft()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, str) and op.args["on_text"] is not None:
                op.args["on_text"](piece)
        tokens = fake_text.tokenize(run.text)
        core.content.add(tokens, "generated")
        self.remember(core, unfed=bool(tokens))
        usage = {**run.usage, "completion_tokens": len(tokens), "num_steps": len(tokens)}
        ids = tuple(fake_text.token_id(t) for t in tokens)
        values = tuple(fake_text.logprob(core.path, t) if run.logprob is None else run.logprob for t in tokens)
        tops = tuple(((i,), (v,)) for i, v in zip(ids, values, strict=True))
        wanted = op.args["sampling"].num_top_logprobs
        logprobs = None if wanted is None else TokenLogprobs(ids, values, tops if wanted else ())
        return self.resolve(op, Generation(run.text, ids, run.reason, run.matched, usage, logprobs, None, core.seed))

    def begin(self, core: Core, sampling: Sampling) -> "_Run":
        usage = self.compute(core)
        reply = self.answer(core, sampling, ())
        text, reason, matched = _cut(reply, sampling)
        return _Run(_clip(reply.pieces, len(text)), text, reason, matched, usage, reply.logprob)

    def answer(self, core: Core, sampling: Sampling, choices: tuple[str, ...]) -> Reply:
        text = core.content.text()
        self.prompts.append(text)
        answer = self.scripted(Prompt(text, sampling, core.seed, core.path, choices))
        if answer is None:
            if choices:
                return Reply()
            noise = random.Random(f"{core.seed}/{core.path}/{len(core.content.pieces)}")
            answer = fake_text.make_up(sampling.constraint, noise, sampling.max_tokens or 16)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Reply) else Reply(answer)

    def scripted(self, prompt: Prompt) -> Answer | None:
        if self.replies is not None:
            return self.replies.popleft() if self.replies else None
        if isinstance(self.script, Mapping):
            found = [(prompt.text.rfind(key), key) for key in self.script if key in prompt.text]
            return self.script[max(found)[1]] if found else None
        return self.script(prompt) if self.script is not None else None  # type: ignore[operator]

    def op_score(self, core: Core, op: Op) -> bool:
        choices = op.args["choices"]
        usage = self.compute(core)
        reply = self.answer(core, Sampling(), choices)
        pieces = [fake_text.tokenize(choice) for choice in choices]
        if reply.scores is not None:
            pieces = [fake_text.cut(choice, len(reply.scores[choice])) for choice in choices]
        rows = [self.row(core, reply, *of) for of in zip(choices, pieces, strict=True)]
        alone = [[fake_text.logprob((), piece) for piece in of] for of in pieces]
        best, scores = apply_rule(op.args["method"], rows, alone)
        if op.args["append"]:
            core.content.add(pieces[best], "computed")
            self.remember(core)
        logprobs = tuple(
            TokenLogprobs(tuple(fake_text.token_id(p) for p in of), tuple(row))
            for of, row in zip(pieces, rows, strict=True)
        )
        return self.resolve(op, Scores(best, tuple(scores), logprobs, usage))

    def row(self, core: Core, reply: Reply, choice: str, pieces: Sequence[str]) -> list[float]:
        """The logprob of each piece of a choice: as scripted, high for the scripted text, or made up."""
        if reply.scores is not None:
            return list(reply.scores[choice])
        if reply.text:
            return [-0.01 if choice == reply.text else -9.0] * len(pieces)
        return [fake_text.logprob(core.path, core.content.text()[-32:] + piece) for piece in pieces]

    # ---------------------------------------------------------------- the simulated cache

    def compute(self, core: Core) -> dict[str, Any]:
        length = core.content.end()
        if length > self.context_length:
            raise ValueError(f"the branch has {length} tokens; the context holds {self.context_length}")
        cached = max(0, min(self.cached_prefix(core), length - 1))
        self.remember(core)
        for i in range(length):
            if core.content.origin[i] == "pending":
                core.content.origin[i] = "cached" if i < cached else "computed"
        copied = int(core.content.shares_page and length % PAGE_SIZE != 0)
        core.content.shares_page = False
        return {
            "prompt_tokens": length, "cached_tokens": cached, "computed_tokens": length - cached,
            "completion_tokens": 0, "copied_pages": copied, "num_steps": 1,
        }  # fmt: skip

    def prefixes(self, core: Core) -> list[tuple[str, int]]:
        hashes, last = [], 0
        for piece in core.content.pieces:
            last = hash((last, fake_text.token_id(piece)))
            hashes.append((core.salt, last))
        return hashes

    def cached_prefix(self, core: Core) -> int:
        return sum(1 for _ in itertools.takewhile(self.computed.__contains__, self.prefixes(core)))

    def remember(self, core: Core, *, unfed: bool = False) -> None:
        """All of the branch has KV now; but for the last token where it was sampled and nothing followed yet."""
        prefixes = self.prefixes(core)
        self.computed.update(prefixes[:-1] if unfed else prefixes)


@dataclass
class _Run:
    pieces: deque[Any]
    text: str
    reason: Any
    matched: str | None
    usage: dict[str, Any]
    logprob: float | None
    waiting_at: Gate | None = None


def _cut(reply: Reply, sampling: Sampling) -> tuple[str, Any, str | None]:
    """The reply's text as the stop strings and max_tokens leave it."""
    text, reason, matched = reply.text, reply.finish_reason, None
    found = [(at, stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
    for pattern in sampling.stop_regex:
        if hit := re.search(pattern, text):
            found.append((hit.start(), hit.group()))
    if found:
        at, matched = min(found)
        text, reason = text[: at + (len(matched) if sampling.keep_stop_text else 0)], "stop"
    limit = math.inf if sampling.max_tokens is None else sampling.max_tokens
    if len(tokens := fake_text.tokenize(text)) > limit:
        text, reason, matched = "".join(tokens[: int(limit)]), "length", None
    return text, reason, matched


def _clip(pieces: Sequence[Any], length: int) -> deque[Any]:
    """The pieces, with only the first `length` characters of their text."""
    kept: deque[Any] = deque()
    for piece in pieces:
        if isinstance(piece, str):
            piece, length = piece[:length], length - len(piece[:length])
        if piece != "":
            kept.append(piece)
    return kept


__all__ = ["Answer", "Gate", "Prompt", "Reply", "Script", "ScriptedBackend"]
