"""The tokenizer process's core, without I/O: clients' messages in, scheduler's messages out, and back.

Each branch is a queue of operations, carried out strictly in order; `steps.py` says what each does. Whoever drives it calls
`handle`, `on_scheduler`, `on_job` and `poll`, and then sends what stands in `to_scheduler` and `to_clients`. Work that takes long
(tokenizing much text, compiling a grammar) is given to `offload(lane, job_id, work)`, whose result comes back to `on_job`.

Rules that users can rely on
- Operations on one branch take effect in the order in which they were asked for; every operation with a label gets one answer.
- An operation that fails leaves its branch failed: later operations fail with the same first cause. So do children, and who takes it over.
- Cancelling ends exactly what it names, and does not fail the branch; what was generated until then stays.
- Closing ends what runs on a branch, except what other branches need: a fork that is under way, a join that waits for it.
- Forks, marks and questions are boundaries of tokenization: text before them is not tokenized together with text after.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from secrets import randbits
from typing import Any, Literal, assert_never

import msgspec

from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.errors import InvalidRequest, NotFound, RequestError, internal, invalid
from anabranch.runtime.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    Append,
    BranchExplained,
    BranchOptions,
    Cancel,
    Close,
    CloseBranches,
    Done,
    EngineLost,
    Error,
    Explain,
    Failed,
    Finished,
    Flush,
    FlushCache,
    Fork,
    FromScheduler,
    Generate,
    GetStats,
    GetTokens,
    Grammar,
    Heartbeat,
    Hello,
    Join,
    Lease,
    Mark,
    Open,
    OpenBranch,
    Prefill,
    Produced,
    QueryStats,
    Refused,
    Rollback,
    SchedulerReady,
    Score,
    StatsAre,
    StatsReply,
    StopAt,
    ToClient,
    Tokenize,
    ToScheduler,
    ToTokenizer,
    Welcome,
)
from anabranch.runtime.tokenizer.branches import Branch, Program
from anabranch.runtime.tokenizer.requests import Barrier, Body, Operation
from anabranch.runtime.tokenizer.steps import Steps
from anabranch.runtime.tokenizer.turns import ChatTurns, TurnTexts
from anabranch.runtime.tokenizer.validation import MAX_CHILDREN, check_options
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

log = logging.getLogger("anabranch.tokenizer")

Lane = Literal["text", "grammar"]
Offload = Callable[[Lane, int, Callable[[], Any]], None]
ACCEPTED_GRAMMARS = 4096

CANCELLED = Error("cancelled", "the operation was cancelled")
CLOSED = Error("cancelled", "the branch was closed before the operation was done (dropping its handle closes it: keep it until then)")
TAKEN = Error("cancelled", "the branch was taken over by a join before this operation; use the branch that it was joined to")
TIMED_OUT = Error("timeout_error", "the deadline passed before the operation was done: allow more time, or ask for less")


@dataclass(frozen=True, slots=True)
class ModelSide:
    """What the service needs of a model. `turns` None: it has no chat template that can be used, `template_problem` says why if it has
    one. `check_grammar` None: no grammars here."""

    name: str
    vocabulary: Vocabulary
    turns: TurnTexts | None
    check_grammar: Callable[[Grammar], None] | None = None
    template_problem: str = ""


@dataclass(eq=False, slots=True)
class Client:
    """One connection. Labels are the client's; nothing of it is known to others."""

    number: int
    branches: dict[int, Branch]
    operations: dict[int, Operation]
    programs: dict[int, Program]


@dataclass(frozen=True, slots=True)
class Question:
    """Asked outside any branch: `kind` says how the scheduler's reply is passed on."""

    client: int
    op: int
    kind: Literal["stats", "flush"]


