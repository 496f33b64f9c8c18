"""Runs a model's chat template, a program that strangers wrote, so that it can neither reach out nor go on for ever.

jinja2's immutable sandbox keeps it from anything but its data. On top, every statement, output, container and operator
of the template reports to a budget: time, characters built, and the size of every value (counted as a tree, since `[a,
a]` thirty times over is a billion). Single operations are bounded by the size of their operands, so a render ends soon
after its budget does.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from types import FunctionType
from typing import Any, Never

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1 << 18
MAX_VALUE_SIZE = 1 << 22  # characters and items in one value, counted as a tree
MAX_BUILT_CHARS = 1 << 26  # in all
MAX_CPU_SECONDS = 2.0
MAX_WIDTH = 1000  # of padding and indentation
MAX_INT_BITS = 4096

# Filters as jinja2 has them; those that can blow up have forms of our own below.
_FILTERS = """
    abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max min
    reject rejectattr reverse safe select selectattr sort title trim truncate unique upper urlencode wordcount
"""
_STR_METHOD_NAMES = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper ljust rjust center zfill
"""
_CONTAINER_METHOD_NAMES = "items keys values get copy index count union intersection difference"
_STR_METHODS = frozenset(_STR_METHOD_NAMES.split())
_CONTAINER_METHODS = frozenset(_CONTAINER_METHOD_NAMES.split())
_PADDING = frozenset(("ljust", "rjust", "center", "zfill"))


class BudgetExceeded(TemplateRuntimeError):
    """The template does more than any chat template needs to."""


class _Budget:
    """What one render may still do."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_CPU_SECONDS
        self.built = 0
        self.ticks = 0
        self._sizes: dict[int, tuple[Any, int]] = {}  # of containers, which are kept so that ids stay theirs

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks % 16 == 0 and time.thread_time() > self.deadline:
            raise BudgetExceeded(f"it ran for more than {MAX_CPU_SECONDS:g} seconds")

    def build(self, num_chars: int) -> None:
        self.tick()
        self.built += num_chars
        if num_chars > MAX_VALUE_SIZE or self.built > MAX_BUILT_CHARS:
            raise BudgetExceeded(f"it built more than {MAX_BUILT_CHARS} characters, or {MAX_VALUE_SIZE} in one value")

    def size(self, value: Any, depth: int = 0) -> int:
        """Characters and items of a value as a tree. Raises BudgetExceeded if they are too many."""
        if isinstance(value, str):
            return len(value) + 1
        if isinstance(value, Namespace):
            raise BudgetExceeded("a namespace cannot be a part of another value")
        if not isinstance(value, list | tuple | dict | set | frozenset):
            return 32
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        if depth > 200:
            raise BudgetExceeded("a value is nested more than 200 deep")
        parts = (part for item in value.items() for part in item) if isinstance(value, dict) else value
        total = 1
        for part in parts:
            total += self.size(part, depth + 1)
            if total > MAX_VALUE_SIZE:
                raise BudgetExceeded(f"a value has more than {MAX_VALUE_SIZE} characters and items")
        self.know(value, total)
        return total

    def know(self, value: Any, size: int) -> Any:
        """Remember the size of a container, which is then not measured again."""
        if not isinstance(value, str):
            self._sizes[id(value)] = value, size
        return value


_active = threading.local()


def _budget() -> _Budget:
    budget: _Budget = _active.budget
    return budget


# ---------------------------------------------------------------- what the template's code reports


def _tick(num_chars: int) -> bool:
    _budget().build(num_chars)
    return True


def _output(value: Any) -> Any:
    """Account for a value that is about to become text."""
    _budget().build(_budget().size(value))
    return value


def _container(value: Any) -> Any:
    _budget().tick()
    _budget().size(value)
    return value


def _concat(*values: Any) -> str:
    _budget().build(sum(map(_budget().size, values)))
    return "".join(map(str, values))


class _Instrument(NodeTransformer):
    """Puts the reports above into the syntax tree of a template."""

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _report("output", n) for n in node.nodes]
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _report("container", self.generic_visit(node))

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _report("container", node) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _report("concat", *node.nodes)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_report("tick", nodes.Const(0)), node.test, lineno=node.lineno)
        return node

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        for name in ("body", "else_"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body:
                data = (part for out in body if isinstance(out, nodes.Output) for part in out.nodes)
                chars = sum(len(part.data) for part in data if isinstance(part, nodes.TemplateData))
                body.insert(0, nodes.ExprStmt(_report("tick", nodes.Const(chars)), lineno=node.lineno))
        return node


def _report(name: str, *arguments: nodes.Expr | nodes.Node) -> nodes.Call:
    lineno = arguments[0].lineno
    function = nodes.EnvironmentAttribute(f"report_{name}", lineno=lineno)
    return nodes.Call(function, list(arguments), [], None, None, lineno=lineno)


# ---------------------------------------------------------------- what the template may call


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote; it renders as its body."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: object = "") -> Never:
    raise TemplateRefusal(str(message))


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception."""


