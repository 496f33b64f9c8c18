"""Every message that crosses a process boundary, one tagged union per direction.

Frozen msgspec structs in msgpack arrays: a closed set of types, checked while decoding, no pickle. New fields
go last, with a default. Arrays travel as raw little-endian bytes (`ints`, `as_ints`); tensors never travel.

```
client ── ToTokenizer ──> tokenizer ── ToScheduler ──> scheduler ── ToWorker ──> worker
client <── ToClient ───── tokenizer <─ FromScheduler ─ scheduler <─ FromWorker ─ worker
```

Who mints ids: `branch`, `op` and `mark` in client messages are labels that the client chose, unique within its
connection. `branch_id`, `request_id`, `program_id`, `step_id` are minted inside and unique within an engine.
"""

from typing import Literal

import msgspec
import numpy as np

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="message_type", array_like=True):
    """Crosses a process boundary. New fields go last, with a default. No tensors, no pickles."""


def ints(values) -> bytes:  # type: ignore[no-untyped-def]  # anything numpy accepts
    """Pack integers as little-endian int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def as_ints(data: bytes) -> np.ndarray:
    """The int32 view of bytes packed by `ints`; read-only, no copy."""
    return np.frombuffer(data, dtype="<i4")


# ---------------------------------------------------------------- shared vocabulary


class Grammar(Message):
    """A constraint on what may be generated. `source` is the schema, regex, grammar text or JSON list of choices."""

    kind: Literal["json_schema", "regex", "ebnf", "lark", "choices"]
    source: str


class SamplingParams(Message):
    """How to choose tokens; validated at the edge (`runtime/tokenizer/validation.py`), so the worker may trust it.

    `temperature` below 1e-5 means greedy. `top_k` 0, `top_p` 1, `min_p` 0, penalties 1/0/0 mean off. `logit_bias` is
    added to raw logits. Logprobs are of the raw model distribution (before penalties, bias, grammar, temperature).
    `num_top_logprobs` None means no logprobs at all; 0 the chosen token's only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless ignored
    banned_until_min: tuple[int, ...] = ()  # ids that may not be sampled before min_tokens
    seed: int = 0
    num_top_logprobs: int | None = None
    grammar: Grammar | None = None


class Usage(Message):
    """What one operation cost. cached + computed = prompt; recompute after preemption is counted apart."""

    prompt_tokens: int = 0  # tokens of the branch before the first generated one
    cached_tokens: int = 0  # of these, served from KV that existed when the request was first scheduled
    computed_tokens: int = 0  # prompt tokens computed for this request
    completion_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after preemption or eviction of a running branch
    forced_tokens: int = 0  # completion tokens that the grammar dictated: no sampling, no step of their own
    num_steps: int = 0  # forward steps this request took part in
    copied_pages: int = 0  # copy-on-write page copies
    queue_ms: float = 0.0  # arrival to first scheduled
    ttft_ms: float = 0.0  # arrival to first token; 0 if none
    total_ms: float = 0.0
    num_preemptions: int = 0
    wait_reason: str = ""  # last reason for which the request did not run, "" if it never waited


class TokenLogprobs(Message):
    """Logprobs along a run of tokens; `tops[i]` is (ids, logprobs) of the most likely tokens at position i."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()  # None where there is none: the first token of a context
    tops: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()


class Error(Message):
    """A refusal or failure, in the fields of an OpenAI error object."""

    type: str  # "invalid_request_error" | "not_found_error" | "overloaded_error" | "timeout_error" | "cancelled" | "internal_error"
    message: str  # names the value, the limit and the fix
    param: str | None = None
    code: str | None = None  # e.g. "context_length_exceeded", "kv_capacity_exceeded", "worker_lost"


NOT_FINITE = "not_finite"  # the code of an error: logits were NaN or infinite, so the KV that led to them is used for nothing else

FinishReason = Literal["stop", "length", "abort"]

# ---------------------------------------------------------------- client -> tokenizer


class Text(Message):
    """Plain text. It cannot become control tokens."""

    text: str


class Tokens(Message):
    """Token ids as they are; checked against the vocabulary."""

    token_ids: tuple[int, ...]


class RoleBegin(Message):
    """Opens a chat turn, as the model's own chat template writes it."""

    role: str