class TokenizerService:
    """See above. `clock` is the scheduler's clock (time.monotonic)."""

    def __init__(
        self, model: ModelSide, ready: SchedulerReady, *, offload: Offload, clock: Callable[[], float],
        limits: LimitsConfig | None = None,
    ) -> None:  # fmt: skip
        self.model, self.ready, self.limits = model, ready, limits or LimitsConfig()
        self.clock = clock
        self.to_scheduler: list[ToScheduler] = []
        self.to_clients: list[tuple[int, ToClient]] = []
        self.clients: dict[int, Client] = {}
        self.lost: Error | None = None
        self.counters: Counter[str] = Counter()
        self.accepted_grammars: OrderedDict[bytes, None] = OrderedDict()
        self.last_heartbeat: float = clock()
        self._offload = offload
        self._steps = Steps(self)
        self._ids = itertools.count(1)  # branches, requests, programs, jobs and queries: never the same number twice
        self._waiting: dict[int, Operation] = {}  # id of a job, request or query -> the operation that waits for it
        self._questions: dict[int, Question] = {}
        self._deadlines: list[tuple[float, int, Operation]] = []
        self._due: deque[Branch] = deque()
        self.dropped: deque[Branch] = deque()  # by joins that are done; closed between operations: two joins may drop each other

    # ------------------------------------------------------------ what drives it

    def handle(self, client: int, message: ToTokenizer) -> None:
        """Take a client's message. Never raises for what a client sends."""
        if isinstance(message, Hello):
            self._hello(client, message)
            return
        record = self.clients.get(client)
        if record is None:
            self.counters["dropped_unannounced"] += 1
            return
        try:
            self._take(record, message)
        except RequestError as fault:
            self._answer_failed(record, message, fault.to_wire())
        except Exception as fault:
            log.exception("a %s failed", type(message).__name__)
            self.counters["internal_errors"] += 1
            self._answer_failed(record, message, internal(fault, f"handling {type(message).__name__}"))
        self._run_due()

    def on_scheduler(self, message: FromScheduler) -> None:
        match message:
            case Produced():
                self._produced(message)
            case Finished() | Refused():
                self._result(message.request_id, message)
            case BranchExplained():
                self._result(message.query_id, message)
            case StatsReply():
                self._reply(message)
            case SchedulerReady():
                self.ready = message
            case Heartbeat():
                self.last_heartbeat = self.clock()
            case _:
                assert_never(message)
        self._run_due()

    def on_job(self, job_id: int, result: Any) -> None:
        """The result of an offloaded piece of work; an exception stands for itself."""
        self._result(job_id, result)
        self._run_due()

    def poll(self, now: float) -> float | None:
        """End what is late; returns when to call again, None if there is no deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            operation = heapq.heappop(self._deadlines)[2]
            if not operation.is_done and not operation.requests:  # the scheduler knows the deadline of its requests
                self._end(operation, TIMED_OUT, is_failure=True)
        self._run_due()
        while self._deadlines and self._deadlines[0][2].is_done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def disconnect(self, client: int) -> None:
        """The client is gone: its branches close, its requests end."""
        record = self.clients.pop(client, None)
        if record is None:
            return
        for branch in list(record.branches.values()):
            self._close_now(branch, superseded=False, tell=False)
        for query_id in [i for i, q in self._questions.items() if q.client == client]:
            del self._questions[query_id]
        self._run_due()

    def engine_lost(self, error: Error) -> None:
        """Scheduler or worker are gone: everything open fails with this error, and so does all that is asked from now on."""
        if self.lost is not None:
            return
        self.lost = error
        for client in list(self.clients):
            self.disconnect(client)
            self.clients[client] = Client(client, {}, {}, {})
            self.send(client, EngineLost(error))
        self.to_scheduler.clear()

    # ------------------------------------------------------------ clients' messages

    def _hello(self, client: int, message: Hello) -> None:
        if message.version != PROTOCOL_VERSION:
            text = f"the client speaks protocol version {message.version}, the engine {PROTOCOL_VERSION}: use one release for both"
            self.send(client, EngineLost(Error("invalid_request_error", text, "version", "engine_lost")))
            return
        self.disconnect(client)
        self.clients[client] = Client(client, {}, {}, {})
        if self.lost is not None:
            self.send(client, EngineLost(self.lost))
            return
        vocabulary, ready = self.model.vocabulary, self.ready
        self.send(
            client,
            Welcome(
                version=PROTOCOL_VERSION, model=self.model.name, vocab_size=ready.vocab_size,
                context_length=ready.context_length, page_size=ready.page_size, num_pages=ready.num_pages,
                has_chat_template=self.model.turns is not None, eos_token_ids=vocabulary.eos_token_ids,
                bos_token_id=vocabulary.bos_token_id, num_layers=ready.num_layers,
                kv_bytes_per_token=ready.kv_bytes_per_token, start_ms=ready.start_ms,
            ),
        )  # fmt: skip

    def _take(self, client: Client, message: ToTokenizer) -> None:
        if self.lost is not None:
            self._answer_failed(client, message, self.lost)
            return
        match message:
            case Open():
                self._open(client, message)
            case Append() | Mark() | Rollback() | Lease():
                self._enqueue(client, message, None)
            case Generate() | Prefill() | Score() | Explain() | GetTokens():
                self._enqueue(client, message, message.op, _timeout_of(message))
            case Fork():
                self._fork(client, message)
            case Join():
                self._join(client, message)
            case Close():
                for label in message.branches:
                    self._close(client, label, message.superseded)
            case Cancel():
                self._cancel(client, message)
            case Tokenize():
                self._steps.tokenize(client, message)
            case GetStats():
                query_id = self._ask(client, message.op, "stats")
                self.to_scheduler.append(QueryStats(query_id, message.check))
            case FlushCache():
                self.to_scheduler.append(Flush(self._ask(client, message.op, "flush")))
            case Hello():
                raise AssertionError("handled before")
            case _:
                assert_never(message)

    def _ask(self, client: Client, op: int, kind: Literal["stats", "flush"]) -> int:
        query_id = self.new_id()
        self._questions[query_id] = Question(client.number, op, kind)
        return query_id

    def _answer_failed(self, client: Client, message: ToTokenizer, error: Error) -> None:
        """Answer what could not even be queued: its operation, or the branch that it names."""
        self.counters["refused"] += 1
        op, label = getattr(message, "op", None), getattr(message, "branch", None)
        branch = client.branches.get(label) if label is not None else None
        if branch is not None and branch.failed is None and op is None:
            branch.failed = error
        self.send(client.number, Failed(error, op, label if op is None else None))

    def _open(self, client: Client, message: Open) -> None:
        check_options(message.options)
        self._check_new(client, (message.branch,))
        branch = self._new_branch(client, message.branch, message.options)
        self.to_scheduler.append(
            OpenBranch(branch.branch_id, branch.program.program_id, branch.namespace, branch.seed, 0, branch.priority)
        )

    def _check_new(self, client: Client, labels: tuple[int, ...]) -> None:
        if len(client.branches) + len(labels) > self.limits.max_branches:
            raise InvalidRequest(f"{self.limits.max_branches} branches are open already; close some", param="branch")
        if len(set(labels)) < len(labels) or any(label in client.branches for label in labels):
            raise InvalidRequest("a branch's label is in use already; choose another", param="branch")

    def _new_branch(self, client: Client, label: int, options: BranchOptions) -> Branch:
        program = client.programs.get(options.program)
        if program is None:
            program = client.programs[options.program] = Program(client.number, options.program, self.new_id())
        program.num_branches += 1
        seed = randbits(63) if options.seed is None else options.seed & (2**63 - 1)
        branch = Branch(
            client.number, label, self.new_id(), program, namespace_of(options.salt), seed, options.priority,
            ChatTurns(self.model.turns) if self.model.turns is not None else None,
        )  # fmt: skip
        client.branches[label] = branch
        return branch

    def _fork(self, client: Client, message: Fork) -> None:
        parent = self._branch(client, message.branch)
        if not 0 < len(message.children) <= MAX_CHILDREN:
            raise InvalidRequest(f"a fork makes 1 to {MAX_CHILDREN} children, not {len(message.children)}", param="children")
        self._check_new(client, message.children)
        options = BranchOptions(seed=parent.seed, priority=parent.priority, program=parent.program.label)
        children = tuple(self._new_branch(client, label, options) for label in message.children)
        for child in children:
            child.namespace, child.is_born, child.parent = parent.namespace, False, parent
        self._put(Operation(parent, message, children=children))

    def _join(self, client: Client, message: Join) -> None:
        branch = self._branch(client, message.branch)
        operation = Operation(branch, message)
        try:
            if message.winner is not None:
                operation.winner = self._branch(client, message.winner)
                if operation.winner is branch or operation.winner.namespace != branch.namespace:
                    raise InvalidRequest("the winner of a join must be another branch with the same salt", param="winner")
            operation.sources = tuple(self._branch(client, label) for label, _ in message.spans)
        except RequestError as fault:
            operation.problem, operation.winner, operation.sources = fault.to_wire(), None, ()
        dropped = (client.branches.get(label) for label in message.drop)
        operation.dropped = tuple(b for b in dropped if b is not None and b is not branch)
        needs = {b for b in (operation.winner, *operation.sources) if b is not None and b is not branch}
        operation.needs = needs.copy()
        for needed in needs:
            needed.holds += 1
            barrier = Operation(needed, Barrier(operation))
            operation.barriers.append(barrier)
            self._put(barrier)
        self._put(operation)

    def _branch(self, client: Client, label: int) -> Branch:
        branch = client.branches.get(label)
        if branch is None or branch.is_closing:
            raise _not_found(label)
        return branch

    # ------------------------------------------------------------ queues

    def _enqueue(self, client: Client, body: Body, op: int | None, timeout_ms: float | None = None) -> None:
        operation = Operation(self._branch(client, body.branch), body, op)  # type: ignore[union-attr]  # not a Barrier or Close
        if op is not None:
            if op in client.operations:
                raise InvalidRequest(f"operation {op} is still open; give each its own number", param="op")
            client.operations[op] = operation
        if timeout_ms is not None and timeout_ms > 0:
            operation.deadline = self.clock() + timeout_ms / 1000
            heapq.heappush(self._deadlines, (operation.deadline, self.new_id(), operation))
        self._put(operation)

    def _put(self, operation: Operation) -> None:
        branch = operation.branch
        if len(branch.queue) >= self.limits.max_queued_ops:
            operation.problem = invalid(
                f"{self.limits.max_queued_ops} operations wait on the branch; wait for some of them", "branch"
            )
        branch.queue.append(operation)
        self.wake(branch)

    def wake(self, branch: Branch) -> None:
        self._due.append(branch)

    def _run_due(self) -> None:
        while self._due or self.dropped:
            if self.dropped:
                self.close(self.dropped.popleft(), superseded=True)
            else:
                self._advance(self._due.popleft())

    def _advance(self, branch: Branch) -> None:
        """Carry out operations from the head of the queue until one must wait."""
        while branch.queue and branch.is_born and not branch.is_closed:
            operation = branch.queue[0]
            if not operation.is_running and not operation.is_done:
                operation.is_running = True
                operation.steps = self._steps.begin(operation)
                self._resume(operation)
            elif not operation.is_done and not operation.is_waiting:
                self._resume(operation)
            if not operation.is_done:
                return
            if branch.queue and branch.queue[0] is operation:
                branch.queue.popleft()
        if branch.is_closing and not branch.is_closed and not branch.queue and not branch.holds:
            self._close_now(branch, superseded=branch.superseded)

    def _resume(self, operation: Operation, error: Error | None = None) -> None:
        """Let an operation go on, until it waits again or is done. `error` is raised where it waits."""
        assert operation.steps is not None
        try:
            if error is None:
                next(operation.steps)
            else:
                operation.steps.throw(Ended(error))
            if not operation.is_waiting:
                self.wake(operation.branch)
        except StopIteration:
            self._finish(operation)
        except Ended as ended:
            self._finish(operation, ended.error, is_failure=ended.error.type != "cancelled")
        except RequestError as fault:  # cancelled in the scheduler: the branch is as it was before
            self._finish(operation, fault.to_wire(), is_failure=fault.type != "cancelled")
        except Exception as fault:
            log.exception("a %s failed", type(operation.body).__name__)
            self.counters["internal_errors"] += 1
            self._finish(operation, internal(fault, f"carrying out {type(operation.body).__name__}"))

    def _finish(self, operation: Operation, error: Error | None = None, *, is_failure: bool = True) -> None:
        """The one end of an operation. Everything that hangs on it is given back."""
        assert not operation.is_done
        operation.is_done = True
        self._forget(operation)
        branch = operation.branch
        client = self.clients.get(branch.client)
        if client is not None and operation.op is not None:
            client.operations.pop(operation.op, None)
        if error is not None:
            is_first = is_failure and branch.failed is None
            if is_first:
                branch.failed = error
            if operation.doom is None and operation.op is not None:
                self.send(branch.client, Failed(error, operation.op))
            elif operation.op is None and is_first:
                self.send(branch.client, Failed(error, None, branch.label))
        for child in operation.children:
            if not child.is_born and not child.is_closed:  # the fork will not happen
                child.failed, child.is_born, child.parent = error or CLOSED, True, None
                self.wake(child)
        self._steps.release(operation)
        self.wake(branch)

    def _forget(self, operation: Operation) -> None:
        for number in operation.outstanding:
            self._waiting.pop(number, None)
        operation.outstanding.clear()
        operation.requests.clear()
        operation.steps = None

    def _end(self, operation: Operation, error: Error, *, is_failure: bool) -> None:
        """End an operation early, wherever it is: queued, waiting for a job, or (by an abort) in the scheduler."""
        if operation.is_done or operation.doom is not None:
            return
        if operation.requests:
            operation.is_cancelled = True
            self.to_scheduler.append(AbortRequests(tuple(operation.requests)))
        elif operation.is_running:
            self._resume(operation, error)
        elif is_failure:
            operation.doom = error  # the branch fails when its turn comes; the client need not wait for that
            if operation.op is not None:
                self.send(operation.branch.client, Failed(error, operation.op))
        else:
            operation.branch.queue.remove(operation)
            self._finish(operation, error, is_failure=False)

    # ------------------------------------------------------------ for the operations

    def new_id(self) -> int:
        return next(self._ids)

    def send(self, client: int, message: ToClient) -> None:
        if client in self.clients or isinstance(message, EngineLost):
            self.to_clients.append((client, message))

    def start_job(self, operation: Operation, lane: Lane, work: Callable[[], Any]) -> int:
        job_id = self._await(operation)
        self._offload(lane, job_id, work)
        return job_id

    def start_request(self, operation: Operation, message: ToScheduler, request_id: int) -> None:
        self._await(operation, request_id)
        operation.requests.add(request_id)
        self.to_scheduler.append(message)

    def start_query(self, operation: Operation) -> int:
        return self._await(operation)

    def _await(self, operation: Operation, number: int | None = None) -> int:
        number = self.new_id() if number is None else number
        operation.outstanding.add(number)
        self._waiting[number] = operation
        return number

    def reached(self, barrier: Operation) -> None:
        """A branch that a join needs is idle, and its text is tokenized."""
        assert isinstance(barrier.body, Barrier)
        join = barrier.body.join
        join.needs.discard(barrier.branch)
        if not join.needs:
            self.wake(join.branch)

    def grammar_key(self, grammar: Grammar) -> bytes:
        return blake2b(msgspec.msgpack.encode(grammar), digest_size=32).digest()

    def accept_grammar(self, key: bytes) -> None:
        self.accepted_grammars[key] = None
        while len(self.accepted_grammars) > ACCEPTED_GRAMMARS:
            self.accepted_grammars.popitem(last=False)

    # ------------------------------------------------------------ results

    def _result(self, number: int, result: Any) -> None:
        operation = self._waiting.pop(number, None)
        if operation is None:  # late: the operation has ended
            self.counters["late_results"] += 1
            return
        operation.outstanding.discard(number)
        operation.requests.discard(number)
        operation.results[number] = result
        if not operation.outstanding:
            self.wake(operation.branch)

    def _produced(self, message: Produced) -> None:
        operation = self._waiting.get(message.request_id)
        if operation is None or operation.assembler is None or operation.assembler.has_stopped:
            return
        piece = operation.assembler.push(message)
        self._steps.send_delta(operation, piece)
        if operation.assembler.has_stopped:
            self.to_scheduler.append(StopAt(message.request_id, operation.assembler.num_kept))

    def _reply(self, message: StatsReply) -> None:
        question = self._questions.pop(message.query_id, None)
        if question is None:
            return
        if question.kind == "flush":
            self.send(question.client, Done(question.op))
        else:
            self.send(question.client, StatsAre(question.op, message.stats | {"tokenizer": self.stats()}))

    def stats(self) -> dict[str, float | int | str]:
        """Records of this process: all of them are 0 when nobody asks for anything."""
        branches = [branch for client in self.clients.values() for branch in client.branches.values()]
        return {
            "clients": len(self.clients),
            "branches": len(branches),
            "programs": sum(len(client.programs) for client in self.clients.values()),
            "operations": sum(len(branch.queue) for branch in branches),
            "labelled_operations": sum(len(client.operations) for client in self.clients.values()),
            "awaited": len(self._waiting),
            "deadlines": sum(not entry[2].is_done for entry in self._deadlines),
            **{f"num_{name}": count for name, count in sorted(self.counters.items())},
        }

    # ------------------------------------------------------------ cancelling and closing

    def _cancel(self, client: Client, message: Cancel) -> None:
        for op in message.ops:
            operation = client.operations.get(op)
            if operation is not None:
                self._end(operation, CANCELLED, is_failure=False)
        programs = set(message.programs)
        doomed = [client.branches[label] for label in message.branches if label in client.branches]
        doomed += [b for b in client.branches.values() if b.program.label in programs] if programs else []
        for branch in doomed:
            for operation in list(branch.queue):
                if operation.op is not None:
                    self._end(operation, CANCELLED, is_failure=False)

    def _close(self, client: Client, label: int, superseded: bool) -> None:
        branch = client.branches.get(label)
        if branch is not None and not branch.is_closing:
            self.close(branch, superseded=superseded)

    def close(self, branch: Branch, *, superseded: bool) -> None:
        """Close a branch as soon as nobody else needs it: at once, or after the last fork or join that is in its queue."""
        if branch.is_closed:
            return
        branch.is_closing = True
        branch.superseded = branch.superseded or superseded
        last = max((i for i, operation in enumerate(branch.queue) if operation.is_needed), default=-1)
        if last < 0 and not branch.holds:
            self._close_now(branch, superseded=branch.superseded)
            return
        for operation in list(branch.queue)[last + 1 :]:
            if operation.is_done:  # ended by what the one before it set free
                continue
            if operation.is_running:
                self._end(operation, CLOSED, is_failure=False)
            else:
                branch.queue.remove(operation)
                self._finish(operation, CLOSED, is_failure=False)
        self.wake(branch)

    def _close_now(self, branch: Branch, *, superseded: bool, tell: bool = True) -> None:
        if branch.is_closed:
            return
        branch.is_closing = branch.is_closed = True
        queue, branch.queue = list(branch.queue), deque()
        for operation in queue:
            if operation.is_done:
                continue
            if operation.steps is not None:
                operation.steps.close()
            if tell:
                self._finish(operation, CLOSED, is_failure=False)
            else:
                operation.is_done = True
                self._forget(operation)
                self._steps.release(operation)
        self.remove(branch)
        if branch.is_born:
            self.to_scheduler.append(CloseBranches((branch.branch_id,), superseded))
        elif branch.parent is not None and branch.parent.is_closing:
            self.close(branch.parent, superseded=superseded)  # it may have been kept for this child alone

    def remove(self, branch: Branch) -> None:
        """Forget a branch: closed, or taken over by a join. What was still queued on it, sent after that join, ends here."""
        branch.is_closing = branch.is_closed = True
        queue, branch.queue = list(branch.queue), deque()
        for operation in queue:
            if not operation.is_done:
                self._finish(operation, TAKEN, is_failure=False)
        client = self.clients.get(branch.client)
        program = branch.program
        program.num_branches -= 1
        if client is not None:
            if client.branches.get(branch.label) is branch:
                del client.branches[branch.label]
            if not program.num_branches and client.programs.get(program.label) is program:
                del client.programs[program.label]


class Ended(Exception):
    """Thrown into an operation that is to end: cancelled, closed, or late."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


def namespace_of(salt: str, tenant: str = "") -> bytes:
    """What must be equal for KV to be shared. Lengths come first, so that no two pairs look the same."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in (tenant.encode(), salt.encode()))


def _timeout_of(message: Body) -> float | None:
    if isinstance(message, Generate):
        return message.params.timeout_ms
    return message.timeout_ms if isinstance(message, Prefill | Score) else None


def _not_found(label: int) -> RequestError:
    return NotFound(f"branch {label} does not exist, or was closed", param="branch")
