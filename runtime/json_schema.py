"""Which JSON schemas we honour. Every other keyword is refused, by name and path: none is accepted and then ignored.

HONOURED and APPLICATORS below are the table (docs/grammars.md shows it). What a keyword means is JSON Schema 2020-12. Further rules:

- `$ref` points into the document (`#` or `#/...`), at a schema; nothing is fetched.
- A schema that no finite document satisfies (A -> A, or an object that requires itself) is refused.
- `oneOf` needs alternatives that visibly exclude each other; `minProperties` beyond what is required cannot be promised, since
  a repeated key counts once; `multipleOf` is for integers.
- Objects come in the order of `properties`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64
MAX_SCHEMAS = 10_000
MAX_COUNT = 100_000  # of minItems, maxLength ...
MAX_NUMBER = 2**53

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DRAFTS = (
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)
HINTS = {
    "additionalItems": "use prefixItems and items",
    "nullable": 'use {"type": [..., "null"]}',
    "$anchor": "use $ref with a pointer, #/$defs/...",
    "x-guidance": "generation options are not part of a schema",
}
ANNOTATIONS = (
    "$schema", "$comment", "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
)  # fmt: skip


class SchemaError(ValueError):
    """A schema that we do not honour. `path` is a JSON pointer."""

    def __init__(self, problem: str, path: str) -> None:
        super().__init__(f"{problem} (at {path})")
        self.problem, self.path = problem, path


def parse_json(source: str) -> Any:
    """JSON with nothing dubious in it: no duplicate keys, no NaN, bounded depth. Raises ValueError."""
    try:
        return json.loads(source, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as fault:
        raise ValueError(f"is not JSON: {fault}") from None


def check_schema(schema: Any) -> None:
    """Raises SchemaError for a schema that we do not honour, naming the keyword and the path."""
    schemas: dict[str, Any] = {}
    references: dict[str, str] = {}
    for path, part in _walk(schema, "#", 0):
        schemas[path] = part
        if len(schemas) > MAX_SCHEMAS:
            raise SchemaError(f"the schema has more than {MAX_SCHEMAS} parts", "#")
        if isinstance(part, dict) and "$ref" in part:
            references[path] = _target(part["$ref"], path)
    for path, target in references.items():
        if target not in schemas:
            raise SchemaError(f"$ref {schemas[path]['$ref']!r} points to no schema of this document", path)
    _check_ends(schemas, references)


def blame(schema: Any, message: str) -> str:
    """The path of the keyword that a message of the compiler speaks of, as far as that is clear; else the root's."""
    named = [name for name in (*HONOURED, *APPLICATORS) if name in message]
    paths = [
        path for path, part in _walk(schema, "#", 0) if isinstance(part, dict) and any(name in part for name in named)
    ]
    return paths[0] if paths else "#"


# ---------------------------------------------------------------- keywords

Checker = Callable[[Any, dict[str, Any], str], None]
Child = tuple[str, Any]


