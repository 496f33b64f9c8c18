"""What the language needs from a runtime. `runtime/` implements it; `lang/testing.py` has a scripted one.

Every call returns at once. Operations on one branch take effect in the order of the calls, so a program can say
append, generate, fork, generate without waiting; results arrive through futures (`concurrent.futures.Future`:
`result(timeout)`, `add_done_callback`, `asyncio.wrap_future`). A future fails with an exception that names the
cause. An operation that fails leaves its branch failed: every later operation on it fails with the same first cause.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; it cannot become control tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class RoleBegin:
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd:
    pass


@dataclass(frozen=True, slots=True)
class Tokens:
    token_ids: tuple[int, ...]


Segment = Text | RoleBegin | RoleEnd | Tokens


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: Literal["json_schema", "regex", "ebnf", "lark", "choices"]
    source: str  # JSON text for json_schema and choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """One generation's parameters; None means the runtime's default. Names and meanings follow `runtime/messages.py`
    GenerateParams.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    num_top_logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    constraint: Constraint | None = None
    skip_special_tokens: bool | None = None
    keep_stop_text: bool | None = None
    timeout: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    tops: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation. `usage` has the fields of `runtime/messages.py` Usage."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    best: int
    scores: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...]
    usage: dict[str, Any] = field(default_factory=dict)


def is_generation(result: Any) -> bool:
    """Whether this is what `generate` gives. By its fields: a runtime may have records of its own."""
    return hasattr(result, "finish_reason")


def is_scores(result: Any) -> bool:
    return hasattr(result, "best")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    start: int
    stop: int
    origin: Literal["cached", "computed", "generated", "forced", "pending"]
    text: str = ""  # the span's text, control tokens included; "" when the runtime does not say


@dataclass(frozen=True, slots=True)
class Explanation:
    length: int
    cached_now: int
    spans: tuple[TokenSpan, ...]
    miss: str = ""
    text: str = ""  # the branch's text as the model sees it, template and control tokens included; "" if not told


Method = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "sum"]


class BackendBranch(Protocol):
    """A handle on a branch that lives in the runtime. Dropping it (close, or garbage collection) releases the
    branch.
    """

    def append(self, segments: Sequence[Segment]) -> None: ...

    def generate(self, sampling: Sampling, on_text: Callable[[str], None] | None = None) -> "Future[Generation]":
        """`on_text` is called with each new piece of settled text, from the runtime's thread, in order, before the
        future is done.

        Cancelling the future cancels the operation in the runtime.
        """
        ...

    def prefill(self) -> "Future[dict[str, Any]]": ...

    def score(
        self, choices: Sequence[str], method: Method, *, append: bool = True, timeout: float | None = None
    ) -> "Future[Scores]": ...

    def fork(self, n: int) -> "list[BackendBranch]": ...

    def mark(self) -> int:
        """Name the present end of the branch."""
        ...

    def rollback(self, mark: int) -> None: ...

    def join(self, winner: "BackendBranch | None", drop: Sequence["BackendBranch"] = ()) -> None:
        """The winner's tokens and KV become this branch's; `drop` is closed and evicted first."""
        ...

    def append_spans(self, spans: Sequence[tuple["BackendBranch", int]]) -> None:
        """Append what other branches added since a mark of theirs (a mark made before the fork counts)."""
        ...

    def lease(self, seconds: float) -> None: ...

    def token_ids(self) -> "Future[list[int]]": ...

    def explain(self) -> "Future[Explanation]": ...

    def cancel(self) -> None:
        """End whatever runs or waits on this branch. Idempotent."""
        ...

    def close(self, *, superseded: bool = False) -> None: ...


class Backend(Protocol):
    def open(
        self, *, seed: int | None = None, salt: str = "", program: int = 0, priority: int = 0
    ) -> BackendBranch: ...

    def new_program(self) -> int:
        """A label for the operations of one program run: fair share and cancelling go by it."""
        ...

    def cancel_program(self, program: int) -> None: ...

    def stats(self) -> "Future[dict[str, Any]]": ...

    def flush_cache(self) -> "Future[None]": ...

    def info(self) -> dict[str, Any]:
        """model, vocab_size, context_length, page_size, num_pages, has_chat_template, kv_bytes_per_token."""
        ...
