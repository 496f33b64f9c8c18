"""Every field of a request has a type, bounds and a cap; checked here before anything is queued, for every endpoint.

`check_types` needs nothing but the values: a client calls it before it sends, so a wrong type is an exception where it was
written. What passes is made of plain str, int, float and bool: subclasses (an IntEnum, a numpy.float64, a numpy.str_) are values
like others to a user, but nothing that a message can carry. `sampling_of` needs the model and the branch: it turns what a user
asked for into what the worker may trust.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.messages import BranchOptions, GenerateParams, Grammar, SamplingParams
from anabranch.runtime.tokenizer.stop_regex import StopRegex
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

MAX_TOKENS = 1 << 24
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_STOP_REGEXES = 16
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_TOP_LOGPROBS = 256
MAX_CHOICES = 4096
MAX_CHILDREN = 65_536
MAX_SALT_BYTES = 1024
MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000.0
MAX_LEASE_S = 7 * 24 * 3600.0
MAX_ROLE_CHARS = 128
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number's type and inclusive range; `above` is an exclusive lower bound."""

    kind: type
    low: float
    high: float
    optional: bool = False
    above: float | None = None


_NUMBERS: dict[str, Bounds] = {
    "max_tokens": Bounds(int, 0, MAX_TOKENS),
    "min_tokens": Bounds(int, 0, MAX_TOKENS),
    "temperature": Bounds(float, 0.0, 100.0),
    "top_k": Bounds(int, -1, 2**31 - 1),
    "top_p": Bounds(float, 0.0, 1.0),
    "min_p": Bounds(float, 0.0, 1.0),
    "repetition_penalty": Bounds(float, 0.0, 100.0, above=0.0),
    "presence_penalty": Bounds(float, -100.0, 100.0),
    "frequency_penalty": Bounds(float, -100.0, 100.0),
    "seed": Bounds(int, -(2**63), 2**63 - 1, optional=True),
    "num_top_logprobs": Bounds(int, 0, MAX_TOP_LOGPROBS, optional=True),
    "prompt_logprobs_from": Bounds(int, 0, MAX_TOKENS, optional=True),
    "timeout_ms": Bounds(float, 0.0, MAX_TIMEOUT_MS, optional=True, above=0.0),
}
_FLAGS = ("ignore_eos", "skip_special_tokens", "keep_stop_text", "stream")
_GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "lark", "choices")


