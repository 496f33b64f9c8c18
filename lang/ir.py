"""Expressions: what may be added to a state. Immutable values that compose with `+`, with each other and with strings.

An expression says what to do; it does nothing until a state executes it, so one expression may be added to many states.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.lang.backend import Constraint
from anabranch.lang.choices import ChoicesSamplingMethod, token_length_normalized
from anabranch.lang.options import Options
from anabranch.lang.types import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR, TypeSpec

__all__ = [
    "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR",
    "Chain", "Expr", "Gen", "Reasoning", "RoleBegin", "RoleEnd", "Select", "Text",
    "as_expr", "chain", "flatten", "role_turn",
]  # fmt: skip


class Expr:
    """Base of expressions."""

    __slots__ = ()

    def __add__(self, other: "Expr | str") -> "Expr":
        return chain(self, as_expr(other))

    def __radd__(self, other: "Expr | str") -> "Expr":
        return chain(as_expr(other), self)


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Constant text. It cannot become control tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Let the model continue. `spec` says how the text becomes a value; None leaves it a string."""

    name: str | None = None
    options: Options = field(default_factory=Options)
    constraint: Constraint | None = None
    spec: TypeSpec | None = None


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Append the best of `choices`."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod = token_length_normalized
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Reasoning(Expr):
    """Execute `expr`, and split the value of each named gen in it into reasoning and answer."""

    expr: Expr
    model_type: str | None = None


@dataclass(frozen=True, slots=True)
class Chain(Expr):
    parts: tuple[Expr, ...]


def as_expr(value: Any) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    raise TypeError(
        f"a state takes strings and expressions (gen, select, user(...) ...), got {type(value).__name__}; "
        "write str(value) to add it as text"
    )


def chain(left: Expr, right: Expr) -> Chain:
    parts = (left.parts if isinstance(left, Chain) else (left,)) + (
        right.parts if isinstance(right, Chain) else (right,)
    )
    return Chain(parts)


def flatten(expr: Expr) -> Iterator[Expr]:
    """The operations of an expression, in order; no Chain among them."""
    if isinstance(expr, Chain):
        for part in expr.parts:
            yield from flatten(part)
    else:
        yield expr


def role_turn(role: str, expr: "Expr | str | None") -> Chain:
    middle: Sequence[Expr] = () if expr is None else (as_expr(expr),)
    return Chain((RoleBegin(role), *middle, RoleEnd(role)))
