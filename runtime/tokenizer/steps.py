"""What each operation does when its turn comes. A step is a generator: it yields while what it asked for is under way."""

from __future__ import annotations

from collections.abc import Generator
from itertools import groupby
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from anabranch.runtime.errors import InvalidRequest, NotFound, from_wire
from anabranch.runtime.messages import (
    Append,
    BranchExplained,
    Close,
    CloseBranches,
    ControlText,
    Delta,
    Error,
    Explain,
    ExplainBranch,
    Explained,
    Failed,
    Finished,
    Fork,
    ForkBranch,
    Generate,
    Generated,
    GetTokens,
    Grammar,
    Join,
    JoinBranch,
    Lease,
    LeaseBranch,
    Mark,
    OpenBranch,
    Prefill,
    Prefilled,
    Refused,
    RoleBegin,
    RoleEnd,
    Rollback,
    RollbackBranch,
    Score,
    Scored,
    Segment,
    Span,
    StopAt,
    Submit,
    SubmitScore,
    Text,
    Tokenize,
    TokenLogprobs,
    Tokens,
    TokensAre,
    Usage,
    as_ints,
    ints,
)
from anabranch.runtime.tokenizer.branches import ID_BYTES, Branch, Origin, Place, Program, encode_pieces
from anabranch.runtime.tokenizer.detokenizer import Detokenizer
from anabranch.runtime.tokenizer.events import Assembler, Piece, Whole
from anabranch.runtime.tokenizer.requests import Barrier, Operation
from anabranch.runtime.tokenizer.requests import Steps as StepGenerator
from anabranch.runtime.tokenizer.scoring import METHODS, Choices, best_of, relative_to_no_context, tokenize_choices
from anabranch.runtime.tokenizer.templates import no_template_error
from anabranch.runtime.tokenizer.turns import ChatTurns
from anabranch.runtime.tokenizer.validation import (
    MAX_CHOICES,
    MAX_LEASE_S,
    MAX_ROLE_CHARS,
    Bounds,
    Stops,
    check_ids,
    check_known,
    check_number,
    check_text,
    check_types,
    sampling_of,
    stops_of,
)
from anabranch.runtime.tokenizer.vocabulary import Part

if TYPE_CHECKING:
    from anabranch.runtime.tokenizer.service import Client, TokenizerService
    from anabranch.runtime.tokenizer.vocabulary import Vocabulary

CONTEXT_TOKENS = 16  # enough of what stands before to settle spaces and characters cut in two
ALONE_METHOD = "unconditional_likelihood_normalized"