def refuse(param: str, value: object, rule: str, code: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {rule}, got {shown(value)}", param=param, code=code)


def shown(value: object) -> str:
    """The value in an error's text: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints, or a user's own class
        return f"something of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------- types


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_int(value) or isinstance(value, float)


def plain(value: Any) -> Any:
    """A str, int or float as exactly that type, also inside a list or mapping, which is copied; anything else as it is."""
    match value:
        case bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__index__(value)
        case float():
            return float.__float__(value)
        case tuple() | list():
            return tuple(map(plain, value))
        case Mapping():
            return {plain(key): plain(item) for key, item in value.items()}
    return value


def check_text(text: object, param: str) -> str:
    """The text, as a plain str. Raises InvalidRequest if it is no string of Unicode characters."""
    if not isinstance(text, str):
        raise refuse(param, text, "a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{param} holds half of a surrogate pair; it is not valid Unicode", param=param) from None
    return str.__str__(text)


def check_ids(ids: object, param: str) -> tuple[int, ...]:
    """The ids as a tuple of ints that fit int32; whether the vocabulary has them is `Vocabulary.check_ids`'s business."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise refuse(param, ids, "a list of token ids")
    for token_id in ids:
        if not is_int(token_id) or not 0 <= token_id < 2**31:
            raise refuse(param, token_id, "a list of token ids, integers from 0 up", "invalid_token_id")
    return tuple(map(int.__index__, ids))


def check_known(ids: Iterable[int], vocabulary: Vocabulary, param: str) -> None:
    """Raises InvalidRequest naming the first id that the model does not have."""
    try:
        vocabulary.check_ids(ids)
    except InvalidRequest as fault:
        raise InvalidRequest(fault.message, param=param, code=fault.code) from None


def check_types(params: GenerateParams) -> GenerateParams:
    """The params, of plain values that are theirs alone. The model is not needed for it.

    Raises InvalidRequest for a field of the wrong type, range or number of entries.
    """
    for name, bounds in _NUMBERS.items():
        check_number(name, getattr(params, name), bounds)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise refuse(name, getattr(params, name), "true or false")
    _check_list("stop", params.stop, MAX_STOPS)
    for stop in params.stop:
        if not check_text(stop, "stop"):
            raise InvalidRequest("stop must not hold an empty string: it would stop everything", param="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string has {len(stop)} characters; the limit is {MAX_STOP_CHARS}", param="stop")
    _check_list("stop_regex", params.stop_regex, MAX_STOP_REGEXES)
    for pattern in params.stop_regex:
        check_text(pattern, "stop_regex")
    _check_list("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    check_ids(params.stop_token_ids, "stop_token_ids")
    if params.logit_bias is not None:
        _check_bias(params.logit_bias)
    if params.grammar is not None:
        _check_grammar(params.grammar)
    if params.min_tokens > params.max_tokens:
        raise refuse("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    if params.grammar is not None:
        kind, source = params.grammar.kind, params.grammar.source
        params = msgspec.structs.replace(params, grammar=Grammar(plain(kind), plain(source)))
    return GenerateParams(*map(plain, msgspec.structs.astuple(params)))


def check_number(name: str, value: Any, bounds: Bounds) -> None:
    if value is None and bounds.optional:
        return
    is_kind = is_int(value) if bounds.kind is int else is_number(value)
    low, high = (str(b) if bounds.kind is int else f"{b:g}" for b in (bounds.low, bounds.high))
    span = f"above {bounds.above:g} and at most" if bounds.above is not None else f"in {low} to"
    rule = f"{'an integer' if bounds.kind is int else 'a number'} {span} {high}"
    if not is_kind or not bounds.low <= value <= bounds.high or value == bounds.above:  # no NaN lies between bounds
        raise refuse(name, value, rule)


def check_seconds(name: str, seconds: object, limit: float = MAX_TIMEOUT_MS / 1000) -> float:
    """The number of seconds. Raises InvalidRequest. 0 is allowed: it ends a lease, and times out at once."""
    check_number(name, seconds, Bounds(float, 0.0, limit))
    return float(seconds)  # type: ignore[arg-type]  # checked


def milliseconds(timeout: object) -> float | None:
    """A timeout in seconds, as messages carry it: 0 stands for the shortest."""
    return None if timeout is None else max(1000.0 * check_seconds("timeout", timeout), 1e-3)


def _check_list(name: str, values: object, limit: int) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise refuse(name, values, "a list")
    if len(values) > limit:
        raise InvalidRequest(f"{name} has {len(values)} entries; the limit is {limit}", param=name)


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise refuse("logit_bias", bias, "a mapping of token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries; the limit is {MAX_LOGIT_BIAS}", param="logit_bias")
    check_ids(list(bias), "logit_bias")
    for value in bias.values():
        if not is_number(value) or not -1000 <= value <= 1000:
            raise refuse("logit_bias", value, "numbers in -1000 to 1000")


def _check_grammar(grammar: object) -> None:
    if not isinstance(grammar, Grammar) or grammar.kind not in _GRAMMAR_KINDS:
        raise refuse("grammar", grammar, f"a grammar of kind {', '.join(_GRAMMAR_KINDS)}")
    check_text(grammar.source, "grammar")


def check_label(value: object, param: str) -> int:
    """A number that a client names something by: an operation's, a mark, a program. Raises InvalidRequest."""
    check_number(param, value, Bounds(int, 0, 2**63 - 1))
    return int.__index__(value)  # type: ignore[arg-type]  # checked


def check_options(options: BranchOptions) -> BranchOptions:
    """The options, of plain values. Raises InvalidRequest."""
    if len(check_text(options.salt, "salt").encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"salt has more than {MAX_SALT_BYTES} bytes", param="salt")
    check_number("seed", options.seed, _NUMBERS["seed"])
    check_number("priority", options.priority, Bounds(int, -100, 100))
    check_label(options.program, "program")
    return BranchOptions(*map(plain, msgspec.structs.astuple(options)))


# ---------------------------------------------------------------- meaning


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a text: strings, patterns, and ids that stand for a stop string (a special token named as one)."""

    strings: tuple[str, ...]
    regexes: tuple[StopRegex, ...]
    named: dict[int, str]


def stops_of(params: GenerateParams, vocabulary: Vocabulary) -> Stops:
    """Raises InvalidRequest for a pattern that no automaton can match."""
    named = {vocabulary.special[stop]: stop for stop in params.stop if stop in vocabulary.special}
    return Stops(tuple(params.stop), tuple(StopRegex(pattern) for pattern in params.stop_regex), named)


def sampling_of(params: GenerateParams, vocabulary: Vocabulary, stops: Stops, *, branch_seed: int) -> SamplingParams:
    """What the worker gets. Raises InvalidRequest for ids that the model does not have.

    top_k -1 and 0 are off; top_p 0 means the likeliest token; a temperature below 1e-5 is greedy. End-of-sequence and
    stop tokens are banned until min_tokens; so are stop strings (the text before is not searched).
    """
    check_known(params.stop_token_ids, vocabulary, "stop_token_ids")
    bias = dict(params.logit_bias or {})
    check_known(bias, vocabulary, "logit_bias")
    ends = () if params.ignore_eos else vocabulary.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*ends, *params.stop_token_ids, *stops.named)))
    is_greedy = params.top_p == 0.0 or params.temperature < GREEDY_BELOW
    return SamplingParams(
        temperature=0.0 if is_greedy else float(params.temperature),
        top_k=max(params.top_k, 0) if params.top_k < vocabulary.vocab_size else 0,
        top_p=1.0 if is_greedy else float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias={token_id: float(value) for token_id, value in bias.items()},
        min_tokens=params.min_tokens,
        stop_token_ids=stop_ids,
        banned_until_min=stop_ids if params.min_tokens else (),
        seed=(branch_seed if params.seed is None else params.seed) & (2**63 - 1),
        num_top_logprobs=params.num_top_logprobs,
        grammar=params.grammar,
    )
