"""Types of generated values: what constrains the text, and how the text becomes a value.

SGLang's `dtype` constrains and returns strings. `type=` here also returns the value: int, float, bool, str, Literal,
Enum, dataclasses, TypedDicts, lists, dicts, unions of these, and pydantic models.
"""

import dataclasses
import enum
import json
import types as python_types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from anabranch.lang.backend import Constraint
from anabranch.lang.errors import Unsupported

# SGLang's patterns for dtype, under its names.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""

# Ours: a value that Python reads back, of bounded length. A number may be followed by one character that ends it,
# which is also a stop string and so no part of the text: a model that wants to go on with "." must not be left with
# digits alone.
VALUE_INT = r"-?(0|[1-9][0-9]{0,17})[ \n.,;)]?"
VALUE_FLOAT = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?[ \n,;)]?"
VALUE_BOOL = r"(true|false)"


@dataclass(frozen=True, slots=True)
class TypeSpec:
    """`constraint` makes the text one of the type's; `parse` makes the text a value, or raises ValueError."""

    name: str
    constraint: Constraint | None
    parse: Callable[[str], Any]
    stop: tuple[str, ...] = ()


def dtype_spec(dtype: Any) -> TypeSpec:
    """SGLang's dtypes: constrained text that stays a string."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", repr(dtype))
    patterns = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
    if name not in patterns:
        raise ValueError(f"dtype must be int, float, bool or str, got {dtype!r}; for other types use type=")
    stop = (" ", "\n") if name in ("int", "float") else ()
    return TypeSpec(name, Constraint("regex", patterns[name]), lambda text: text, stop)


def type_spec(kind: Any) -> TypeSpec:
    """The constraint and parser of a Python type. A dict or str is taken as a JSON Schema, its value parsed JSON."""
    name = getattr(kind, "__name__", None) or repr(kind)
    if kind is int:
        return TypeSpec(name, Constraint("regex", VALUE_INT), int, (" ", "\n", ".", ",", ";", ")"))
    if kind is float:
        return TypeSpec(name, Constraint("regex", VALUE_FLOAT), float, (" ", "\n", ",", ";", ")"))
    if kind is bool:
        return TypeSpec(
            name, Constraint("regex", VALUE_BOOL), lambda text: _one_of(text, {"true": True, "false": False})
        )
    if kind is str:
        return TypeSpec(name, None, str)
    if isinstance(kind, Mapping | str):
        return TypeSpec("JSON", Constraint("json_schema", schema_text(kind)), json.loads)
    if (members := _named_values(kind)) is not None:
        source = json.dumps(list(members), ensure_ascii=False)
        return TypeSpec(name, Constraint("choices", source), lambda text: _one_of(text, members))
    if hasattr(kind, "model_validate_json"):  # a pydantic model
        return TypeSpec(name, Constraint("json_schema", schema_text(kind)), kind.model_validate_json)
    return TypeSpec(name, Constraint("json_schema", schema_text(kind)), lambda text: build(kind, json.loads(text)))


def schema_text(schema: Any) -> str:
    """A JSON Schema as text: from text, a mapping, a pydantic model, or a type."""
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise ValueError(f"a JSON Schema given as text must be JSON, got {schema!r:.80}: {error}") from None
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(schema, ensure_ascii=False)
    if hasattr(schema, "model_json_schema"):
        return json.dumps(_closed(schema.model_json_schema()), ensure_ascii=False)
    return json.dumps(schema_of(schema), ensure_ascii=False)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type. Recursive types are refused: use a pydantic model for them."""
    definitions: dict[str, Any] = {}
    schema = _hoisted(_schema(kind, ()), definitions)
    return {**schema, "$defs": definitions} if definitions else schema