class RoleEnd(Message):
    """Closes the open chat turn."""


class ControlText(Message):
    """Text in which the tokenizer's special tokens are recognised: for prompts that are already rendered."""

    text: str
    add_bos: bool = True  # once, and only at the start of a branch that does not begin with one


Segment = Text | Tokens | RoleBegin | RoleEnd | ControlText


class GenerateParams(Message):
    """One generation, as users write it. The single typed request model of every endpoint and of the language.

    `None` means the default. Lower and upper bounds are in `runtime/tokenizer/validation.py`.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 1.0
    top_k: int = 0  # -1 and 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None  # None: the branch's seed
    num_top_logprobs: int | None = None  # None: no logprobs
    prompt_logprobs_from: int | None = None  # also logprobs of the branch's tokens from this position on
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    keep_stop_text: bool = False  # leave the matched stop string in the text (SGLang's no_stop_trim)
    timeout_ms: float | None = None
    stream: bool = False  # send Delta events


class BranchOptions(Message):
    salt: str = ""  # branches share cached prefixes only within one salt
    seed: int | None = None  # None: drawn when the branch is opened
    priority: int = 0  # higher runs first and is preempted last; -100..100
    program: int = 0  # client-chosen label: operations of one program share fairly and can be cancelled together


class Hello(Message):
    version: int = PROTOCOL_VERSION


class Open(Message):
    branch: int
    options: BranchOptions = BranchOptions()


class Append(Message):
    """Add to the end of a branch. Adjacent text is tokenized together, just before it is needed."""

    branch: int
    segments: tuple[Segment, ...]


class Generate(Message):
    op: int
    branch: int
    params: GenerateParams = GenerateParams()


class Prefill(Message):
    """Compute (and cache) the KV of everything appended so far, without generating."""

    op: int
    branch: int
    timeout_ms: float | None = None


class Score(Message):
    """Log-likelihood of each choice as the continuation of a branch, in one forward over the trie of choices.

    With `append`, the best choice by `method` is appended to the branch, so that the next operation needs no round trip.
    """

    op: int
    branch: int
    choices: tuple[str | tuple[int, ...], ...]  # text, or token ids
    method: Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "sum"] = (
        "token_length_normalized"
    )
    append: bool = True
    timeout_ms: float | None = None


class Fork(Message):
    branch: int
    children: tuple[int, ...]


class Mark(Message):
    """Names the branch's present end, for `Rollback`. Takes its place in the order of the branch's operations."""

    branch: int
    mark: int


class Rollback(Message):
    branch: int
    mark: int


class Join(Message):
    """`winner` None: only drop the losers. Otherwise the winner's tokens, KV and marks become the branch's own.

    `spans` (branch, from mark): append the tokens of these branches since the mark, in order, to `branch`.
    Every branch named in `drop` is closed, its KV first in line for eviction.
    """

    branch: int
    winner: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    drop: tuple[int, ...] = ()


class Lease(Message):
    """Keep the branch's KV for `seconds` (0 ends the lease), as far as the lease budget allows."""

    branch: int
    seconds: float


class Close(Message):
    """Gives branches back: what runs or waits on them ends now. Idempotent."""

    branches: tuple[int, ...]
    superseded: bool = False  # nobody will come back to their tokens: evict first


class Cancel(Message):
    """End operations early; idempotent. Exactly these ops, everything on these branches, or a whole program."""

    ops: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()
    programs: tuple[int, ...] = ()


class Explain(Message):
    """Ask for a branch's token spans and where each came from."""

    op: int
    branch: int


