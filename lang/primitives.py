"""The words of the language: `gen`, `select`, roles ... Each returns an expression (`ir.py`)."""

import typing
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from anabranch.lang.backend import Constraint
from anabranch.lang.choices import ChoicesSamplingMethod, token_length_normalized
from anabranch.lang.errors import Unsupported
from anabranch.lang.ir import Chain, Expr, Gen, Reasoning, RoleBegin, RoleEnd, Select, as_expr, role_turn
from anabranch.lang.options import Options
from anabranch.lang.types import TypeSpec, dtype_spec, schema_text, type_spec

Strings = str | Sequence[str]


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    type: Any = None,
    schema: Any = None,
    ebnf: str | None = None,
    lark: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: dict[int, float] | None = None,
    skip_special_tokens: bool | None = None,
    no_stop_trim: bool | None = None,
) -> Expr:
    """Let the model continue the state, and keep the text as variable `name`.

    At most one of: `regex`, `json_schema` (JSON Schema as text, dict or pydantic model), `ebnf`, `lark` and `dtype`
    constrain the text and leave a string (a `regex` beside a `dtype` says more, and is what holds); `type` (int,
    Literal, a dataclass, a pydantic model ...) and `schema` (also a dict) constrain it and give a value of that type;
    `choices` is `select`. With n > 1 the variable is a list of n continuations, and the state goes on with the first.

    timeout  seconds from this statement until the value must be there, else TimeoutError where it is read
    """
    _check_name(name)
    if regex is not None and dtype is not None:
        dtype_spec(dtype)  # refuses what is no dtype
        dtype = None
    constraints: dict[str, Any] = {
        "regex": regex, "json_schema": json_schema, "ebnf": ebnf, "lark": lark, "dtype": dtype, "type": type, "schema": schema,
    }  # fmt: skip
    if choices is not None:
        if said := [key for key, value in constraints.items() if value is not None]:
            raise ValueError(f"a gen takes choices or {said[0]}, not both")
        if n is not None and n != 1:
            raise Unsupported(f"choices are scored, and the best one taken: n must be 1, got {n!r}; gen(type=Literal[...]) samples them")
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method, timeout=timeout)
    options = Options(
        max_tokens=max_tokens, min_tokens=min_tokens, n=n, stop=stop, stop_token_ids=stop_token_ids,  # type: ignore[arg-type]
        stop_regex=stop_regex, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,  # type: ignore[arg-type]
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, ignore_eos=ignore_eos,
        return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs, seed=seed, timeout=timeout,
        repetition_penalty=repetition_penalty, logit_bias=logit_bias, skip_special_tokens=skip_special_tokens,
        no_stop_trim=no_stop_trim,
    )  # fmt: skip
    constraint, spec = _constraint(**constraints)
    if spec is not None and spec.stop:
        options = Options(stop=(*(options.stop or ()), *spec.stop)).over(options)
    return Gen(name, options, constraint, spec)


def gen_int(
    name: str | None = None, max_tokens: int | None = None, n: int | None = None, *args: Any, **kwargs: Any
) -> Expr:
    """`gen(dtype=int)`: digits, as a string; `gen(type=int)` gives an int. Other arguments: `gen`'s, from `stop` on."""
    kwargs["dtype"] = int
    return gen(name, max_tokens, None, n, *args, **kwargs)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, n: int | None = None, *args: Any, **kwargs: Any
) -> Expr:
    """`gen(dtype=str)`: a string in double quotes. Further arguments are `gen`'s, from `stop` on."""
    kwargs["dtype"] = str
    return gen(name, max_tokens, None, n, *args, **kwargs)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | None = None,
    *,
    timeout: float | None = None,
) -> Select:
    """Append the choice that the model finds best, by `choices_method` (default: highest mean logprob of its tokens).

    All choices are scored in one forward. `get_meta_info(name)` has every score.
    """
    _check_name(name)
    if isinstance(choices, str) or not isinstance(choices, Iterable) or not (choices := tuple(choices)):
        raise ValueError(f"select needs a list of at least one choice, got {choices!r}")
    if bad := [c for c in choices if not isinstance(c, str) or not c]:
        raise ValueError(f"every choice must be a string that is not empty, got {bad[0]!r}")
    if not temperature <= 1e-5:
        raise Unsupported(
            f"select decides by score, so temperature must be 0, got {temperature}; "
            "gen(type=Literal[...]) samples a choice"
        )
    method = token_length_normalized if choices_method is None else choices_method
    if not isinstance(method, ChoicesSamplingMethod):
        raise TypeError(
            f"choices_method must be a ChoicesSamplingMethod such as token_length_normalized, got {method!r}"
        )
    return Select(name, choices, method, timeout)


def system(expr: Expr | str | None = None) -> Chain:
    return role_turn("system", expr)


def user(expr: Expr | str | None = None) -> Chain:
    return role_turn("user", expr)


def assistant(expr: Expr | str | None = None) -> Chain:
    return role_turn("assistant", expr)


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")


def separate_reasoning(expr: Expr | str | None = None, model_type: str | None = None) -> Expr:
    """Split the value of each named gen in `expr`: the answer stays under its name, `<name>_reasoning_content` gets
    the reasoning.

    The reasoning is what stands before the closing tag that `model_type` names (`</think>` unless said otherwise).
    It stays in the state, token for token; only the variables are split.
    """
    if expr is None:
        raise ValueError("separate_reasoning needs an expression, such as gen('answer')")
    return Reasoning(as_expr(expr), model_type)


def image(expr: Any) -> NoReturn:
    """Refused until a vision model is served."""
    raise Unsupported("image input needs a vision model, and none can be served yet; describe the picture in text")


def video(path: str, num_frames: int) -> NoReturn:
    """Refused until a vision model is served."""
    raise Unsupported("video input needs a vision model, and none can be served yet; describe the video in text")


def _constraint(**said: Any) -> tuple[Constraint | None, TypeSpec | None]:
    given = {key: value for key, value in said.items() if value is not None}
    if len(given) > 1:
        raise ValueError(
            f"a gen takes one of regex, json_schema, ebnf, lark, dtype, type, schema; got {' and '.join(given)}"
        )
    for key, value in given.items():
        match key:
            case "json_schema":
                return Constraint("json_schema", schema_text(value)), None
            case "dtype":
                spec = dtype_spec(value)
            case "type" | "schema":
                spec = type_spec(value)
            case _:
                if not isinstance(value, str):
                    raise TypeError(f"{key} must be a string, got {value!r}")
                return Constraint(typing.cast(Any, key), value), None
        return spec.constraint, spec
    return None, None


def _check_name(name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a variable's name must be a string, got {name!r}")