class Steps:
    def __init__(self, service: TokenizerService) -> None:
        self.service = service
        self.vocabulary = service.model.vocabulary

    def begin(self, operation: Operation) -> StepGenerator:
        body, branch = operation.body, operation.branch
        for error in (operation.problem, operation.doom, branch.failed):
            if error is not None and not isinstance(body, Barrier | Fork | Close):
                return _fail(error)
        match body:
            case Append():
                return self._append(operation, body)
            case Generate():
                return self._generate(operation, body)
            case Prefill():
                return self._prefill(operation, body)
            case Score():
                return self._score(operation, body)
            case Fork():
                return self._fork(operation)
            case Mark():
                return self._mark(operation, body)
            case Rollback():
                return self._rollback(operation, body)
            case Join():
                return self._join(operation, body)
            case Lease():
                return self._lease(operation, body)
            case Explain():
                return self._explain(operation, body)
            case GetTokens():
                return self._get_tokens(operation, body)
            case Barrier():
                return self._barrier(operation)
            case Close():
                raise AssertionError("closing is no step")
            case _:
                assert_never(body)

    def release(self, operation: Operation) -> None:
        """Give back what an operation held of other branches; it is done, whatever became of it."""
        operation.assembler = None
        for barrier in operation.barriers:
            barrier.branch.holds -= 1
            barrier.needs.clear()
            self.service.wake(barrier.branch)
        operation.barriers.clear()
        if isinstance(operation.body, Barrier):
            self.service.reached(operation)  # a join whose source is gone must not wait for it
        self.service.dropped += [branch for branch in operation.dropped if branch is not operation.winner]
        operation.dropped = ()

    # ------------------------------------------------------------ text

    def _append(self, operation: Operation, message: Append) -> StepGenerator:
        for segment in message.segments:
            self._add(operation.branch, segment)
        return
        yield

    def _add(self, branch: Branch, segment: Segment) -> None:
        """Raises InvalidRequest; text is only noted, and tokenized when it is needed."""
        match segment:
            case Text(text):
                self._count(branch, check_text(text, "text"))
                if text:
                    self._begin_plain(branch)
                branch.add_text(text)
            case ControlText(text, add_bos):
                self._count(branch, check_text(text, "text"))
                if text and add_bos and not self._starts_with_bos(text):
                    self._begin_plain(branch)
                branch.add_text(text, control=True)
            case Tokens(token_ids):
                ids = check_ids(token_ids, "token_ids")
                check_known(ids, self.vocabulary, "token_ids")
                self._check_fits(branch.length + branch.pieces_ids + len(ids))
                branch.add_ids(ints(ids))
            case RoleBegin(role):
                if len(check_text(role, "role")) > MAX_ROLE_CHARS:
                    raise InvalidRequest(f"a role has {len(role)} characters; the limit is {MAX_ROLE_CHARS}", param="role")
                branch.add_text(self._turns(branch).begin(role, at_start=branch.is_empty), control=True)
            case RoleEnd():
                branch.add_text(self._turns(branch).end(), control=True)
            case _:
                assert_never(segment)

    def _begin_plain(self, branch: Branch) -> None:
        """A branch that begins with plain text begins with BOS, if the model expects one."""
        if branch.is_empty and self.vocabulary.adds_bos and self.vocabulary.bos_token_id is not None:
            branch.add_ids(ints([self.vocabulary.bos_token_id]))

    def _starts_with_bos(self, text: str) -> bool:
        bos = self.vocabulary.bos_token_id
        name = self.vocabulary.token(bos) if bos is not None else None
        return bool(name) and text.startswith(name or "")

    def _begin_empty(self, branch: Branch) -> None:
        """Something must be computed; an empty branch takes the model's BOS. Raises InvalidRequest if there is none."""
        if not branch.is_empty:
            return
        if self.vocabulary.bos_token_id is None:
            raise InvalidRequest("the prompt is empty, and the model has no BOS token: append text first", param="prompt")
        branch.add_ids(ints([self.vocabulary.bos_token_id]))

    def _turns(self, branch: Branch) -> ChatTurns:
        if branch.turns is None:
            raise no_template_error(self.service.model.template_problem)
        return branch.turns

    def _count(self, branch: Branch, text: str) -> None:
        """Refuse text that can never fit, before it is tokenized."""
        limit = self.service.limits.max_text_bytes
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if branch.pieces_bytes + num_bytes > limit:
            raise InvalidRequest(
                f"{branch.pieces_bytes + num_bytes} bytes of text wait on the branch; the limit is {limit}", param="text",
                code="context_length_exceeded",
            )  # fmt: skip
        self._check_fits(branch.length + self.vocabulary.least_tokens(text))

    def _check_fits(self, least: int) -> None:
        """Raises InvalidRequest for a branch of at least so many tokens, if that can never be computed."""
        context = self.service.ready.context_length
        if least > context:
            raise InvalidRequest(
                f"the prompt has at least {least} tokens; the context is {context} tokens long, prompt and answer together: "
                "shorten the prompt", param="prompt", code="context_length_exceeded",
            )  # fmt: skip

    def _seal(self, operation: Operation) -> StepGenerator:
        """Tokenize the text that is pending; off the loop if it is much."""
        branch = operation.branch
        if not branch.pieces:
            return
        pieces = list(branch.pieces)
        last = branch.last_ids(1)
        at_start, previous = not branch.length, last[0] if last else None

        def work() -> bytes:
            return encode_pieces(self.vocabulary, pieces, at_start=at_start, previous=previous)

        if branch.pieces_bytes <= self.service.limits.inline_text_bytes:
            ids = work()
        else:
            job = self.service.start_job(operation, "text", work)
            yield
            ids = _job_result(operation, job)
        branch.pieces.clear()
        branch.pieces_bytes = branch.pieces_ids = 0
        branch.ready += ids

    # ------------------------------------------------------------ generating

    def _generate(self, operation: Operation, message: Generate) -> StepGenerator:
        branch, params = operation.branch, message.params
        check_types(params)
        stops = stops_of(params, self.vocabulary)
        sampling = sampling_of(params, self.vocabulary, stops, branch_seed=branch.seed)
        if params.grammar is not None:
            yield from self._check_grammar(operation, params.grammar)
        self._begin_empty(branch)
        yield from self._seal(operation)
        first = params.prompt_logprobs_from
        if first is not None and first >= branch.length:
            raise InvalidRequest(
                f"prompt_logprobs_from is {first}, but the prompt has {branch.length} tokens", param="prompt_logprobs_from"
            )
        operation.assembler = Assembler(self.vocabulary, params, stops, branch.last_ids(CONTEXT_TOKENS))
        request_id = self.service.new_id()
        submit = Submit(
            request_id, branch.branch_id, branch.ready, params.max_tokens, sampling, first, operation.deadline,
            self.service.clock(),
        )  # fmt: skip
        finished = yield from self._run(operation, submit)
        piece, whole = operation.assembler.finish(finished.length - len(branch.log))
        self._settle_generated(operation, finished, whole, request_id)
        self.send_delta(operation, piece)
        self.service.send(branch.client, _generated(message.op, whole, finished, stops, sampling.seed))

    def _check_grammar(self, operation: Operation, grammar: Grammar) -> StepGenerator:
        check = self.service.model.check_grammar
        if check is None:
            raise InvalidRequest("constrained output is not enabled in this engine", param="grammar")
        key = self.service.grammar_key(grammar)
        if key in self.service.accepted_grammars:
            return
        job = self.service.start_job(operation, "grammar", lambda: check(grammar))
        yield
        _job_result(operation, job)
        self.service.accept_grammar(key)

    def _run(self, operation: Operation, submit: Submit | SubmitScore) -> Generator[None, None, Finished]:
        """Let the scheduler run a request on the operation's own branch, whose ready ids go with it."""
        branch, sent = operation.branch, operation.branch.ready
        branch.ready = b""
        self.service.start_request(operation, submit, submit.request_id)
        while submit.request_id in operation.outstanding:
            yield
        result = operation.results.pop(submit.request_id)
        if isinstance(result, Refused):
            branch.ready = sent + branch.ready
            raise from_wire(result.error)
        assert isinstance(result, Finished)
        cached = max(0, min(len(sent) // ID_BYTES, result.usage.cached_tokens - len(branch.log)))
        branch.log.append(sent[: cached * ID_BYTES], "cached", operation.op)
        branch.log.append(sent[cached * ID_BYTES :], "computed", operation.op)
        return result

    def _settle_generated(self, operation: Operation, finished: Finished, whole: Whole, request_id: int) -> None:
        """Put what was generated on the branch; a stop found only at the end cuts the scheduler's branch, too."""
        branch = operation.branch
        if whole.num_tokens < finished.length - len(branch.log):
            self.service.to_scheduler.append(StopAt(request_id, whole.num_tokens))
        at = 0
        for is_forced, group in groupby(whole.forced):
            count = len(list(group))
            origin: Origin = "forced" if is_forced else "generated"
            branch.log.append(ints(whole.token_ids[at : at + count]), origin, operation.op)
            at += count
        branch.add_text(whole.remainder)

    def send_delta(self, operation: Operation, piece: Piece) -> None:
        body = operation.body
        if piece and isinstance(body, Generate) and body.params.stream:
            self.service.send(operation.branch.client, Delta(body.op, piece.text, piece.token_ids, piece.logprobs))

    def _prefill(self, operation: Operation, message: Prefill) -> StepGenerator:
        branch = operation.branch
        yield from self._seal(operation)
        usage = Usage()
        if branch.length:
            request_id = self.service.new_id()
            submit = Submit(
                request_id, branch.branch_id, branch.ready, 0, deadline=operation.deadline, arrival=self.service.clock()
            )
            finished = yield from self._run(operation, submit)
            usage = finished.usage
            if finished.reason == "abort":
                raise from_wire(_cancelled())
        self.service.send(branch.client, Prefilled(message.op, usage))

    # ------------------------------------------------------------ scoring

    def _score(self, operation: Operation, message: Score) -> StepGenerator:
        branch = operation.branch
        self._check_choices(message)
        self._begin_empty(branch)
        choices = yield from self._tokenize_choices(operation, message)
        shared, rest = choices.before[: choices.shared], choices.before[choices.shared :]
        branch.ready += ints(shared)
        request_id = self.service.new_id()
        submit = SubmitScore(
            request_id, branch.branch_id, branch.ready, tuple(ints(ids) for ids in choices.ids), operation.deadline,
            self.service.clock(),
        )  # fmt: skip
        try:
            finished = yield from self._run(operation, submit)
        except BaseException:
            branch.ready += ints(rest)
            raise
        if len(finished.choice_logprobs) != len(choices.ids):
            branch.ready += ints(rest)
            raise from_wire(_cancelled())
        scored = [lps[skip:] for lps, skip in zip(finished.choice_logprobs, choices.skipped, strict=True)]
        if message.method == ALONE_METHOD:
            alone = yield from self._score_alone(operation, [choices.scored(i) for i in range(len(scored))])
            scores = relative_to_no_context(scored, alone)
        else:
            scores = METHODS[message.method](scored)
        best = best_of(scores)
        branch.ready += ints(choices.ids[best] if message.append else rest)
        logprobs = tuple(TokenLogprobs(tuple(choices.scored(i)), tuple(lps)) for i, lps in enumerate(scored))
        self.service.send(branch.client, Scored(message.op, best, tuple(scores), logprobs, finished.usage))

    def _check_choices(self, message: Score) -> None:
        if not 0 < len(message.choices) <= MAX_CHOICES:
            raise InvalidRequest(f"there must be 1 to {MAX_CHOICES} choices, got {len(message.choices)}", param="choices")
        if message.method not in METHODS and message.method != ALONE_METHOD:
            raise InvalidRequest(f"method must be one of {', '.join([*METHODS, ALONE_METHOD])}", param="method")
        num_bytes = 0
        for choice in message.choices:
            if isinstance(choice, str):
                num_bytes += len(check_text(choice, "choices").encode())
            else:
                check_known(check_ids(choice, "choices"), self.vocabulary, "choices")
                num_bytes += ID_BYTES * len(choice)
            if not choice:
                raise InvalidRequest("choices must not hold an empty one", param="choices")
        if num_bytes > self.service.limits.max_text_bytes:
            raise InvalidRequest(f"the choices have {num_bytes} bytes, over the limit of {self.service.limits.max_text_bytes}")

    def _tokenize_choices(self, operation: Operation, message: Score) -> Generator[None, None, Choices]:
        """Seal what stands before the last pending text; that text is tokenized together with each choice."""
        branch = operation.branch
        first = len(branch.pieces)
        while first and isinstance(branch.pieces[first - 1], Part):
            first -= 1
        tail = [piece for piece in branch.pieces[first:] if isinstance(piece, Part)]
        num_bytes = sum(len(part.text) for part in tail) * len(message.choices)
        num_bytes += sum(len(choice) for choice in message.choices)
        del branch.pieces[first:]
        branch.pieces_bytes -= sum(len(part.text) for part in tail)
        try:
            return (yield from self._tokenize_with(operation, message, tail, num_bytes))
        except BaseException:  # refused, or cancelled in between: the text is still the branch's
            for part in tail:
                branch.add_text(part.text, control=part.control)
            raise

    def _tokenize_with(
        self, operation: Operation, message: Score, tail: list[Part], num_bytes: int
    ) -> Generator[None, None, Choices]:
        branch = operation.branch
        yield from self._seal(operation)
        last = branch.last_ids(1)
        at_start, previous = not branch.length, last[0] if last else None

        def work() -> Choices:
            return tokenize_choices(self.vocabulary, tail, message.choices, at_start=at_start, previous=previous)

        if num_bytes <= self.service.limits.inline_text_bytes:
            return work()
        job = self.service.start_job(operation, "text", work)
        yield
        choices: Choices = _job_result(operation, job)
        return choices

    def _score_alone(self, operation: Operation, ids: list[list[int]]) -> Generator[None, None, list[list[float]]]:
        """Logprobs of each choice's tokens without a context, on branches of their own; those with one first token share."""
        branch, service = operation.branch, self.service
        alone = [[0.0] * len(own) for own in ids]
        requests: dict[int, list[int]] = {}
        opened: list[int] = []
        for first in dict.fromkeys(own[0] for own in ids if len(own) > 1):
            members = [i for i, own in enumerate(ids) if own[0] == first and len(own) > 1]
            branch_id, request_id = service.new_id(), service.new_id()
            service.to_scheduler.append(OpenBranch(branch_id, branch.program.program_id, branch.namespace))
            opened.append(branch_id)
            submit = SubmitScore(
                request_id, branch_id, ints([first]), tuple(ints(ids[i][1:]) for i in members), operation.deadline,
                service.clock(),
            )  # fmt: skip
            service.start_request(operation, submit, request_id)
            requests[request_id] = members
        try:
            while operation.outstanding:
                yield
        finally:
            service.to_scheduler.append(CloseBranches(tuple(opened), superseded=True))
        for request_id, members in requests.items():
            result = operation.results.pop(request_id)
            if isinstance(result, Refused):
                raise from_wire(result.error)
            if len(result.choice_logprobs) != len(members):
                raise from_wire(_cancelled())
            for i, logprobs in zip(members, result.choice_logprobs, strict=True):
                alone[i][1:] = logprobs
        return alone

    # ------------------------------------------------------------ the shape of the tree

    def _fork(self, operation: Operation) -> StepGenerator:
        parent, children = operation.branch, operation.children
        if parent.failed is None:
            try:
                yield from self._seal(operation)
            except InvalidRequest as fault:
                parent.failed = fault.to_wire()
                self.service.send(parent.client, Failed(parent.failed, None, parent.label))
        self.service.to_scheduler.append(ForkBranch(parent.branch_id, tuple(c.branch_id for c in children)))
        closed = tuple(child.branch_id for child in children if child.is_closed)
        if closed:
            self.service.to_scheduler.append(CloseBranches(closed))
        for child in children:
            child.inherit(parent)
            child.is_born, child.parent = True, None
            self.service.wake(child)

    def _mark(self, operation: Operation, message: Mark) -> StepGenerator:
        yield from self._seal(operation)
        operation.branch.mark(message.mark)

    def _rollback(self, operation: Operation, message: Rollback) -> StepGenerator:
        branch = operation.branch
        place = branch.marks.get(message.mark)
        if place is None:
            raise NotFound(f"the branch has no mark {message.mark}, or was rolled back beyond it", param="mark")
        if branch.cut(place):
            self.service.to_scheduler.append(RollbackBranch(branch.branch_id, place.length))
        return
        yield

    def _barrier(self, operation: Operation) -> StepGenerator:
        """Tokenize, then stand still until the join has been carried out."""
        assert isinstance(operation.body, Barrier)
        join = operation.body.join
        branch = operation.branch
        if branch.failed is None:
            try:
                yield from self._seal(operation)
            except InvalidRequest as fault:
                branch.failed = fault.to_wire()
        if not join.is_done:
            operation.needs.add(join.branch)
            self.service.reached(operation)
        while operation.needs:
            yield

    def _join(self, operation: Operation, message: Join) -> StepGenerator:
        branch, winner = operation.branch, operation.winner
        while operation.needs:
            yield
        gone = next((source for source in (winner, *operation.sources) if source is not None and source.is_closed), None)
        if gone is not None:
            raise NotFound(f"branch {gone.label} was closed before the join", param="winner")
        yield from self._seal(operation)
        if winner is not None:
            self._take_over(branch, winner)
        for source, (_, mark) in zip(operation.sources, message.spans, strict=True):
            branch.ready += self._since(source, mark)
            self._check_fits(branch.length)

    def _take_over(self, branch: Branch, winner: Branch) -> None:
        if winner.failed is not None:
            raise from_wire(winner.failed)
        self.service.to_scheduler.append(JoinBranch(branch.branch_id, winner.branch_id))
        branch.log, branch.ready = winner.log, winner.ready
        branch.marks, branch.turns = winner.marks, winner.turns
        self.service.remove(winner)

    def _since(self, source: Branch, mark: int) -> bytes:
        if source.failed is not None:
            raise from_wire(source.failed)
        place: Place | None = source.marks.get(mark)
        if place is None:
            raise NotFound(f"branch {source.label} has no mark {mark}", param="spans")
        return source.log.since(place.length) + source.ready[max(0, place.length - len(source.log)) * ID_BYTES :]

    def _lease(self, operation: Operation, message: Lease) -> StepGenerator:
        check_number("seconds", message.seconds, Bounds(float, 0.0, MAX_LEASE_S))
        until = self.service.clock() + message.seconds if message.seconds > 0 else None
        self.service.to_scheduler.append(LeaseBranch(operation.branch.branch_id, until))
        return
        yield

    # ------------------------------------------------------------ questions

    def _get_tokens(self, operation: Operation, message: GetTokens) -> StepGenerator:
        yield from self._seal(operation)
        branch = operation.branch
        self.service.send(branch.client, TokensAre(message.op, branch.log.since(0) + branch.ready))

    def _explain(self, operation: Operation, message: Explain) -> StepGenerator:
        yield from self._seal(operation)
        branch, service = operation.branch, self.service
        query_id = service.start_query(operation)
        service.to_scheduler.append(ExplainBranch(query_id, branch.branch_id, branch.ready))
        yield
        told = operation.results.pop(query_id)
        assert isinstance(told, BranchExplained)
        spans = _with_text(self.vocabulary, _unpacked(branch), _spans_now(branch, told.cached_now))
        text = "".join(span.text for span in spans)
        service.send(branch.client, Explained(message.op, branch.length, told.cached_now, spans, told.miss, text))

    def tokenize(self, client: Client, message: Tokenize) -> None:
        """Ids of segments, as they would be on a new branch."""
        scratch = Branch(
            client.number, 0, 0, Program(client.number, 0, 0), b"", 0, 0,
            ChatTurns(self.service.model.turns) if self.service.model.turns is not None else None,
        )  # fmt: skip
        for segment in message.segments:
            self._add(scratch, segment)
        ids = encode_pieces(self.vocabulary, scratch.pieces, at_start=True, previous=None)
        self.service.send(client.number, TokensAre(message.op, ids))


def _fail(error: Error) -> StepGenerator:
    raise from_wire(error)
    yield


def _job_result(operation: Operation, job_id: int) -> Any:
    result = operation.results.pop(job_id)
    if isinstance(result, BaseException):
        raise result
    return result


def _cancelled() -> Error:
    return Error("cancelled", "the operation was cancelled")


def _spans_now(branch: Branch, cached_now: int) -> list[Span]:
    """The branch's spans as a reader of this branch sees them.

    What an ancestor computed before the fork was there for this branch: cached. Of what waits to be sent, the beginning
    that has KV now is cached, too.
    """
    spans: list[Span] = []

    def add(start: int, stop: int, origin: Origin, op: int | None) -> None:
        if spans and spans[-1].origin == origin == "cached":
            spans[-1] = Span(spans[-1].start, stop, origin, spans[-1].op)
        elif start < stop:
            spans.append(Span(start, stop, origin, op))

    for span in branch.log.spans():
        is_inherited = span.origin == "computed" and span.stop <= branch.inherited
        add(span.start, span.stop, "cached" if is_inherited else span.origin, span.op)
    sent = len(branch.log)
    has_kv = min(max(cached_now, sent), branch.length)
    add(sent, has_kv, "cached", None)
    add(has_kv, branch.length, "pending", None)
    return spans


def _with_text(vocabulary: Vocabulary, ids: list[int], spans: list[Span]) -> tuple[Span, ...]:
    """The spans, each with its text. Together: the text of the whole."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False)
    texts = [detokenizer.push(ids[span.start : span.stop]) for span in spans]
    if texts:
        texts[-1] += detokenizer.finish()
    return tuple(msgspec.structs.replace(span, text=text) for span, text in zip(spans, texts, strict=True))


def _unpacked(branch: Branch) -> list[int]:
    ids: list[int] = as_ints(branch.log.since(0) + branch.ready).tolist()
    return ids


def _generated(op: int, whole: Whole, finished: Finished, stops: Stops, seed: int) -> Generated:
    reason = finished.reason
    matched: str | int | None = None
    if whole.matched is not None:
        reason, matched = "stop", whole.matched
    elif reason == "stop" and finished.matched_token_id is not None:
        matched = stops.named.get(finished.matched_token_id, finished.matched_token_id)
    usage = msgspec.structs.replace(finished.usage, completion_tokens=whole.num_tokens)
    return Generated(
        op, whole.text, whole.token_ids, reason, matched, usage, whole.logprobs, finished.prompt_logprobs, seed
    )