class GetTokens(Message):
    """Ask for a branch's token ids, once the operations before it are done."""

    op: int
    branch: int


class Tokenize(Message):
    op: int
    segments: tuple[Segment, ...]


class GetStats(Message):
    op: int
    check: bool = False  # also run the cache's invariant checker


class FlushCache(Message):
    op: int


ToTokenizer = (
    Hello | Open | Append | Generate | Prefill | Score | Fork | Mark | Rollback | Join | Lease | Close | Cancel
    | Explain | GetTokens | Tokenize | GetStats | FlushCache
)  # fmt: skip

# ---------------------------------------------------------------- tokenizer -> client


class Welcome(Message):
    version: int
    model: str
    vocab_size: int
    context_length: int
    page_size: int
    num_pages: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    num_layers: int = 0
    kv_bytes_per_token: int = 0
    start_ms: tuple[tuple[str, float], ...] = ()  # what the worker's start did, in order, and milliseconds


class Delta(Message):
    """More of a generation: text that can no longer change or turn into a stop string, and the ids behind it."""

    op: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None


class Generated(Message):
    """The end of a generation, and the whole of it: the fold of its deltas."""

    op: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: str | int | None = None  # the stop string or token id
    usage: Usage = Usage()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    seed: int = 0


class Prefilled(Message):
    op: int
    usage: Usage


class Scored(Message):
    op: int
    best: int  # index of the choice that `method` prefers
    scores: tuple[float, ...]  # by method, higher is better
    logprobs: tuple[TokenLogprobs, ...]  # one per choice
    usage: Usage = Usage()


class Span(Message):
    """Tokens [start, stop) of a branch and how they came to have KV."""

    start: int
    stop: int
    origin: Literal["cached", "computed", "generated", "forced", "pending"]
    op: int | None = None  # the client's operation that brought them
    text: str = ""  # control tokens included; a character that two spans share is the later one's


class Explained(Message):
    op: int
    length: int
    cached_now: int  # how many leading tokens have KV at this moment
    spans: tuple[Span, ...]
    miss: str  # why the first uncached token was not cached, in words; "" if all was cached
    text: str = ""


class TokensAre(Message):
    op: int
    token_ids: bytes  # int32


class StatsAre(Message):
    op: int
    stats: dict[str, float | int | str | dict[str, float | int | str]]


class Done(Message):
    """An operation without a result of its own has been carried out."""

    op: int


class Failed(Message):
    """An operation ended with an error. `branch` instead of `op`: an Append, Fork, Join ... failed, and with it the branch."""

    error: Error
    op: int | None = None
    branch: int | None = None


class EngineLost(Message):
    """The engine is gone or unhealthy; every open operation has failed with this error."""

    error: Error


ToClient = (
    Welcome | Delta | Generated | Prefilled | Scored | Explained | TokensAre | StatsAre | Done | Failed | EngineLost
)  # fmt: skip

# ---------------------------------------------------------------- tokenizer -> scheduler


class OpenBranch(Message):
    branch_id: int
    program_id: int
    namespace: bytes  # what must be equal for KV to be shared: tenant, salt, adapter
    seed: int = 0
    path: int = 0  # 64-bit branch path, see `kernels/random.py`
    priority: int = 0


class ForkBranch(Message):
    """Children share every token of the parent. The parent has no request in flight. Paths derive from the child's index."""

    parent_id: int
    child_ids: tuple[int, ...]


class Submit(Message):
    """Append `token_ids` to an idle branch, compute them, and generate up to `max_tokens` more."""

    request_id: int
    branch_id: int
    token_ids: bytes  # int32
    max_tokens: int  # 0: compute only
    params: SamplingParams = SamplingParams()
    prompt_logprobs_from: int | None = None
    deadline: float | None = None  # on the scheduler's clock (time.monotonic, one machine)
    arrival: float = 0.0


