"""How to generate: the options of `gen` and `run` in one record, and what they become for the backend."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from anabranch.lang.backend import Constraint, Sampling

DEFAULT_MAX_TOKENS = 128
DEFAULT_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None means "not said": a `gen` inherits it from its program, a program from the defaults.

    timeout    seconds from the statement until the value must be there
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    seed: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1):
            raise ValueError(f"n must be an integer >= 1, got {self.n!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be a number of seconds > 0, got {self.timeout!r}")

    def over(self, base: "Options") -> "Options":
        """These options where they say something, `base` elsewhere."""
        said = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        return replace(base, **said) if said else base

    def sampling(self, constraint: Constraint | None) -> Sampling:
        """The backend's form. The chosen tokens' logprobs are asked for unless `return_logprob=False`; under a
        constraint only with `return_logprob=True`, since tokens that a grammar dictates then cost a step each.
        """
        wanted = (
            self.return_logprob
            if self.return_logprob is not None
            else constraint is None or bool(self.top_logprobs_num)
        )
        logprobs = (self.top_logprobs_num or 0) if wanted else None
        start = self.logprob_start_len
        wants_prompt = bool(self.return_logprob) and start is not None and start >= 0
        return Sampling(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            min_tokens=self.min_tokens,
            stop=self.stop or (),
            stop_regex=self.stop_regex or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=None if self.logit_bias is None else dict(self.logit_bias),
            seed=self.seed,
            num_top_logprobs=logprobs,
            prompt_logprobs_from=start if wants_prompt else None,
            constraint=constraint,
            skip_special_tokens=self.skip_special_tokens,
            keep_stop_text=self.no_stop_trim,
            timeout=self.timeout,
        )


FIELDS = tuple(f.name for f in fields(Options))
ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # SGLang's names in `run`


def take_options(kwargs: dict[str, Any], own_names: Iterable[str] = ()) -> Options:
    """Remove from `kwargs` what are options, and return them. A program's own parameter of that name wins."""
    own = set(own_names)
    said: dict[str, Any] = {}
    for name in [k for k in kwargs if k not in own]:
        field = ALIASES.get(name, name)
        if field in FIELDS:
            said[field] = kwargs.pop(name)
    return Options(**said)


def _strings(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None if value is None else (value,)
    strings = tuple(value)
    if not all(isinstance(s, str) for s in strings):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    return strings
