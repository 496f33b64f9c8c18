"""The tokenizer process without its sockets: clients' operations in, requests for the scheduler and clients' events out.

Each branch is an ordered queue. An operation starts when the one before it has ended; text that was appended is tokenized together,
just before it is needed. What must not hold up the loop (long texts, grammars) is done by `defer`. What fails, fails its branch:
the first cause answers everything that is queued or comes later.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, assert_never, get_args

from anabranch.radix.tokens import TokenLog
from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.errors import InvalidRequest, RequestError, internal
from anabranch.runtime.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    Append,
    BranchExplained,
    Cancel,
    Close,
    CloseBranches,
    ControlText,
    Delta,
    Done,
    Error,
    Explain,
    ExplainBranch,
    Explained,
    Failed,
    Finished,
    Flush,
    FlushCache,
    Fork,
    ForkBranch,
    FromScheduler,
    Generate,
    GetStats,
    GetTokens,
    Grammar,
    Heartbeat,
    Hello,
    Join,
    JoinBranch,
    Lease,
    LeaseBranch,
    Mark,
    Message,
    Open,
    OpenBranch,
    Prefill,
    Prefilled,
    Produced,
    QueryStats,
    Refused,
    RoleBegin,
    RoleEnd,
    Rollback,
    RollbackBranch,
    SchedulerReady,
    Score,
    Scored,
    Span,
    StatsAre,
    StatsReply,
    StopAt,
    Submit,
    SubmitScore,
    Text,
    Tokenize,
    TokenLogprobs,
    Tokens,
    TokensAre,
    Usage,
    Welcome,
    ints,
)
from anabranch.runtime.tokenizer import choices as rules
from anabranch.runtime.tokenizer.answers import Answer
from anabranch.runtime.tokenizer.branches import Awaited, Branch, Operation, Running, Snapshot
from anabranch.runtime.tokenizer.model_text import ModelText
from anabranch.runtime.tokenizer.templates import ChatTemplate, no_template_error
from anabranch.runtime.tokenizer.turns import ChatTurns, TurnTexts
from anabranch.runtime.tokenizer.validation import check_choices, check_generate, check_number, check_options, cut
from anabranch.runtime.tokenizer.vocabulary import Part

log = logging.getLogger(__name__)

SHARED_UNSENT = 64  # fewer unsent tokens than this are copied to children; more are computed before the fork
CANCELLED = Error(type="cancelled", message="the operation was cancelled")
CLOSED = Error(type="cancelled", message="the branch was closed while this operation waited or ran")

Job = Callable[[], Any]
Defer = Callable[[Job, Callable[[Any], None]], None]


def at_once(job: Job, then: Callable[[Any], None]) -> None:
    """A `defer` that does the job in the loop: for tests and small engines. `then` gets the result, or the exception."""
    try:
        result = job()
    except Exception as fault:
        result = fault
    then(result)


class TokenizerService:
    """`to_scheduler` and `to_clients` are outboxes that the host empties after each call.

    clock         monotonic seconds, the scheduler's clock
    check_grammar raises GrammarError; may take long, so it runs through `defer`
    """

    def __init__(
        self,
        text: ModelText,
        ready: SchedulerReady,
        *,
        clock: Callable[[], float],
        check_grammar: Callable[[Grammar], None],
        limits: LimitsConfig | None = None,
        defer: Defer = at_once,
        model_name: str = "",
    ) -> None:
        self.vocabulary = text.vocabulary
        self.ready = ready
        self.to_scheduler: list[Any] = []
        self.to_clients: list[tuple[int, Message]] = []
        self.counters: Counter[str] = Counter()
        self._limits = limits or LimitsConfig()
        self._clock, self._defer, self._check_grammar = clock, defer, check_grammar
        self._model_name = model_name
        self._template_problem: RequestError | None = None
        self._turn_texts = self._read_template(text)
        self._branches: dict[tuple[int, int], Branch] = {}
        self._num_open: Counter[int] = Counter()
        self._programs: dict[tuple[int, int], int] = {}
        self._requests: dict[int, tuple[Branch, Running]] = {}
        self._queries: dict[int, Callable[[Any], None]] = {}
        self._scores: dict[int, _Scoring] = {}
        self._ids = count(1)

    # ------------------------------------------------------------ clients

    def handle(self, client: int, message: Message) -> None:
        """Take one message of a client. A fault that is ours ends what it names and nothing else."""
        try:
            self._dispatch(client, message)
        except RequestError as refusal:
            self._refuse(client, message, refusal.to_wire())
        except Exception as fault:
            log.exception("a message of type %s failed", type(message).__name__)
            self.counters["internal_errors"] += 1
            self._refuse(client, message, internal(fault, f"handling {type(message).__name__}"))

    def disconnect(self, client: int) -> None:
        """The client is gone: end and release everything it has. Idempotent."""
        for key in [key for key in self._branches if key[0] == client]:
            if (branch := self._branches.get(key)) is not None:
                self._close(branch, superseded=False, tell=False)
        for program in [key for key in self._programs if key[0] == client]:
            del self._programs[program]
        del self._num_open[client]
        self.to_clients = [(c, m) for c, m in self.to_clients if c != client]

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    def _dispatch(self, client: int, message: Message) -> None:
        match message:
            case Hello():
                self._welcome(client, message)
            case Open():
                self._open(client, message)
            case Close():
                for label in message.branches:
                    if (branch := self._branches.get((client, label))) is not None:
                        self._close(branch, superseded=False)
            case Cancel():
                self._cancel(client, message)
            case GetStats():
                self._ask(QueryStats, client, message.op, check=message.check)
            case FlushCache():
                self._flush(client, message)
            case Tokenize():
                self._tokenize(client, message)
            case _ if isinstance(message, get_args(Operation)):
                self._enqueue(client, message)  # type: ignore[arg-type]
            case _:
                raise InvalidRequest(f"{type(message).__name__} is not a client's message")

    def _refuse(self, client: int, message: Message, error: Error) -> None:
        op, label = getattr(message, "op", None), getattr(message, "branch", None)
        branch = self._branches.get((client, label)) if label is not None else None
        if branch is not None:
            self._fail(branch, error)
        if op is not None:
            self._tell(client, Failed(error, op=op))
        elif branch is None:
            self._tell(client, Failed(error, branch=label))

    def _tell(self, client: int, message: Message) -> None:
        self.to_clients.append((client, message))

    def _welcome(self, client: int, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            problem = (
                f"this engine speaks protocol {PROTOCOL_VERSION}, the client {hello.version}: use the same version"
            )
            raise InvalidRequest(problem, param="version")
        r, v = self.ready, self.vocabulary
        welcome = Welcome(
            PROTOCOL_VERSION, self._model_name, v.vocab_size, r.context_length, r.page_size, r.num_pages,
            self._turn_texts is not None, v.eos_token_ids, v.bos_token_id, r.num_layers, r.kv_bytes_per_token,
        )  # fmt: skip
        self._tell(client, welcome)

    def _read_template(self, text: ModelText) -> TurnTexts | None:
        if text.template is None:
            return None
        try:
            return TurnTexts(
                ChatTemplate(text.template, named_tokens=text.named_tokens, special=self.vocabulary.special)
            )
        except RequestError as fault:
            self._template_problem = fault  # completions work; a chat turn says what is wrong
            return None

    def _open(self, client: int, message: Open) -> None:
        options = message.options
        if (client, message.branch) in self._branches:
            raise InvalidRequest(f"branch {message.branch} is open already", param="branch")
        self._require_room(client, 1)
        check_options(options)
        seed = secrets.randbits(63) if options.seed is None else options.seed & 0xFFFF_FFFF_FFFF_FFFF
        branch = Branch(
            next(self._ids), client, message.branch, self._program_id(client, options.program), options.program,
            b"salt\0" + options.salt.encode(), seed, TokenLog(), ChatTurns(self._turn_texts) if self._turn_texts else None,
        )  # fmt: skip
        self._branches[client, message.branch] = branch
        self.to_scheduler.append(
            OpenBranch(branch.branch_id, branch.program_id, branch.namespace, seed, priority=options.priority)
        )

    def _require_room(self, client: int, n: int) -> None:
        if self._num_open[client] + n > self._limits.max_branches:
            problem = f"at most {self._limits.max_branches} branches may be open per client: close some of them"
            raise InvalidRequest(problem, param="branch")
        self._num_open[client] += n

    def _program_id(self, client: int, label: int) -> int:
        """Label 0 names no program: such branches are each their own."""
        if not label:
            return next(self._ids)
        known = self._programs.get((client, label))
        if known is None:
            known = self._programs[client, label] = next(self._ids)
        return known

    def _tokenize(self, client: int, message: Tokenize) -> None:
        scratch = Branch(
            0, client, 0, 0, 0, b"", 0, TokenLog(), ChatTurns(self._turn_texts) if self._turn_texts else None
        )
        self._take_segments(scratch, Append(0, message.segments))
        self._settle(scratch)
        self._tell(client, TokensAre(message.op, ints(scratch.log.read(0, scratch.log.length))))

    def _flush(self, client: int, message: FlushCache) -> None:
        query = next(self._ids)
        self._queries[query] = lambda _: self._tell(client, Done(message.op))
        self.to_scheduler.append(Flush(query))

    def _ask(self, kind: Any, client: int, op: int, **fields: Any) -> None:
        query = next(self._ids)

        def answer(reply: StatsReply) -> None:
            own: dict[str, Any] = {
                "branches": len(self._branches), "requests": len(self._requests), "queries": len(self._queries),
                **{f"count_{name}": n for name, n in self.counters.items()},
            }  # fmt: skip
            self._tell(client, StatsAre(op, {**reply.stats, "tokenizer": own}))

        self._queries[query] = answer
        self.to_scheduler.append(kind(query, **fields))

    # ------------------------------------------------------------ queues

    def _enqueue(self, client: int, message: Operation) -> None:
        branch = self._branches.get((client, message.branch))
        if branch is None:
            problem = f"branch {message.branch} is not open"
            raise InvalidRequest(problem, param="branch", code="branch_not_found")
        if isinstance(message, Fork):
            self._make_children(branch, message)
        if branch.error is not None:
            self._drop_operation(branch, message, branch.error)
            return
        if len(branch.queue) >= self._limits.max_queued_ops:
            problem = f"at most {self._limits.max_queued_ops} operations may wait on one branch: await some of them"
            raise InvalidRequest(problem, param="branch")
        if isinstance(message, Join):
            for other in self._named_by(branch, message):
                other.num_pins += 1
        branch.queue.append(message)
        self._advance(branch)

    def _make_children(self, parent: Branch, message: Fork) -> None:
        """Children exist at once, so that they can be given operations; these wait until the fork has been carried out."""
        for label in message.children:
            if (parent.client, label) in self._branches:
                raise InvalidRequest(f"branch {label} is open already", param="children")
        self._require_room(parent.client, len(message.children))
        for label in message.children:
            child = Branch(
                next(self._ids), parent.client, label, parent.program_id, parent.program, parent.namespace, parent.seed,
                TokenLog(), None,
            )  # fmt: skip
            child.running = Running(message)
            child.error = parent.error
            self._branches[parent.client, label] = child

    def _named_by(self, branch: Branch, join: Join) -> list[Branch]:
        labels = {*([join.winner] if join.winner is not None else []), *(label for label, _ in join.spans), *join.drop}
        found = (self._branches.get((branch.client, label)) for label in labels)
        return [other for other in found if other is not None and other is not branch]

    def _advance(self, branch: Branch) -> None:
        """Start what can be started."""
        while branch.running is None and branch.queue and not branch.closed and branch.error is None:
            operation = branch.queue[0]
            try:
                if not self._start(branch, operation):
                    return
            except RequestError as refusal:
                self._fail(branch, refusal.to_wire())
                return
        if branch.is_idle or branch.error is not None:
            waiters, branch.waiters = branch.waiters, []
            for waiter in waiters:
                waiter.waits_for = None
                self._advance(waiter)

    def _start(self, branch: Branch, operation: Operation) -> bool:
        """Begin the operation at the head of the queue, or carry it out. False: it must stay there for now."""
        match operation:
            case Append():
                branch.queue.popleft()
                self._take_segments(branch, operation)
                return True
            case Join():
                return self._join(branch, operation)
            case Fork():
                return self._fork(branch, operation)
            case _:
                if self._long_text_waits(branch):
                    return False
                branch.queue.popleft()
                self._settle(branch)
        match operation:
            case Mark():
                turns = branch.turns.copy() if branch.turns else None
                branch.marks[operation.mark] = Snapshot(branch.log.length, turns, branch.spans)
            case Rollback():
                self._rollback(branch, operation)
            case Lease():
                self._lease(branch, operation)
            case GetTokens():
                self._tell(branch.client, TokensAre(operation.op, ints(branch.log.read(0, branch.log.length))))
            case Explain():
                self._explain(branch, operation)
            case Generate():
                self._generate(branch, operation)
            case Prefill():
                self._prefill(branch, operation, operation.timeout_ms)
            case Score():
                self._score(branch, operation)
            case _:
                assert_never(operation)
        return True

    # ------------------------------------------------------------ text

    def _take_segments(self, branch: Branch, message: Append) -> None:
        for segment in message.segments:
            match segment:
                case Text():
                    self._add_part(branch, Part(segment.text))
                case ControlText():
                    needs_bos = (
                        segment.add_bos and self.vocabulary.adds_bos and not branch.log.length and not branch.pending
                    )
                    self._add_part(branch, Part(segment.text, control=True))
                    if needs_bos:
                        self._add_bos(branch, segment.text)
                case Tokens():
                    self.vocabulary.check_ids(segment.token_ids)
                    branch.pending.append(segment.token_ids)
                case RoleBegin():
                    at_start = not branch.log.length and not branch.pending
                    self._add_part(
                        branch, Part(self._turns_of(branch).begin(segment.role, at_start=at_start), control=True)
                    )
                case RoleEnd():
                    self._add_part(branch, Part(self._turns_of(branch).end(), control=True))
                case _:
                    assert_never(segment)

    def _add_part(self, branch: Branch, part: Part) -> None:
        if not part.text:
            return
        if (
            not part.control
            and self.vocabulary.adds_bos
            and not branch.log.length
            and not branch.pending
            and not (branch.turns and branch.turns.roles)
        ):
            assert self.vocabulary.bos_token_id is not None, "adds_bos implies a BOS"
            branch.pending.append((self.vocabulary.bos_token_id,))
        branch.pending.append(part)
        branch.pending_bytes += len(part.text)
        if branch.pending_bytes > self._limits.max_text_bytes:
            problem = f"at most {self._limits.max_text_bytes} characters of text may wait on one branch"
            raise InvalidRequest(problem, param="text", code="context_length_exceeded")

    def _add_bos(self, branch: Branch, text: str) -> None:
        bos = self.vocabulary.bos_token_id
        assert bos is not None, "adds_bos implies a BOS"
        name = self.vocabulary.token(bos)
        if name is None or not text.startswith(name):
            branch.pending.insert(0, (bos,))

    def _turns_of(self, branch: Branch) -> ChatTurns:
        if branch.turns is None:
            raise self._template_problem or no_template_error()
        return branch.turns

    def _long_text_waits(self, branch: Branch) -> bool:
        """Long text is tokenized off the loop; the head of the queue waits for it. True: come back later."""
        if branch.pending_bytes <= self._limits.inline_text_bytes:
            return False
        self._refuse_hopeless(branch)
        parts, start, previous = branch.pending, not branch.log.length, branch.last_id()
        branch.running = running = Running(Append(branch.label, ()))

        def done(result: Any) -> None:
            if branch.running is not running:
                return
            branch.running = None
            if isinstance(result, Exception):
                self._fail(branch, self._error_of(result, "tokenizing"))
                return
            branch.pending, branch.pending_bytes = [tuple(result)], 0
            self._advance(branch)

        self._defer(lambda: self._encode(parts, start, previous), done)
        return True

    def _refuse_hopeless(self, branch: Branch) -> None:
        """A text that cannot fit whatever it tokenizes to is refused before it is tokenized."""
        least = branch.log.length + sum(
            self.vocabulary.least_tokens(p.text) for p in branch.pending if isinstance(p, Part)
        )
        limit = self.ready.context_length
        if least >= limit:
            problem = f"the text has at least {least} tokens; the context holds {limit}. Shorten it"
            raise InvalidRequest(problem, param="prompt", code="context_length_exceeded")

    def _settle(self, branch: Branch) -> None:
        """Tokenize what is pending."""
        if not branch.pending:
            return
        ids = self._encode(branch.pending, not branch.log.length, branch.last_id())
        branch.pending, branch.pending_bytes = [], 0
        branch.log.append(ids)
        branch.num_unsent += len(ids)

    def _encode(self, items: list[Part | tuple[int, ...]], at_start: bool, previous: int | None) -> list[int]:
        ids: list[int] = []
        parts: list[Part] = []

        def encode_parts() -> None:
            before = ids[-1] if ids else previous
            only_bos = before is not None and before == self.vocabulary.bos_token_id and len(ids) <= 1
            ids.extend(self.vocabulary.encode(parts, at_start=at_start and (not ids or only_bos), previous=before))
            parts.clear()

        for item in items:
            if isinstance(item, Part):
                parts.append(item)
                continue
            if parts:
                encode_parts()
            ids.extend(item)
        if parts:
            encode_parts()
        return ids

    def _error_of(self, fault: Exception, doing: str) -> Error:
        if isinstance(fault, RequestError):
            return fault.to_wire()
        log.error("%s failed", doing, exc_info=fault)
        self.counters["internal_errors"] += 1
        return internal(fault, doing)

    # ------------------------------------------------------------ operations

    def _rollback(self, branch: Branch, operation: Rollback) -> None:
        snapshot = branch.marks.get(operation.mark)
        if snapshot is None:
            raise InvalidRequest(f"mark {operation.mark} is not known on this branch", param="mark")
        length = snapshot.length
        if length > branch.log.length:
            problem = f"mark {operation.mark} lies at {length}, past the branch's {branch.log.length} tokens: it was rolled back"
            raise InvalidRequest(problem, param="mark")
        sent = branch.num_sent
        branch.log.truncate(length)
        branch.num_unsent = max(0, length - sent)
        if length < sent:
            self.to_scheduler.append(RollbackBranch(branch.branch_id, length))
        branch.turns = snapshot.turns.copy() if snapshot.turns else None
        branch.spans = snapshot.spans

    def _lease(self, branch: Branch, operation: Lease) -> None:
        if not 0 <= operation.seconds <= 7 * 24 * 3600:
            raise InvalidRequest(f"seconds must be in 0..{7 * 24 * 3600}, got {operation.seconds}", param="seconds")
        until = self._clock() + operation.seconds if operation.seconds > 0 else None
        self.to_scheduler.append(LeaseBranch(branch.branch_id, until))

    def _explain(self, branch: Branch, operation: Explain) -> None:
        query = next(self._ids)
        branch.running = running = Running(operation)

        def answer(reply: BranchExplained) -> None:
            if branch.running is not running:
                return
            pending = (Span(branch.num_sent, branch.log.length, "pending"),) if branch.num_unsent else ()
            text = self.vocabulary.decode(branch.log.read(0, branch.log.length).tolist(), skip_special_tokens=False)
            self._tell(
                branch.client,
                Explained(operation.op, branch.log.length, reply.cached_now, branch.spans + pending, reply.miss, text),
            )
            self._end(branch)

        self._queries[query] = answer
        self.to_scheduler.append(ExplainBranch(query, branch.branch_id))

    def _generate(self, branch: Branch, operation: Generate) -> None:
        try:
            checked = check_generate(operation.params, self.vocabulary, branch.seed)
            self._require_tokens(branch)
        except RequestError as refusal:
            self._fail_operation(branch, operation, refusal.to_wire())
            return
        answer = Answer(operation.op, checked, self.vocabulary, self._context_of(branch))
        branch.running = running = Running(operation, answer=answer, prompt_len=branch.log.length)
        grammar = operation.params.grammar
        if grammar is None:
            self._submit(branch, running)
            return

        def checked_grammar(result: Any) -> None:
            if branch.running is not running:
                return
            if isinstance(result, Exception):
                branch.running = None
                self._fail_operation(branch, operation, self._error_of(result, "compiling a grammar"))
            else:
                self._submit(branch, running)

        self._defer(lambda: self._check_grammar(grammar), checked_grammar)

    def _context_of(self, branch: Branch) -> list[int]:
        """The end of the branch: what incremental detokenization looks back to."""
        return branch.log.read(max(0, branch.log.length - 64), branch.log.length).tolist()

    def _require_tokens(self, branch: Branch) -> None:
        if not branch.log.length:
            raise InvalidRequest("the prompt is empty: append text or tokens before generating", param="prompt")

    def _submit(self, branch: Branch, running: Running) -> None:
        operation, answer = running.op, running.answer
        assert isinstance(operation, Generate) and answer is not None, "only a generation is submitted here"
        request_id, params = self._new_request(branch, running), operation.params
        now = self._clock()
        submit = Submit(
            request_id, branch.branch_id, self._take_unsent(branch), params.max_tokens, answer.checked.sampling,
            params.prompt_logprobs_from, self._deadline(now, params.timeout_ms), now,
        )  # fmt: skip
        self.to_scheduler.append(submit)

    def _prefill(self, branch: Branch, operation: Prefill | Fork, timeout_ms: float | None = None) -> None:
        if timeout_ms is not None:
            check_number("timeout_ms", timeout_ms)
        if isinstance(operation, Prefill) and not branch.log.length:
            self._tell(branch.client, Prefilled(operation.op, Usage()))
            return
        branch.running = running = Running(operation, prompt_len=branch.log.length)
        now = self._clock()
        request_id = self._new_request(branch, running)
        self.to_scheduler.append(
            Submit(
                request_id,
                branch.branch_id,
                self._take_unsent(branch),
                0,
                deadline=self._deadline(now, timeout_ms),
                arrival=now,
            )
        )

    def _new_request(self, branch: Branch, running: Running) -> int:
        request_id = next(self._ids)
        running.request_ids.add(request_id)
        self._requests[request_id] = (branch, running)
        return request_id

    def _take_unsent(self, branch: Branch) -> bytes:
        data = ints(branch.log.read(branch.num_sent, branch.log.length))
        branch.num_unsent = 0
        return data

    def _deadline(self, now: float, timeout_ms: float | None) -> float | None:
        return None if timeout_ms is None else now + timeout_ms / 1000

    def _score(self, branch: Branch, operation: Score) -> None:
        try:
            check_choices(operation.choices)
            if operation.timeout_ms is not None:
                check_number("timeout_ms", operation.timeout_ms)
            self._require_tokens(branch)
            ids = [self._choice_ids(branch, choice) for choice in operation.choices]
        except RequestError as refusal:
            self._fail_operation(branch, operation, refusal.to_wire())
            return
        branch.running = running = Running(operation, prompt_len=branch.log.length)
        now = self._clock()
        deadline = self._deadline(now, operation.timeout_ms)
        request_id = self._new_request(branch, running)
        scoring = self._scores[request_id] = _Scoring(operation, ids)
        self.to_scheduler.append(
            SubmitScore(request_id, branch.branch_id, self._take_unsent(branch), tuple(map(ints, ids)), deadline, now)
        )
        if operation.method == "unconditional_likelihood_normalized":
            self._score_alone(branch, running, scoring, deadline)

    def _choice_ids(self, branch: Branch, choice: str | tuple[int, ...]) -> list[int]:
        if isinstance(choice, str):
            ids = self.vocabulary.encode((Part(choice),), previous=branch.last_id())
        else:
            self.vocabulary.check_ids(choice)
            ids = list(choice)
        if not ids:
            raise InvalidRequest(f"the choice {cut(choice)} has no tokens", param="choices")
        return ids

    def _score_alone(self, branch: Branch, running: Running, scoring: _Scoring, deadline: float | None) -> None:
        """Each choice without its context, on a scratch branch: its first token has no logprob and counts as 0."""
        for index, ids in enumerate(scoring.ids):
            if len(ids) < 2:
                continue
            scratch, request_id = next(self._ids), self._new_request(branch, running)
            scoring.alone[request_id] = (index, scratch)
            self._scores[request_id] = scoring
            self.to_scheduler.append(OpenBranch(scratch, branch.program_id, branch.namespace))
            self.to_scheduler.append(
                SubmitScore(request_id, scratch, ints(ids[:1]), (ints(ids[1:]),), deadline, self._clock())
            )

    def _fork(self, branch: Branch, operation: Fork) -> bool:
        if self._long_text_waits(branch):
            return False
        self._settle(branch)
        if branch.num_unsent > SHARED_UNSENT:
            self._prefill(branch, operation)  # computed once, before there are children to compute it
            return False
        branch.queue.popleft()
        children = [c for label in operation.children if (c := self._branches.get((branch.client, label))) is not None]
        for child in children:
            child.log.close()
            child.log = branch.log.fork()
            child.num_unsent = branch.num_unsent
            child.turns = branch.turns.copy() if branch.turns else None
            child.marks = dict(branch.marks)
            child.spans = branch.spans
            child.running = None
        if children:
            self.to_scheduler.append(ForkBranch(branch.branch_id, tuple(child.branch_id for child in children)))
        for child in children:
            if child.close_when_unpinned and not child.num_pins:
                self._close(child, superseded=False)
            else:
                self._advance(child)
        return True

    def _join(self, branch: Branch, join: Join) -> bool:
        named = self._named_by(branch, join)
        must_be_idle = [b for b in named if b.label == join.winner or any(b.label == label for label, _ in join.spans)]
        for other in must_be_idle:
            if not other.is_idle and other.error is None:
                self._wait_for(branch, other)
                return False
        branch.queue.popleft()
        for other in named:
            other.num_pins -= 1
        for other in must_be_idle:
            if other.error is not None:
                raise CauseElsewhere(other.error)
        missing = (
            {join.winner, *(label for label, _ in join.spans)} - {b.label for b in must_be_idle} - {None, branch.label}
        )
        if missing:
            raise InvalidRequest(f"branch {min(missing)} is not open, so it cannot be joined", param="winner")  # type: ignore[type-var]
        self._append_spans(branch, join)
        if join.winner is not None and join.winner != branch.label:
            self._adopt(branch, self._branches[branch.client, join.winner])
        dropped = set(join.drop)
        for other in named:
            if other.label in dropped and not other.closed:
                self._close(other, superseded=True)
            elif other.close_when_unpinned and not other.num_pins and not other.closed:
                self._close(other, superseded=False)
        return True

    def _wait_for(self, branch: Branch, other: Branch) -> None:
        ahead: Branch | None = other
        while ahead is not None:
            if ahead is branch:
                raise InvalidRequest(
                    "these branches wait for each other to be joined; none can go first", param="winner"
                )
            ahead = ahead.waits_for
        branch.waits_for = other
        other.waiters.append(branch)

    def _append_spans(self, branch: Branch, join: Join) -> None:
        for label, mark in join.spans:
            source = self._branches[branch.client, label]
            self._settle(source)
            snapshot = source.marks.get(mark)
            if snapshot is None:
                raise InvalidRequest(f"mark {mark} is not known on the branch to be appended", param="spans")
            branch.pending.append(tuple(source.log.read(snapshot.length, source.log.length).tolist()))

    def _adopt(self, branch: Branch, winner: Branch) -> None:
        """The winner's tokens, text and marks become the branch's; the winner is closed."""
        branch.log.close()
        branch.log, winner.log = winner.log, TokenLog()
        branch.num_unsent, winner.num_unsent = winner.num_unsent, 0
        branch.pending, branch.pending_bytes = winner.pending, winner.pending_bytes
        branch.turns, branch.spans = winner.turns, winner.spans
        branch.marks = {**branch.marks, **winner.marks}
        self.to_scheduler.append(JoinBranch(branch.branch_id, winner.branch_id))
        self._forget(winner)

    # ------------------------------------------------------------ endings

    def _end(self, branch: Branch) -> None:
        """The running operation is over; go on."""
        branch.running = None
        if branch.close_when_unpinned and not branch.num_pins:
            self._close(branch, superseded=False)
        else:
            self._advance(branch)

    def _fail_operation(self, branch: Branch, operation: Operation, error: Error) -> None:
        self._drop_operation(branch, operation, error)
        self._fail(branch, error)

    def _drop_operation(self, branch: Branch, operation: Operation | Awaited, error: Error) -> None:
        """An operation that will not be carried out."""
        if (op := getattr(operation, "op", None)) is not None:
            self._tell(branch.client, Failed(error, op=op))
        elif isinstance(operation, Fork):
            for label in operation.children:
                if (child := self._branches.get((branch.client, label))) is not None:
                    child.running = None
                    self._fail(child, error)
        elif isinstance(operation, Join):
            for other in self._named_by(branch, operation):
                other.num_pins = max(0, other.num_pins - 1)
                if other.close_when_unpinned and not other.num_pins:
                    self._close(other, superseded=False)

    def _fail(self, branch: Branch, error: Error) -> None:
        """Everything that waits on the branch fails with this cause, and whatever comes later."""
        if branch.error is None:
            branch.error = error
            self._tell(branch.client, Failed(error, branch=branch.label))
        self._stop_running(branch, branch.error)
        while branch.queue:
            self._drop_operation(branch, branch.queue.popleft(), branch.error)
        if branch.waits_for is not None:
            branch.waits_for.waiters = [b for b in branch.waits_for.waiters if b is not branch]
            branch.waits_for = None
        waiters, branch.waiters = branch.waiters, []
        for waiter in waiters:
            waiter.waits_for = None
            self._advance(waiter)

    def _stop_running(self, branch: Branch, error: Error) -> None:
        running, branch.running = branch.running, None
        if running is None:
            return
        if running.request_ids:
            self.to_scheduler.append(AbortRequests(tuple(sorted(running.request_ids))))
            for request_id in running.request_ids:
                self._requests.pop(request_id, None)
                self._end_scoring(request_id)
        if isinstance(running.op, get_args(Awaited)):
            self._drop_operation(branch, running.op, error)

    def _close(self, branch: Branch, *, superseded: bool, tell: bool = True) -> None:
        """Release a branch; what runs on it is aborted. One that a queued join names, or that is being forked, waits."""
        if branch.closed:
            return
        is_being_made = branch.running is not None and isinstance(branch.running.op, Fork) and branch.log.length == 0
        if tell and (
            branch.num_pins or (is_being_made and branch.error is None and branch.running.op.branch != branch.label)
        ):  # type: ignore[union-attr]
            branch.close_when_unpinned = True
            return
        branch.error = branch.error or CLOSED
        self._fail(branch, branch.error)
        self.to_scheduler.append(CloseBranches((branch.branch_id,), superseded))
        branch.log.close()
        self._forget(branch)

    def _forget(self, branch: Branch) -> None:
        branch.closed = True
        if self._branches.pop((branch.client, branch.label), None) is not None:
            self._num_open[branch.client] -= 1

    def _cancel(self, client: int, message: Cancel) -> None:
        ops, labels, programs = set(message.ops), set(message.branches), set(message.programs)
        for branch in [b for (c, _), b in self._branches.items() if c == client]:
            mine = [*branch.queue, *([branch.running.op] if branch.running else [])]
            named = branch.label in labels or branch.program in programs
            if (named and mine) or any(getattr(o, "op", None) in ops for o in mine):
                self._fail(branch, CANCELLED)

    # ------------------------------------------------------------ the scheduler's events

    def on_scheduler(self, message: FromScheduler) -> None:
        """Take one event. What nobody waits for any more is dropped."""
        match message:
            case Produced():
                self._on_produced(message)
            case Finished():
                self._on_finished(message)
            case Refused():
                self._on_refused(message)
            case BranchExplained() | StatsReply():
                if (answer := self._queries.pop(message.query_id, None)) is not None:
                    answer(message)
            case SchedulerReady():
                self.ready = message
            case Heartbeat():
                pass
            case _:
                assert_never(message)

    def _on_produced(self, message: Produced) -> None:
        entry = self._requests.get(message.request_id)
        if entry is None or (answer := entry[1].answer) is None or answer.match is not None:
            return
        branch, running = entry
        self._send_delta(branch, running, answer.push(message))
        if answer.match is not None:
            self.to_scheduler.append(StopAt(message.request_id, answer.num_kept))

    def _send_delta(self, branch: Branch, running: Running, delta: Delta | None) -> None:
        if delta is not None and isinstance(running.op, Generate) and running.op.params.stream:
            self._tell(branch.client, delta)

    def _on_finished(self, message: Finished) -> None:
        entry = self._requests.pop(message.request_id, None)
        if entry is None:
            return
        branch, running = entry
        running.request_ids.discard(message.request_id)
        match running.op:
            case Generate():
                self._finish_generation(branch, running, message)
            case Prefill():
                self._note_prompt(branch, running, message.usage)
                self._tell(branch.client, Prefilled(running.op.op, message.usage))
                self._end(branch)
            case Fork():
                self._note_prompt(branch, running, message.usage)
                self._end(branch)
            case Score():
                self._on_scored(branch, running, message)
            case _:
                raise AssertionError(f"{type(running.op).__name__} has no request")

    def _finish_generation(self, branch: Branch, running: Running, message: Finished) -> None:
        answer = running.answer
        assert answer is not None, "a generation has an answer"
        delta, ending = answer.finish(message)
        ids = ending.generated.token_ids
        if message.reason == "abort":
            self._fail(branch, CANCELLED)
            return
        assert branch.log.length + len(ids) == message.length, (
            f"the branch has {branch.log.length} + {len(ids)} tokens here, {message.length} at the scheduler"
        )
        self._note_prompt(branch, running, message.usage)
        start = branch.log.length
        branch.log.append(ids)
        if ids:
            self._note(branch, Span(start, branch.log.length, "generated", running.op.op))  # type: ignore[union-attr]
        if ending.rest:
            branch.pending.append(Part(ending.rest))
            branch.pending_bytes += len(ending.rest)
        self._send_delta(branch, running, delta)
        self._tell(branch.client, ending.generated)
        self._end(branch)

    def _note_prompt(self, branch: Branch, running: Running, usage: Usage) -> None:
        """The tokens that this request brought: those it found cached, then those it computed."""
        known = branch.spans[-1].stop if branch.spans else 0
        op = getattr(running.op, "op", None)
        cached = min(max(usage.cached_tokens, known), running.prompt_len)
        if cached > known:
            self._note(branch, Span(known, cached, "cached", op))
        if running.prompt_len > cached:
            self._note(branch, Span(cached, running.prompt_len, "computed", op))

    def _note(self, branch: Branch, span: Span) -> None:
        branch.spans = (*branch.spans, span)

    def _on_scored(self, branch: Branch, running: Running, message: Finished) -> None:
        scoring = self._scores.pop(message.request_id)
        if message.request_id in scoring.alone:
            index, scratch = scoring.alone.pop(message.request_id)
            scoring.bare[index] = [0.0, *message.choice_logprobs[0]]
            self.to_scheduler.append(CloseBranches((scratch,), superseded=True))
        else:
            scoring.finished = message
            self._note_prompt(branch, running, message.usage)
        if scoring.finished is None or scoring.alone:
            return
        scored = scoring.result()
        if scoring.operation.append:
            ids = scoring.ids[scored.best]
            branch.log.append(ids)
            branch.num_unsent += len(ids)
        self._tell(branch.client, scored)
        self._end(branch)

    def _end_scoring(self, request_id: int) -> None:
        scoring = self._scores.pop(request_id, None)
        if scoring is not None and request_id in scoring.alone:
            self.to_scheduler.append(CloseBranches((scoring.alone.pop(request_id)[1],), superseded=True))

    def _on_refused(self, message: Refused) -> None:
        entry = self._requests.pop(message.request_id, None)
        if entry is None:
            return
        branch, running = entry
        running.request_ids.discard(message.request_id)
        self._end_scoring(message.request_id)
        self._fail(branch, message.error)


class CauseElsewhere(RequestError):
    """A failure of another branch, as the cause of this one's."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message, param=error.param, code=error.code)
        self.type = error.type


class _Scoring:
    """One Score operation: the logprobs in context, and, for one of the rules, those of each choice alone."""

    def __init__(self, operation: Score, ids: list[list[int]]) -> None:
        self.operation, self.ids = operation, ids
        self.finished: Finished | None = None
        self.alone: dict[int, tuple[int, int]] = {}  # request -> (choice, scratch branch)
        self.bare: list[list[float]] = [[0.0] for _ in ids]

    def result(self) -> Scored:
        assert self.finished is not None, "scored before the scores came"
        rows = [list(row) for row in self.finished.choice_logprobs]
        match self.operation.method:
            case "token_length_normalized":
                scores = rules.token_length_normalized(rows)
            case "sum":
                scores = rules.summed(rows)
            case "greedy_token_selection":
                scores = rules.greedy_token_selection(rows)
            case "unconditional_likelihood_normalized":
                scores = rules.unconditional_likelihood_normalized(rows, self.bare)
            case _:
                assert_never(self.operation.method)
        logprobs = tuple(TokenLogprobs(tuple(ids), tuple(row)) for ids, row in zip(self.ids, rows, strict=True))
        return Scored(self.operation.op, rules.first_best(scores), tuple(scores), logprobs, self.finished.usage)