class SubmitScore(Message):
    """Append `token_ids`, then score `choices` after them; leaves no trace of the choices on the branch."""

    request_id: int
    branch_id: int
    token_ids: bytes
    choices: tuple[bytes, ...]  # int32 each, not empty
    deadline: float | None = None
    arrival: float = 0.0


class StopAt(Message):
    """The text stopped: keep `num_tokens` generated tokens of this request, finish it with "stop"."""

    request_id: int
    num_tokens: int


class RollbackBranch(Message):
    branch_id: int
    length: int


class JoinBranch(Message):
    """`branch_id` takes over the tokens, KV and path of `winner_id`, which is closed."""

    branch_id: int
    winner_id: int


class LeaseBranch(Message):
    branch_id: int
    until: float | None  # scheduler clock; None ends the lease


class CloseBranches(Message):
    branch_ids: tuple[int, ...]
    superseded: bool = False  # True: nobody will come back; evict first


class AbortRequests(Message):
    request_ids: tuple[int, ...] = ()
    program_ids: tuple[int, ...] = ()


class ExplainBranch(Message):
    query_id: int
    branch_id: int
    token_ids: bytes = b""  # int32; what the branch has beyond the scheduler's tokens: looked up, and not added


class QueryStats(Message):
    query_id: int
    check: bool = False


class Flush(Message):
    """Evict everything that nobody uses."""

    query_id: int


class Shutdown(Message):
    """Finish the step in flight, then exit."""


ToScheduler = (
    OpenBranch | ForkBranch | Submit | SubmitScore | StopAt | RollbackBranch | JoinBranch | LeaseBranch | CloseBranches
    | AbortRequests | ExplainBranch | QueryStats | Flush | Shutdown
)  # fmt: skip

# ---------------------------------------------------------------- scheduler -> tokenizer


class Produced(Message):
    """New tokens of one request, in order."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None = None
    num_forced: int = 0  # the last so many came from the grammar


class Finished(Message):
    """The one terminal event of a request that ran. The branch is idle again, `length` tokens long."""

    request_id: int
    reason: FinishReason
    length: int
    usage: Usage
    matched_token_id: int | None = None
    prompt_logprobs: TokenLogprobs | None = None
    choice_logprobs: tuple[tuple[float, ...], ...] = ()  # SubmitScore: one logprob per token of each choice
    choice_is_greedy: tuple[tuple[bool, ...], ...] = ()  # whether each was the most likely token there


class Refused(Message):
    """The one terminal event of a request that could not run or failed. The branch is idle, its tokens as before the request."""

    request_id: int
    error: Error
    usage: Usage = Usage()


class BranchExplained(Message):
    query_id: int
    length: int
    cached_now: int
    miss: str


class StatsReply(Message):
    query_id: int
    stats: dict[str, float | int | str | dict[str, float | int | str]]


class SchedulerReady(Message):
    """The scheduler has a worker: its limits and the model's."""

    num_pages: int
    page_size: int
    vocab_size: int
    context_length: int
    num_layers: int = 0
    kv_bytes_per_token: int = 0
    start_ms: tuple[tuple[str, float], ...] = ()  # the worker's


class Heartbeat(Message):
    """Sent once a second by every loop, busy or not."""

    step_id: int
    at: float  # time.monotonic of the sender
    busy: bool = False


FromScheduler = Produced | Finished | Refused | BranchExplained | StatsReply | SchedulerReady | Heartbeat

# ---------------------------------------------------------------- scheduler -> worker


class SlotStart(Message):
    """A request takes a slot. `context` is only sent where penalties need it."""

    slot: int
    params: SamplingParams
    path: int  # 64-bit branch path
    prompt_len: int  # position of the first token that may be sampled
    context: bytes = b""  # int32: token ids before the first sampled one, for penalties
    generated: bytes = b""  # int32: tokens sampled already (resumed after preemption): replays grammar and penalties