def _hoisted(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema without the `$defs` of pydantic models inside it, which their references look for at the root."""
    if isinstance(schema, list):
        return [_hoisted(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    for name, part in schema.get("$defs", {}).items() if isinstance(schema.get("$defs"), dict) else ():
        if definitions.setdefault(name, part) != part:
            raise Unsupported(f"two models in one type are called {name!r}; rename one of them")
    return {key: _hoisted(part, definitions) for key, part in schema.items() if key != "$defs"}


def _schema(kind: Any, inside: tuple[Any, ...]) -> dict[str, Any]:
    plain = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", None: "null"}
    if kind in plain:
        return {"type": plain[kind]}
    if kind is Any:
        return {}
    if kind in inside:
        raise Unsupported(f"type {kind!r} contains itself; write it as a pydantic model, or give a JSON Schema")
    origin, args = get_origin(kind), get_args(kind)
    inside = (*inside, kind)
    if (members := _named_values(kind)) is not None:
        return {"enum": [m.value if isinstance(m, enum.Enum) else m for m in members.values()]}
    if origin in (Union, python_types.UnionType):
        return {"anyOf": [_schema(a, inside) for a in args]}
    if kind is list or origin is list:
        return {"type": "array", "items": _schema(args[0], inside)} if args else {"type": "array"}
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [_schema(a, inside) for a in args]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}
    if kind is dict or origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], inside)} if args else {"type": "object"}
    if hasattr(kind, "model_json_schema"):
        return _closed(kind.model_json_schema())
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _object_schema(kind, inside)
    raise Unsupported(
        f"no JSON Schema for type {kind!r}; use int, float, bool, str, Literal, Enum, list, dict, a dataclass "
        "or a pydantic model"
    )


def _closed(schema: Any) -> Any:
    """A pydantic model's schema, its objects without room for properties that no field takes: a model that may write on
    will. What says `additionalProperties` itself (extra="allow", dicts) stays as it is.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for key in ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf"):
        if key in closed:
            closed[key] = _closed(closed[key])
    for key in ("properties", "$defs"):
        if key in closed:
            closed[key] = {name: _closed(part) for name, part in closed[key].items()}
    if "properties" in closed and "allOf" not in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _object_schema(kind: Any, inside: tuple[Any, ...]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        fields = [f for f in dataclasses.fields(kind) if f.init]
        required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
        names = [f.name for f in fields]
    else:
        names, required = list(hints), [n for n in hints if n in kind.__required_keys__]
    properties = {name: _schema(hints[name], inside) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def build(kind: Any, data: Any) -> Any:
    """The value of type `kind` from parsed JSON. Raises ValueError where the data does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if kind in (type(None), None):
        return _expect(data is None, data, "null", None)
    if kind is bool or kind is str:
        return _expect(isinstance(data, kind), data, kind.__name__, data)
    if kind is int:
        return _expect(isinstance(data, int) and not isinstance(data, bool), data, "int", data)
    if kind is float:
        fits = isinstance(data, int | float) and not isinstance(data, bool)
        return _expect(fits, data, "float", float(data) if fits else None)
    if hasattr(kind, "model_validate"):
        return kind.model_validate(data)
    if (members := _named_values(kind)) is not None:
        values = {(m.value if isinstance(m, enum.Enum) else m): m for m in members.values()}
        return _one_of(data, values)
    if origin in (Union, python_types.UnionType):
        return _build_first(args, data)
    if kind is list or origin is list:
        _expect(isinstance(data, list), data, "list", None)
        return [build(args[0], item) for item in data] if args else data
    if origin is tuple:
        _expect(isinstance(data, list) and len(data) == len(args), data, f"a list of {len(args)}", None)
        return tuple(build(a, item) for a, item in zip(args, data, strict=True))
    if kind is dict or origin is dict:
        _expect(isinstance(data, dict), data, "dict", None)
        return {key: build(args[1], value) for key, value in data.items()} if args else data
    return _build_object(kind, data)


def _build_object(kind: Any, data: Any) -> Any:
    _expect(isinstance(data, dict), data, "object", None)
    hints = get_type_hints(kind)
    unknown = set(data) - set(hints)
    _expect(not unknown, sorted(unknown), f"fields of {kind.__name__}", None)
    missing = set(getattr(kind, "__required_keys__", ())) - set(data)
    _expect(not missing, sorted(data), f"fields {sorted(missing)} too", None)
    values = {name: build(hints[name], value) for name, value in data.items()}
    try:
        return kind(**values)
    except TypeError as error:  # a required field is missing
        raise ValueError(str(error)) from None


def _build_first(kinds: tuple[Any, ...], data: Any) -> Any:
    for kind in kinds:
        try:
            return build(kind, data)
        except ValueError:
            continue
    raise ValueError(f"{data!r} is none of {kinds}")


def _named_values(kind: Any) -> dict[str, Any] | None:
    """Text -> value, for Literals and Enums whose values are strings, numbers or booleans."""
    if get_origin(kind) is Literal:
        return {_text_of(value): value for value in get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {_text_of(member.value): member for member in kind}
    return None


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    raise Unsupported(f"a Literal or Enum to generate must have strings or numbers, got {value!r}")


def _one_of(data: Any, values: Mapping[Any, Any]) -> Any:
    for key, value in values.items():
        if type(key) is type(data) and key == data:  # True is not 1 here
            return value
    raise ValueError(f"{data!r} is none of {list(values)}")


def _expect(fits: bool, data: Any, wanted: str, value: Any) -> Any:
    if not fits:
        raise ValueError(f"expected {wanted}, got {data!r}")
    return value