def _strftime_now(format: str) -> str:
    if re.search(r"\d", format) or len(format) > MAX_WIDTH:
        raise SecurityError("strftime_now takes a short format without widths")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: plain JSON, not escaped for HTML."""
    _budget().build(2 * _budget().size(value))
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise SecurityError(f"tojson's indent is {indent}; 0 to 16 are allowed")
    parts = None if separators is None else tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=parts, sort_keys=sort_keys)  # type: ignore[arg-type]


def _format(template: object, *args: Any, **kwargs: Any) -> str:
    return _percent(str(template), kwargs or args)


def _percent(template: str, values: Any) -> str:
    """Printf-style formatting with bounded widths."""
    if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", template):
        raise SecurityError("formatting with widths of 1000 and more, or '*', is not allowed")
    _budget().build(len(template) + template.count("%") * MAX_WIDTH + _budget().size(values))
    return str(template % values)


def _join(separator: str, items: Iterable[Any]) -> list[str]:
    """The items of a join as text, after accounting for the result."""
    pieces, total = [], 0
    for item in items:
        total += _budget().size(item) + len(separator)
        if total > MAX_VALUE_SIZE:
            break
        pieces.append(str(item))
    _budget().build(total)
    return pieces


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _budget().build(len(text) + text.count(old) * len(new))


def _account(result: Any) -> Any:
    """What a filter or call returned counts."""
    if isinstance(result, list | tuple | dict):
        return _container(result)
    _budget().build(len(result) if isinstance(result, str) else 0)
    return result


def _accounted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        return _account(function(*args, **kwargs))

    return filter_


def _checked_arguments(text: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for a method of a string, if it is allowed and its result will not be too long."""
    _require(method in _STR_METHODS, f"the string method {method!r} is not allowed")
    if method in _PADDING:
        _bounded_width(args[0] if args else None)
    if method == "replace" and len(args) >= 2:
        _check_replace(text, *args[:2])
    if method == "join" and len(args) == 1:
        return (_join(text, args[0]),)
    return args


def _require(allowed: bool, problem: str) -> None:
    if not allowed:
        raise SecurityError(f"{problem} in a chat template")


def _join_filter(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise SecurityError("join by attribute is not allowed; use map first")
    return str(d).join(_join(str(d), value))


def _replace_filter(value: object, old: str, new: str, count: int | None = None) -> str:
    text = str(_output(value))
    _check_replace(text, old, new)
    return text.replace(str(old), str(new), -1 if count is None else count)


def _indent_filter(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(_output(value))
    pad = width if isinstance(width, str) else " " * _bounded_width(width)
    _budget().build(len(text) + (text.count("\n") + 1) * len(pad))
    lines = text.split("\n")
    indented = [pad + line if line or blank else line for line in lines[1:]]
    return "\n".join([pad + lines[0] if first else lines[0], *indented])


def _round_filter(value: float, precision: int = 0) -> float:
    return round(value, min(max(precision, -20), 20))


def _string_filter(value: object) -> str:
    return str(_output(value))


def _bounded_width(width: Any) -> int:
    if not isinstance(width, int) or not 0 <= width <= MAX_WIDTH:
        raise SecurityError(f"a width of {str(width)[:20]} is not allowed; 0 to {MAX_WIDTH} are")
    return width


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    report_tick = staticmethod(_tick)
    report_output = staticmethod(_output)
    report_container = staticmethod(_container)
    report_concat = staticmethod(_concat)
    _reports = frozenset((_tick, _output, _container, _concat))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], loader=None)
        self.filters = {name: _accounted(self.filters[name]) for name in _FILTERS.split()}
        own = {"join": _join_filter, "replace": _replace_filter, "indent": _indent_filter, "string": _string_filter}
        self.filters |= own | {"tojson": _tojson, "format": _format, "round": _round_filter}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        budget.tick()
        sized = str | list | tuple
        if operator == "+" and isinstance(left, sized) and isinstance(right, type(left)):
            size = budget.size(left) + budget.size(right)
            budget.build(size)
            return budget.know(left + right, size)  # type: ignore[operator]  # of one type
        elif operator == "*" and (isinstance(left, sized) or isinstance(right, sized)):
            many, times = (left, right) if isinstance(left, sized) else (right, left)
            if isinstance(times, int):
                budget.build(budget.size(many) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            return _percent(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS:
                raise BudgetExceeded(f"it computes with numbers of more than {MAX_INT_BITS} bits")
        result = super().call_binop(context, operator, left, right)
        return _container(result) if isinstance(result, list | tuple) else result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, FunctionType) and __obj in __self._reports:
            return __obj(*args)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _checked_arguments(owner, __obj.__name__, args)
        elif owner is not None and type(owner).__module__ == "builtins":
            _require(__obj.__name__ in _CONTAINER_METHODS, f"the method {__obj.__name__!r} is not allowed")
        return _account(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ != "format" or re.search(r"\{[^{}]*:[^{}]*(\d{4}|\{)|![ra]", value.__self__):
            raise SecurityError("only plain '{}'.format with widths below 1000 is allowed")

        def formatted(*args: Any, **kwargs: Any) -> str:
            fields = value.__self__.count("{")
            _budget().build(len(value.__self__) + fields * (_budget().size([*args, *kwargs.values()]) + MAX_WIDTH))
            return wrapped(*args, **kwargs)

        return formatted


_ENVIRONMENT = _Sandbox()
_OTHER_TEMPLATES: tuple[type[nodes.Node], ...] = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class Program:
    """A compiled template. Raises jinja2.TemplateError, also for one that is too long or includes others."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise BudgetExceeded(f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
        _active.budget = _Budget()
        try:
            tree = _ENVIRONMENT.parse(source)
            if any(tree.find(kind) is not None for kind in _OTHER_TEMPLATES):
                raise SecurityError("it includes or imports another template")
            code = _ENVIRONMENT.compile(_Instrument().visit(tree))
            self._template = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        except RecursionError:
            raise BudgetExceeded("it is nested too deeply") from None
        finally:
            del _active.budget

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text it renders. Any exception is the template's doing; those of the sandbox are jinja2.TemplateError."""
        _active.budget = _Budget()
        try:
            return self._template.render(variables)
        except RecursionError:
            raise BudgetExceeded("it calls itself too deeply") from None
        finally:
            del _active.budget
