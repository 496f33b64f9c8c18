"""The one gate for what clients ask: every field typed, finite and bounded on both sides, before anything is queued.

Bounds are data. What is refused names the value, the limit and the parameter; nothing is clipped in silence.
"""

import math
from dataclasses import dataclass
from typing import Any

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.messages import BranchOptions, GenerateParams, SamplingParams
from anabranch.runtime.tokenizer.stop_regex import StopRegex, compile_stop_regexes
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

GREEDY_BELOW = 1e-5  # temperatures below mean greedy: dividing by them says nothing more
MAX_TOKENS = 1 << 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_REGEXES = 8
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 32
MAX_CHOICES = 1024
MAX_CHOICE_TOKENS = 4096
MAX_SALT_BYTES = 1024
MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000.0


@dataclass(frozen=True, slots=True)
class Bound:
    low: float
    high: float
    integer: bool = False


BOUNDS: dict[str, Bound] = {
    "max_tokens": Bound(0, MAX_TOKENS, integer=True),
    "min_tokens": Bound(0, MAX_TOKENS, integer=True),
    "temperature": Bound(0.0, 100.0),
    "top_k": Bound(-1, 1 << 30, integer=True),
    "top_p": Bound(0.0, 1.0),
    "min_p": Bound(0.0, 1.0),
    "repetition_penalty": Bound(0.01, 100.0),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
    "seed": Bound(-(1 << 63), (1 << 64) - 1, integer=True),
    "num_top_logprobs": Bound(0, MAX_TOP_LOGPROBS, integer=True),
    "prompt_logprobs_from": Bound(0, 1 << 31, integer=True),
    "timeout_ms": Bound(0.0, MAX_TIMEOUT_MS),
}


def check_number(name: str, value: Any) -> None:
    """Raises InvalidRequest unless the value lies within the parameter's bounds; True is not a number."""
    bound = BOUNDS[name]
    kind = int if bound.integer else (int, float)
    what = "an integer" if bound.integer else "a number"
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not bound.low <= value <= bound.high:
        low, high = (int(bound.low), int(bound.high)) if bound.integer else (bound.low, bound.high)
        raise InvalidRequest(f"{name} must be {what} in {low}..{high}, got {cut(value)}", param=name)


def cut(value: object, limit: int = 80) -> str:
    """A client's value as it may appear in a message: short and escaped."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


@dataclass(frozen=True, slots=True)
class Checked:
    """A generation whose every field is known to be good."""

    params: GenerateParams
    sampling: SamplingParams
    stop_regexes: tuple[StopRegex, ...]


def check_generate(params: GenerateParams, vocabulary: Vocabulary, seed: int) -> Checked:
    """Raises InvalidRequest. `seed` is the branch's, for a request without one of its own."""
    for name in BOUNDS:
        value = getattr(params, name)
        if value is not None:
            check_number(name, value)
    if params.min_tokens > params.max_tokens:
        message = f"min_tokens must be at most max_tokens ({params.max_tokens}), got {params.min_tokens}"
        raise InvalidRequest(message, param="min_tokens")
    _check_stops(params)
    regexes = compile_stop_regexes(params.stop_regex)
    stops = _stop_ids(params, vocabulary)
    greedy = params.temperature < GREEDY_BELOW or params.top_p == 0
    sampling = SamplingParams(
        temperature=0.0 if greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=1.0 if greedy else params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=_biases(params, vocabulary),
        min_tokens=params.min_tokens,
        stop_token_ids=stops,
        banned_until_min=stops if params.min_tokens else (),
        seed=(params.seed if params.seed is not None else seed) & 0xFFFF_FFFF_FFFF_FFFF,
        num_top_logprobs=params.num_top_logprobs,
        grammar=params.grammar,
    )
    return Checked(params, sampling, tuple(regexes))


def _check_stops(params: GenerateParams) -> None:
    _at_most("stop", len(params.stop), MAX_STOPS)
    _at_most("stop_regex", len(params.stop_regex), MAX_STOP_REGEXES)
    _at_most("stop_token_ids", len(params.stop_token_ids), MAX_STOP_IDS)
    for name, texts in (("stop", params.stop), ("stop_regex", params.stop_regex)):
        for text in texts:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                message = f"each {name} must have 1..{MAX_STOP_CHARS} characters, got {len(text)}"
                raise InvalidRequest(message, param=name)


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} may have at most {limit} entries, got {count}", param=name)


def _stop_ids(params: GenerateParams, vocabulary: Vocabulary) -> tuple[int, ...]:
    _check_ids("stop_token_ids", params.stop_token_ids, vocabulary)
    ends = () if params.ignore_eos else vocabulary.eos_token_ids
    return tuple(dict.fromkeys((*params.stop_token_ids, *ends)))


def _check_ids(name: str, ids: tuple[int, ...], vocabulary: Vocabulary) -> None:
    for token_id in ids:
        if isinstance(token_id, bool) or not 0 <= token_id < vocabulary.num_tokens:
            message = f"{name}: token ids must be in 0..{vocabulary.num_tokens - 1}, got {cut(token_id)}"
            raise InvalidRequest(message, param=name)


def _biases(params: GenerateParams, vocabulary: Vocabulary) -> dict[int, float]:
    biases = params.logit_bias or {}
    _at_most("logit_bias", len(biases), MAX_BIASES)
    _check_ids("logit_bias", tuple(biases), vocabulary)
    for token_id, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            message = f"logit_bias of token {token_id} must be a number in -100..100, got {cut(bias)}"
            raise InvalidRequest(message, param="logit_bias")
    return {token_id: float(bias) for token_id, bias in biases.items()}


def check_options(options: BranchOptions) -> None:
    """Raises InvalidRequest."""
    if options.seed is not None:
        check_number("seed", options.seed)
    if not -100 <= options.priority <= 100:
        raise InvalidRequest(f"priority must be in -100..100, got {options.priority}", param="priority")
    try:
        num_bytes = len(options.salt.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("salt is not valid Unicode", param="salt") from None
    if num_bytes > MAX_SALT_BYTES:
        raise InvalidRequest(f"salt may have at most {MAX_SALT_BYTES} bytes, got {num_bytes}", param="salt")


def check_choices(choices: tuple[str | tuple[int, ...], ...]) -> None:
    """Raises InvalidRequest."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"choices must have 1..{MAX_CHOICES} entries, got {len(choices)}", param="choices")
    for choice in choices:
        if not choice:
            raise InvalidRequest("a choice must not be empty", param="choices")
        if len(choice) > MAX_CHOICE_TOKENS * 16:
            message = f"a choice may have at most {MAX_CHOICE_TOKENS} tokens, got {len(choice)} characters or ids"
            raise InvalidRequest(message, param="choices")