class ScoreTree(Message):
    """The last `len(parents)` tokens of row `row` form a tree. parents[i] is an index among them, or -1 for the row's prefix.

    `targets` are (node index or -1 for the token before the tree, token id) pairs whose logprobs are wanted.
    """

    row: int
    parents: bytes  # int32
    target_nodes: bytes  # int32
    target_token_ids: bytes  # int32


class SharedPrefix(Message):
    """Rows [first_row, last_row) hold the same pages for their first `num_tokens` tokens."""

    first_row: int
    last_row: int
    num_tokens: int


class StepPlan(Message):
    """One forward step. Columns have one entry per row (a slot's contiguous new tokens) unless said otherwise; all int32.

    A row with `feedback` computes one token whose id the worker knows (the slot's last sampled token); it has no entry in
    `token_ids`. Page tables live in the worker's slots: `page_ids` holds what each row appends, after truncating the
    slot's table to `page_keep` entries. Copies are done before the forward, in order.
    """

    step_id: int
    starts: tuple[SlotStart, ...] = ()
    ends: tuple[int, ...] = ()  # slots given back; applied before `starts`
    copy_src: bytes = b""
    copy_dst: bytes = b""
    slots: bytes = b""
    num_new: bytes = b""  # tokens computed by the row
    first_pos: bytes = b""  # position of the first of them
    page_keep: bytes = b""
    page_counts: bytes = b""
    page_ids: bytes = b""
    token_ids: bytes = b""  # of all rows without feedback, concatenated
    feedback: bytes = b""  # 0 | 1
    sample: bytes = b""  # 0 | 1: sample a token after the row's last
    prompt_logprobs: bytes = b""  # 0 | 1: logprobs of each of the row's tokens *following* its first, and of `next_ids`
    next_ids: bytes = b""  # token that follows the row's last one, or -1; for prompt logprobs across chunks
    trees: tuple[ScoreTree, ...] = ()
    groups: tuple[SharedPrefix, ...] = ()
    fresh_pages: bytes = b""  # pages that no one has written since they were allocated: poisoned under the debug hook
    logits_of: bytes = b""  # row whose last logits each row samples from; empty: each its own. See `WorkerReady.shares_logits`


class WorkerShutdown(Message):
    pass


ToWorker = StepPlan | WorkerShutdown

# ---------------------------------------------------------------- worker -> scheduler


class WorkerReady(Message):
    num_pages: int
    page_size: int
    max_slots: int
    vocab_size: int
    context_length: int
    load_report: str  # human-readable: every parameter set exactly once, from which tensor
    num_layers: int = 0
    kv_bytes_per_token: int = 0
    shares_logits: bool = False  # it understands rows with num_new 0, which sample from the row named in `logits_of`
    start_ms: tuple[tuple[str, float], ...] = ()  # what its start did, in order, and milliseconds


class RowError(Message):
    slot: int
    error: Error


class SlotLogprobs(Message):
    """Logprobs that a row asked for: of its sampled tokens, or (prompt) of known tokens."""

    slot: int
    logprobs: TokenLogprobs


class StepResult(Message):
    """What a step sampled. A slot may yield several tokens: sampled first, then forced by its grammar."""

    step_id: int
    slots: bytes = b""  # int32: slots that sampled
    counts: bytes = b""  # int32: tokens per slot
    token_ids: bytes = b""  # int32, concatenated
    grammar_done: bytes = b""  # 0 | 1 per slot: only end-of-sequence may follow
    logprobs: tuple[SlotLogprobs, ...] = ()
    prompt_logprobs: tuple[SlotLogprobs, ...] = ()
    score_logprobs: tuple[bytes, ...] = ()  # float32 per target, one entry per tree
    score_is_greedy: tuple[bytes, ...] = ()  # 0 | 1 per target
    errors: tuple[RowError, ...] = ()
    forward_us: float = 0.0


FromWorker = WorkerReady | StepResult | Heartbeat