def _check_type(value: Any, schema: dict[str, Any], path: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(name not in TYPES for name in names):
        raise SchemaError(f"type is {_shown(value)}; it must be one or more of {', '.join(TYPES)}", path)


def _check_count(name: str) -> Checker:
    def check(value: Any, schema: dict[str, Any], path: str) -> None:
        if not _is_integer(value) or not 0 <= value <= MAX_COUNT:
            raise SchemaError(f"{name} is {_shown(value)}; it must be an integer in 0..{MAX_COUNT}", path)

    return check


def _check_number(name: str) -> Checker:
    def check(value: Any, schema: dict[str, Any], path: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_NUMBER:
            raise SchemaError(
                f"{name} is {_shown(value)}; it must be a number of at most {MAX_NUMBER} either way", path
            )

    return check


def _check_multiple(value: Any, schema: dict[str, Any], path: str) -> None:
    if schema.get("type") != "integer":
        raise SchemaError("multipleOf is honoured beside type integer only", path)
    if not _is_integer(value) or not 1 <= value <= MAX_NUMBER:
        raise SchemaError(f"multipleOf is {_shown(value)}; it must be an integer in 1..{MAX_NUMBER}", path)


def _check_min_properties(value: Any, schema: dict[str, Any], path: str) -> None:
    _check_count("minProperties")(value, schema, path)
    required = schema.get("required")
    if value > max(1, len(set(required)) if isinstance(required, list) else 0):
        raise SchemaError(f"minProperties {value} is more than the required properties, which is not supported", path)


def _check_text(name: str) -> Checker:
    def check(value: Any, schema: dict[str, Any], path: str) -> None:
        if not isinstance(value, str):
            raise SchemaError(f"{name} is {_shown(value)}; it must be a string", path)

    return check


def _check_format(value: Any, schema: dict[str, Any], path: str) -> None:
    if value not in FORMATS:
        raise SchemaError(f"format {_shown(value)} is not supported; supported are {', '.join(FORMATS)}", path)


def _check_names(value: Any, schema: dict[str, Any], path: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError(f"required is {_shown(value)}; it must be a list of strings", path)
    _check_value(value, schema, path)


def _check_enum(value: Any, schema: dict[str, Any], path: str) -> None:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"enum is {_shown(value)}; it must be a list of one or more values", path)
    _check_value(value, schema, path)


def _check_value(value: Any, schema: dict[str, Any], path: str) -> None:
    """Strings inside can be written with the short escapes alone."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            _check_characters(part, path)
        elif isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            stack += [*part, *part.values()]


def _check_characters(text: str, path: str) -> None:
    odd = next((c for c in text if (c < " " and c not in "\n\r\t\b\f") or 0xD800 <= ord(c) < 0xE000), None)
    if odd is not None:
        raise SchemaError(f"the character U+{ord(odd):04X} in {_shown(text)} is not supported", path)


def _check_draft(value: Any, schema: dict[str, Any], path: str) -> None:
    if not isinstance(value, str) or value.rstrip("#") not in DRAFTS:
        raise SchemaError(f"$schema is {_shown(value)}; supported are {', '.join(DRAFTS)}", path)


def _check_id(value: Any, schema: dict[str, Any], path: str) -> None:
    if path != "#" or not isinstance(value, str):
        raise SchemaError("$id is supported at the root only", path)


def _one(name: str) -> Callable[[Any], Iterator[Child]]:
    return lambda value: iter([(name, value)])


def _many(name: str) -> Callable[[Any], Iterator[Child]]:
    def children(value: Any) -> Iterator[Child]:
        if not isinstance(value, list) or not value:
            raise ValueError("must be a list of one or more schemas")
        return ((f"{name}/{i}", part) for i, part in enumerate(value))

    return children


def _named(name: str) -> Callable[[Any], Iterator[Child]]:
    def children(value: Any) -> Iterator[Child]:
        if not isinstance(value, dict):
            raise ValueError("must be an object of schemas")
        return ((f"{name}/{_escaped(key)}", part) for key, part in value.items())

    return children


HONOURED: dict[str, Checker] = {
    "type": _check_type, "enum": _check_enum, "const": _check_value, "$ref": _check_text("$ref"),
    "minLength": _check_count("minLength"), "maxLength": _check_count("maxLength"), "pattern": _check_text("pattern"),
    "format": _check_format,
    "minimum": _check_number("minimum"), "maximum": _check_number("maximum"),
    "exclusiveMinimum": _check_number("exclusiveMinimum"), "exclusiveMaximum": _check_number("exclusiveMaximum"),
    "multipleOf": _check_multiple,
    "minItems": _check_count("minItems"), "maxItems": _check_count("maxItems"),
    "required": _check_names, "minProperties": _check_min_properties, "maxProperties": _check_count("maxProperties"),
}  # fmt: skip
APPLICATORS: dict[str, Callable[[Any], Iterator[Child]]] = {
    "items": _one("items"), "additionalProperties": _one("additionalProperties"), "prefixItems": _many("prefixItems"),
    "anyOf": _many("anyOf"), "oneOf": _many("oneOf"), "allOf": _many("allOf"), "properties": _named("properties"),
    "patternProperties": _named("patternProperties"), "$defs": _named("$defs"), "definitions": _named("definitions"),
}  # fmt: skip


def _walk(schema: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every schema inside `schema`, itself first, with its path. Raises SchemaError at the first fault."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"the schema is nested more than {MAX_DEPTH} deep", path)
    if isinstance(schema, bool):
        yield path, schema
        return
    if not isinstance(schema, dict):
        raise SchemaError(f"{_shown(schema)} is not a schema; it must be an object, true or false", path)
    for name, value in schema.items():
        _check_keyword(name, value, schema, path)
    yield path, schema
    for name in schema.keys() & APPLICATORS.keys():
        try:
            children = APPLICATORS[name](schema[name])
        except ValueError as fault:
            raise SchemaError(f"{name} {fault}, got {_shown(schema[name])}", path) from None
        for place, part in children:
            yield from _walk(part, f"{path}/{place}", depth + 1)


def _check_keyword(name: str, value: Any, schema: dict[str, Any], path: str) -> None:
    if name == "$schema":
        _check_draft(value, schema, path)
    elif name == "$id":
        _check_id(value, schema, path)
    elif name in HONOURED:
        HONOURED[name](value, schema, path)
    elif name == "properties" and isinstance(value, dict):
        _check_value(list(value), schema, path)
    elif name == "items" and isinstance(value, list):
        raise SchemaError("a list of items is not supported; use prefixItems", path)
    elif name not in APPLICATORS and name not in ANNOTATIONS and (not name.startswith("x-") or name in HINTS):
        hint = f"; {HINTS[name]}" if name in HINTS else ""
        raise SchemaError(f"the keyword {_shown(name)} is not supported{hint}", path)


def _target(reference: str, path: str) -> str:
    if not reference.startswith("#"):
        raise SchemaError(f"$ref {_shown(reference)} leaves the document; nothing is fetched", path)
    if reference != "#" and not reference.startswith("#/"):
        raise SchemaError(f"$ref {_shown(reference)} is not a pointer; write #/$defs/...", path)
    return unquote(reference)


# ---------------------------------------------------------------- whether a schema can be finished


def _check_ends(schemas: dict[str, Any], references: dict[str, str]) -> None:
    """Every schema must have a finite document. Computed as the least fixed point: what ends by itself, then what ends through it."""
    ending: set[str] = set()
    waiting = list(reversed(schemas))  # children before parents: one pass is usually enough
    while True:
        left = [path for path in waiting if not _ends(path, schemas[path], references, ending)]
        if len(left) == len(waiting):
            break
        waiting = left[::-1]
    if left:
        path = min(left, key=lambda p: (p not in references, len(p)))
        raise SchemaError("the schema refers to itself without an end: no finite JSON satisfies it", path)


def _ends(path: str, schema: Any, references: dict[str, str], ending: set[str]) -> bool:
    """Whether `schema` has a finite document, given those that are known to. Adds it to `ending`."""
    if _is_finite(path, schema, references, ending):
        ending.add(path)
        return True
    return False


def _is_finite(path: str, schema: Any, references: dict[str, str], ending: set[str]) -> bool:
    if isinstance(schema, bool):
        return True  # false has no document at all: llguidance says so where it matters
    if path in references and references[path] not in ending:
        return False
    if any(f"{path}/allOf/{i}" not in ending for i in range(len(schema.get("allOf", ())))):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(f"{path}/{name}/{i}" in ending for i in range(len(schema[name]))):
            return False
    kinds = schema.get("type", TYPES)
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if "enum" in schema or "const" in schema or kinds - {"array", "object"}:
        return True
    return ("array" in kinds and _array_ends(path, schema, ending)) or (
        "object" in kinds and _object_ends(path, schema, ending)
    )


def _array_ends(path: str, schema: dict[str, Any], ending: set[str]) -> bool:
    first = len(schema.get("prefixItems", ()))
    least = schema.get("minItems", 0)
    needed = [f"{path}/prefixItems/{i}" for i in range(min(first, least))]
    if least > first and "items" in schema:
        needed.append(f"{path}/items")
    return all(place in ending for place in needed)


def _object_ends(path: str, schema: dict[str, Any], ending: set[str]) -> bool:
    known = schema.get("properties", {})
    needed = {f"{path}/properties/{_escaped(name)}" for name in schema.get("required", ()) if name in known}
    if any(name not in known for name in schema.get("required", ())) and "additionalProperties" in schema:
        needed.add(f"{path}/additionalProperties")
    return needed <= ending


# ---------------------------------------------------------------- small things


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"has the key {_shown(twice)} twice in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if abs(value) == float("inf"):
        raise ValueError(f"holds {_shown(digits)}, which is too large for a number")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
