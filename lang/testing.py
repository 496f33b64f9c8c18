"""A backend without a model: programs run against scripted replies, the same way every time.

```python
backend = ScriptedBackend({"capital of France": " Paris"})
state = capital.run(country="France", backend=backend)
assert state["answer"] == " Paris" and backend.open_branches() == 1
```
It has the semantics of the real one - branches, forks, rollbacks, joins, spans, order, streams, cancelling, timeouts, failures - with
fake tokens (words), fake logprobs and a simulated prefix cache. One thread serves any number of branches; `Gate` holds a reply
back until the test opens it, so that no test needs to sleep.
"""

import itertools
import math
import queue
import random
import re
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from anabranch.lang import fake_text
from anabranch.lang.backend import (
    Explanation,
    Generation,
    Method,
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
from anabranch.lang.choices import first_best, greedy_best, greedy_matrix, mean
from anabranch.lang.errors import Cancelled

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


@dataclass(eq=False)
class _Op:
    kind: str
    future: "Future[Any] | None" = None
    args: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    run: Any = None  # the generation under way
    reached: bool = False


class _Core:
    """A branch inside the dispatcher."""

    def __init__(self, branch_id: int, program: int, seed: int, path: tuple[int, ...], salt: str) -> None:
        self.id, self.program, self.seed, self.path, self.salt = branch_id, program, seed, path, salt
        self.pieces: list[str] = []  # one per token
        self.origin: list[str] = []  # one per token
        self.unread = ""  # text that was appended and not yet made tokens
        self.marks: dict[int, int] = {}
        self.queue: deque[_Op] = deque()
        self.born = False
        self.closed = False
        self.failed: Exception | None = None
        self.shares_page = False
        self.num_children = 0
        self.leased = 0.0

    def append(self, pieces: Sequence[str], origin: str) -> None:
        self.pieces.extend(pieces)
        self.origin.extend([origin] * len(pieces))

    def settle_text(self) -> None:
        text, self.unread = self.unread, ""
        self.append(fake_text.tokenize(text), "pending")

    def text(self) -> str:
        return "".join(self.pieces) + self.unread


class ScriptedBackend:
    """Implements `anabranch.lang.backend.Backend`.

    script          how to reply: a function of the Prompt; a mapping from a piece of the prompt to the reply (the key that occurs last
                    wins); or a list, used up in order. What it does not answer gets made-up text that fits the constraint.
    context_length  in fake tokens; a branch that exceeds it fails
    calls           how often each operation was asked for: calls["fork"] ...
    prompts         the text before each generation and select, in the order in which they ran
    """

    def __init__(self, script: Script | None = None, *, context_length: int = 1 << 20, model: str = "scripted") -> None:
        self.calls: Counter[str] = Counter()
        self._model, self._context_length = model, context_length
        self._ids, self._programs = itertools.count(1), itertools.count(1)
        self._machine = _Machine(script, context_length)
        self._closer = weakref.finalize(self, self._machine.inbox.put, None)

    @property
    def prompts(self) -> list[str]:
        self.settle()
        return list(self._machine.prompts)

    def gate(self) -> Gate:
        return Gate()

    # ---------------------------------------------------------------- the Backend protocol

    def open(self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0) -> "ScriptedBranch":
        core = _Core(next(self._ids), program, next(self._programs) if seed is None else seed, (), salt)
        core.born = True
        self._put("open", core)
        return ScriptedBranch(self, core)

    def new_program(self) -> int:
        return next(self._programs)

    def cancel_program(self, program: int) -> None:
        self._put("cancel_program", program)

    def stats(self) -> "Future[dict[str, Any]]":
        return self._ask("stats")

    def flush_cache(self) -> "Future[None]":
        return self._ask("flush_cache")

    def info(self) -> dict[str, Any]:
        return {
            "model": self._model, "vocab_size": fake_text.VOCAB_SIZE, "context_length": self._context_length, "page_size": PAGE_SIZE,
            "num_pages": 1 << 16, "has_chat_template": True, "kv_bytes_per_token": 0,
        }  # fmt: skip

    # ---------------------------------------------------------------- for tests

    def settle(self) -> None:
        """Return once everything asked for until now has been done, or waits at a gate."""
        self._ask("barrier").result(10)

    def open_branches(self) -> int:
        """Branches that are held in the runtime at this moment."""
        self.settle()
        return sum(1 for core in self._machine.cores.values() if not core.closed)

    def die(self, error: Exception | None = None) -> None:
        """The engine is gone: everything open fails with `error`, and so does everything from now on."""
        self._put("die", error or RuntimeError("the engine is gone"))

    def _put(self, what: str, *args: Any) -> None:
        self.calls[what] += 1
        self._machine.put((what, *args))

    def _ask(self, what: str) -> "Future[Any]":
        future: Future[Any] = Future()
        self._put(what, future)
        return future


class ScriptedBranch:
    def __init__(self, backend: ScriptedBackend, core: _Core) -> None:
        self._backend, self._core = backend, core

    def append(self, segments: Sequence[Segment]) -> None:
        self._send(_Op("append", args={"segments": tuple(segments)}))

    def generate(self, sampling: Sampling, on_text: Callable[[str], None] | None = None) -> "Future[Generation]":
        return self._ask("generate", timeout=sampling.timeout, sampling=sampling, on_text=on_text)

    def prefill(self) -> "Future[dict[str, Any]]":
        return self._ask("prefill")

    def score(
        self, choices: Sequence[str], method: Method, *, append: bool = True, timeout: float | None = None
    ) -> "Future[Scores]":
        return self._ask("score", timeout=timeout, choices=tuple(choices), method=method, append=append)

    def fork(self, n: int) -> "list[ScriptedBranch]":
        ids, core = self._backend._ids, self._core
        children = [_Core(next(ids), core.program, core.seed, (), core.salt) for _ in range(n)]
        self._send(_Op("fork", args={"children": children}))
        return [ScriptedBranch(self._backend, child) for child in children]

    def mark(self) -> int:
        mark = next(self._backend._ids)
        self._send(_Op("mark", args={"mark": mark}))
        return mark

    def rollback(self, mark: int) -> None:
        self._send(_Op("rollback", args={"mark": mark}))

    def join(self, winner: Any, drop: Sequence[Any] = ()) -> None:
        cores = [branch._core for branch in drop]
        self._send(_Op("join", args={"winner": winner and winner._core, "drop": cores, "keep": winner}))

    def append_spans(self, spans: Sequence[tuple[Any, int]]) -> None:
        self._send(_Op("spans", args={"spans": [(branch._core, mark) for branch, mark in spans]}))

    def lease(self, seconds: float) -> None:
        self._send(_Op("lease", args={"seconds": seconds}))

    def token_ids(self) -> "Future[list[int]]":
        return self._ask("token_ids")

    def explain(self) -> "Future[Explanation]":
        return self._ask("explain")

    def cancel(self) -> None:
        self._backend._put("cancel", self._core)

    def close(self, *, superseded: bool = False) -> None:
        self._backend._put("close", self._core)

    def __del__(self) -> None:
        # Garbage collection may run anywhere, so this only puts a message into a queue made for that.
        self._backend._machine.inbox.put(("close", self._core))

    def _ask(self, kind: str, *, timeout: float | None = None, **args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        deadline = None if timeout is None else time.monotonic() + timeout
        op = _Op(kind, future, args, deadline)
        inbox, core = self._backend._machine.inbox, self._core
        future.add_done_callback(lambda f: inbox.put(("cancelled", core, op)) if f.cancelled() else None)
        self._send(op)
        return future

    def _send(self, op: _Op) -> None:
        self._backend.calls[op.kind] += 1
        self._backend._machine.put(("op", self._core, op))


class _Machine:
    """The dispatcher: one thread that owns every branch and takes one message after another."""

    def __init__(self, script: Script | None, context_length: int) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cores: dict[int, _Core] = {}
        self.prompts: list[str] = []
        self.computed: set[tuple[str, int]] = set()  # (salt, hash) of every prefix that has KV
        self.dead: Exception | None = None
        self.replies = deque(script) if isinstance(script, Sequence) and not isinstance(script, str) else None
        self.script = script
        self.context_length = context_length
        self.thread: threading.Thread | None = None
        self.timed: list[tuple[_Core, _Op]] = []
        self.num_generations = 0

    def put(self, message: Any) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.loop, name="anabranch-scripted", daemon=True)
            self.thread.start()
        self.inbox.put(message)

    def loop(self) -> None:
        while True:
            try:
                message = self.inbox.get(timeout=self.next_deadline())
            except queue.Empty:
                self.end_late()
                continue
            if message is None:
                return
            kind, *args = message
            getattr(self, "do_" + kind)(*args)
            self.end_late()

    def next_deadline(self) -> float | None:
        self.timed = [(c, op) for c, op in self.timed if op.future and not op.future.done()]
        if not self.timed:
            return None
        return max(0.0, min(op.deadline for _, op in self.timed if op.deadline is not None) - time.monotonic())

    def end_late(self) -> None:
        now = time.monotonic()
        for core, op in self.timed:
            if op.deadline is not None and op.deadline <= now and op.future and not op.future.done():
                self.fail(core, TimeoutError("the operation ran past its timeout"))

    # ---------------------------------------------------------------- messages

    def do_open(self, core: _Core) -> None:
        self.cores[core.id] = core
        core.failed = self.dead

    def do_op(self, core: _Core, op: _Op) -> None:
        core.queue.append(op)
        if op.kind == "fork":
            self.cores.update((child.id, child) for child in op.args["children"])
        if op.kind == "join" and op.args["winner"] is not None:
            self.wait_for(op, [op.args["winner"]], core)
        if op.kind == "spans":
            self.wait_for(op, [child for child, _ in op.args["spans"]], core)
        if op.deadline is not None:
            self.timed.append((core, op))
        self.advance(core)

    def wait_for(self, op: _Op, others: Sequence[_Core], core: _Core) -> None:
        """`op` may run once each of `others` has done what was asked of it before."""
        reaches = [_Op("reach", args={"for": core}) for _ in others]
        op.args["reaches"] = reaches
        for other, reach in zip(others, reaches, strict=True):
            other.queue.append(reach)
            self.advance(other)

    def do_advance(self, core: _Core) -> None:
        self.advance(core)

    def do_cancelled(self, core: _Core, op: _Op) -> None:
        if op in core.queue:
            self.fail(core, Cancelled("the operation was cancelled"))

    def do_cancel(self, core: _Core) -> None:
        if core.queue and not core.failed:
            self.fail(core, Cancelled("the branch was cancelled"))

    def do_cancel_program(self, program: int) -> None:
        for core in [c for c in self.cores.values() if c.program == program]:
            self.do_cancel(core)

    def do_close(self, core: _Core) -> None:
        if core.closed:
            return
        core.closed = True
        self.cores.pop(core.id, None)
        self.fail(core, Cancelled("the branch was closed"))

    def do_die(self, error: Exception) -> None:
        self.dead = error
        for core in list(self.cores.values()):
            self.fail(core, error)

    def do_barrier(self, future: "Future[None]") -> None:
        future.set_result(None)

    def do_stats(self, future: "Future[dict[str, Any]]") -> None:
        queued = sum(len(c.queue) for c in self.cores.values())
        future.set_result({"branches": len(self.cores), "waiting_ops": queued, "cached_tokens": len(self.computed)})

    def do_flush_cache(self, future: "Future[None]") -> None:
        self.computed.clear()
        future.set_result(None)

    # ---------------------------------------------------------------- a branch's operations, in order

    def advance(self, core: _Core) -> None:
        while core.queue and core.born:
            op = core.queue[0]
            if core.failed is None:
                try:
                    if not getattr(self, "op_" + op.kind)(core, op):
                        return
                except Exception as error:
                    self.fail(core, error)
                    continue
            else:
                self.refuse(core, op)
            if core.queue and core.queue[0] is op:
                core.queue.popleft()

    def fail(self, core: _Core, error: Exception) -> None:
        """The branch has failed with this first cause; so does everything that waits on it."""
        core.failed = core.failed or error
        born, core.born = core.born, True
        self.advance(core)
        core.born = born or core.born

    def refuse(self, core: _Core, op: _Op) -> None:
        assert core.failed is not None
        _fail_future(op.future, core.failed)
        for child in op.args.get("children", ()):
            child.born = True
            self.fail(child, core.failed)
        if op.kind == "reach":
            self.op_reach(core, op)
        if op.kind == "join":
            for loser in op.args["drop"]:
                self.do_close(loser)

    def op_append(self, core: _Core, op: _Op) -> bool:
        for segment in op.args["segments"]:
            match segment:
                case Text():
                    core.unread += segment.text
                case RoleBegin():
                    core.settle_text()
                    core.append([f"<|{segment.role}|>"], "pending")
                case RoleEnd():
                    core.settle_text()
                    core.append(["<|end|>"], "pending")
                case Tokens():
                    core.settle_text()
                    core.append([fake_text.piece_of(t) for t in segment.token_ids], "pending")
        return True

    def op_reach(self, core: _Core, op: _Op) -> bool:
        op.reached = True
        self.inbox.put(("advance", op.args["for"]))
        return True

    def op_mark(self, core: _Core, op: _Op) -> bool:
        core.settle_text()
        core.marks[op.args["mark"]] = len(core.pieces)
        return True

    def op_rollback(self, core: _Core, op: _Op) -> bool:
        mark = op.args["mark"]
        if mark not in core.marks:
            raise ValueError(f"mark {mark} is not on this branch")
        length = core.marks[mark]
        core.unread = ""
        del core.pieces[length:], core.origin[length:]
        core.marks = {m: at for m, at in core.marks.items() if at <= length}
        return True

    def op_fork(self, core: _Core, op: _Op) -> bool:
        core.settle_text()
        for child in op.args["children"]:
            child.pieces, child.origin, child.marks = list(core.pieces), list(core.origin), dict(core.marks)
            child.path, child.born, child.shares_page = (*core.path, core.num_children), True, True
            core.num_children += 1
            self.advance(child)
        core.shares_page = True
        return True

    def op_join(self, core: _Core, op: _Op) -> bool:
        winner = op.args["winner"]
        if winner is not None:
            if not all(reach.reached for reach in op.args["reaches"]):
                return False
            if winner.failed is not None:
                raise winner.failed
            winner.settle_text()
            core.pieces, core.origin, core.unread = winner.pieces, winner.origin, ""
            core.marks, core.path, core.num_children = winner.marks, winner.path, winner.num_children
            self.do_close(winner)
        for loser in op.args["drop"]:
            self.do_close(loser)
        return True

    def op_spans(self, core: _Core, op: _Op) -> bool:
        if not all(reach.reached for reach in op.args["reaches"]):
            return False
        core.settle_text()
        for child, mark in op.args["spans"]:
            if child.failed is not None:
                raise child.failed
            child.settle_text()
            core.append(child.pieces[child.marks[mark] :], "pending")
        return True

    def op_lease(self, core: _Core, op: _Op) -> bool:
        core.leased = op.args["seconds"]
        return True

    def op_token_ids(self, core: _Core, op: _Op) -> bool:
        core.settle_text()
        return _resolve(op, [fake_text.token_id(p) for p in core.pieces])

    def op_explain(self, core: _Core, op: _Op) -> bool:
        core.settle_text()
        spans, start = [], 0
        for origin, run in itertools.groupby(core.origin):
            length = len(list(run))
            text = "".join(core.pieces[start : start + length])
            spans.append(TokenSpan(start, start + length, origin, text))  # type: ignore[arg-type]
            start += length
        cached = self.cached_prefix(core)
        miss = "" if cached == len(core.pieces) else "never computed"
        return _resolve(op, Explanation(len(core.pieces), cached, tuple(spans), miss, core.text()))

    def op_prefill(self, core: _Core, op: _Op) -> bool:
        return _resolve(op, self.compute(core))

    # ---------------------------------------------------------------- generating and scoring

    def op_generate(self, core: _Core, op: _Op) -> bool:
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
        core.append(tokens, "generated")
        self.remember(core)
        usage = {**run.usage, "completion_tokens": len(tokens), "num_steps": len(tokens)}
        ids = tuple(fake_text.token_id(t) for t in tokens)
        values = tuple(fake_text.logprob(core.path, t) if run.logprob is None else run.logprob for t in tokens)
        tops = tuple(((i,), (v,)) for i, v in zip(ids, values, strict=True))
        wanted = op.args["sampling"].num_top_logprobs
        logprobs = None if wanted is None else TokenLogprobs(ids, values, tops if wanted else ())
        return _resolve(op, Generation(run.text, ids, run.reason, run.matched, usage, logprobs, None, core.seed))

    def begin(self, core: _Core, sampling: Sampling) -> "_Run":
        usage = self.compute(core)
        reply = self.answer(core, sampling, ())
        text, reason, matched = _cut(reply, sampling)
        return _Run(_clip(reply.pieces, len(text)), text, reason, matched, usage, reply.logprob)

    def answer(self, core: _Core, sampling: Sampling, choices: tuple[str, ...]) -> Reply:
        text = core.text()
        self.prompts.append(text)
        self.num_generations += 1
        answer = self.scripted(Prompt(text, sampling, core.seed, core.path, choices))
        if answer is None:
            if choices:
                return Reply()
            noise = random.Random(f"{core.seed}/{core.path}/{len(core.pieces)}")
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
        return self.script(prompt) if callable(self.script) else None

    def op_score(self, core: _Core, op: _Op) -> bool:
        choices, method = op.args["choices"], op.args["method"]
        usage = self.compute(core)
        reply = self.answer(core, Sampling(), choices)
        rows = [self.row(core, reply, choice) for choice in choices]
        if method == "greedy_token_selection":
            matrix = greedy_matrix(rows)
            best, scores = greedy_best(matrix), [mean(row) for row in rows]
        else:
            rule = {"sum": sum, "token_length_normalized": mean, "unconditional_likelihood_normalized": mean}[method]
            alone = [[fake_text.logprob((), t) for t in fake_text.tokenize(c)] for c in choices]
            given = rows if not method.startswith("uncond") else [
                [a - b for a, b in zip(row, bare, strict=False)] for row, bare in zip(rows, alone, strict=True)
            ]  # fmt: skip
            scores = [rule(row) for row in given]
            best = first_best(scores)
        if op.args["append"]:
            core.append(fake_text.tokenize(choices[best]), "computed")
            self.remember(core)
        ids = [tuple(fake_text.token_id(t) for t in fake_text.tokenize(c)) for c in choices]
        logprobs = tuple(TokenLogprobs(i[: len(r)], tuple(r)) for i, r in zip(ids, rows, strict=True))
        return _resolve(op, Scores(best, tuple(float(s) for s in scores), logprobs, usage))

    def row(self, core: _Core, reply: Reply, choice: str) -> list[float]:
        if reply.scores is not None:
            return list(reply.scores[choice])
        tokens = fake_text.tokenize(choice)
        if reply.text:
            return [-0.01 if choice == reply.text else -9.0] * len(tokens)
        return [fake_text.logprob(core.path, core.text()[-32:] + t) for t in tokens]

    # ---------------------------------------------------------------- the simulated cache

    def compute(self, core: _Core) -> dict[str, Any]:
        core.settle_text()
        length = len(core.pieces)
        if length > self.context_length:
            raise ValueError(f"the branch has {length} tokens; the context holds {self.context_length}")
        cached = max(0, min(self.cached_prefix(core), length - 1))
        self.remember(core)
        for i in range(length):
            if core.origin[i] == "pending":
                core.origin[i] = "cached" if i < cached else "computed"
        copied = int(core.shares_page and length % PAGE_SIZE != 0)
        core.shares_page = False
        return {
            "prompt_tokens": length, "cached_tokens": cached, "computed_tokens": length - cached,
            "completion_tokens": 0, "copied_pages": copied, "num_steps": 1,
        }  # fmt: skip

    def prefixes(self, core: _Core) -> list[tuple[str, int]]:
        hashes, last = [], 0
        for piece in core.pieces:
            last = hash((last, fake_text.token_id(piece)))
            hashes.append((core.salt, last))
        return hashes

    def cached_prefix(self, core: _Core) -> int:
        return sum(1 for _ in itertools.takewhile(self.computed.__contains__, self.prefixes(core)))

    def remember(self, core: _Core) -> None:
        self.computed.update(self.prefixes(core))


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


def _resolve(op: _Op, result: Any) -> bool:
    if op.future is not None:
        try:
            op.future.set_result(result)
        except InvalidStateError:  # cancelled meanwhile
            pass
    return True


def _fail_future(future: "Future[Any] | None", error: Exception) -> None:
    if future is not None and not future.done():
        try:
            future.set_exception(error)
        except InvalidStateError:
            pass


__all__ = ["Answer", "Gate", "Prompt", "Reply", "Script", "ScriptedBackend", "ScriptedBranch"]
