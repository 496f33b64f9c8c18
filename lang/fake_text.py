"""Fake tokens for the scripted backend: words for ids, made-up logprobs, and text that fits a constraint."""

import itertools
import json
import random
import re
import zlib
from collections.abc import Mapping
from typing import Any

from anabranch.lang.backend import Constraint

VOCAB_SIZE = 1 << 31
_WORD = re.compile(r"<\|\w+\|>|\s*\w+|\s*[^\w\s]|\s+")
_pieces: dict[int, str] = {}

WORDS = [
    "a",
    "the",
    "river",
    "branch",
    "flows",
    "joins",
    "again",
    "near",
    "old",
    "stone",
    "bridge",
    "under",
    "light",
    "rain",
    "with",
    "green",
    "reeds",
    "and",
]


def tokenize(text: str) -> list[str]:
    """Words with the space before them; their concatenation is the text."""
    return _WORD.findall(text)


def cut(text: str, count: int) -> list[str]:
    """The text in exactly `count` pieces: words if there are as many, else runs of characters."""
    words = tokenize(text)
    if len(words) == count:
        return words
    if not 1 <= count <= len(text):
        raise ValueError(f"{text!r} cannot be {count} tokens")
    edges = [len(text) * i // count for i in range(count + 1)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def token_id(piece: str) -> int:
    value = zlib.crc32(piece.encode()) & (VOCAB_SIZE - 1)
    _pieces[value] = piece
    return value


def piece_of(token: int) -> str:
    if token not in _pieces:
        raise ValueError(f"token {token} stands for no text that this process has seen")
    return _pieces[token]


def logprob(path: tuple[int, ...], piece: str) -> float:
    """Between -2 and 0, the same for the same branch and piece."""
    return -(zlib.crc32(f"{path}{piece}".encode()) % 2000) / 1000


def make_up(constraint: Constraint | None, noise: random.Random, max_tokens: int) -> str:
    """Text that satisfies the constraint, drawn from `noise`. A regex that is wrong raises, as a real backend would."""
    if constraint is None:
        words = [noise.choice(WORDS) for _ in range(min(max_tokens, noise.randint(3, 8)))]
        return "".join(f" {w}" for w in words)
    match constraint.kind:
        case "choices":
            return str(noise.choice(json.loads(constraint.source)))
        case "json_schema":
            return json.dumps(_instance(json.loads(constraint.source), noise))
        case "regex":
            return _matching(constraint.source, noise)
    raise NotImplementedError(f"made-up text cannot follow a {constraint.kind} grammar; script the reply")


def _instance(schema: Mapping[str, Any], noise: random.Random, root: Mapping[str, Any] | None = None) -> Any:
    root = schema if root is None else root
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], noise, root)
    if "enum" in schema:
        return noise.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return _instance(noise.choice(schema["anyOf"]), noise, root)
    match schema.get("type"):
        case "object":
            return {name: _instance(sub, noise, root) for name, sub in schema.get("properties", {}).items()}
        case "array":
            if "prefixItems" in schema:
                return [_instance(sub, noise, root) for sub in schema["prefixItems"]]
            count = max(schema.get("minItems", 0), min(2, schema.get("maxItems", 2)))
            return [_instance(schema.get("items", {}), noise, root) for _ in range(count)]
        case "integer":
            return noise.randint(schema.get("minimum", 0), schema.get("maximum", 99))
        case "number":
            return noise.randint(0, 99) / 4
        case "boolean":
            return noise.random() < 0.5
        case "null":
            return None
    return noise.choice(WORDS)


def _matching(pattern: str, noise: random.Random) -> str:
    from re import _parser  # type: ignore[attr-defined]  # the only place where Python keeps a pattern's structure

    re.compile(pattern)
    return _expand(list(_parser.parse(pattern)), noise)


def _expand(parts: list[Any], noise: random.Random) -> str:
    return "".join(_expand_one(str(op), args, noise) for op, args in parts)


def _expand_one(op: str, args: Any, noise: random.Random) -> str:
    match op:
        case "LITERAL":
            return chr(args)
        case "NOT_LITERAL":
            return "a" if args != ord("a") else "b"
        case "ANY":
            return "a"
        case "IN":
            return _expand_set(args, noise)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            low, high, body = args
            count = noise.randint(low, min(int(high), max(low, 2)))
            return "".join(_expand(list(body), noise) for _ in range(count))
        case "SUBPATTERN":
            return _expand(list(args[-1]), noise)
        case "BRANCH":
            return _expand(list(noise.choice(args[1])), noise)
        case "AT":
            return ""
    raise NotImplementedError(f"made-up text cannot follow a pattern with {op}; script the reply")


def _expand_set(items: list[Any], noise: random.Random) -> str:
    negated = str(items[0][0]) == "NEGATE"
    if negated:
        excluded = {chr(v) for k, v in items[1:] if str(k) == "LITERAL"}
        return next(c for c in "abcxyz0 " if c not in excluded)
    kind, value = noise.choice(items)
    match str(kind):
        case "RANGE":
            return chr(noise.randint(*value))
        case "CATEGORY":
            return {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "w"}.get(str(value), "x")
    return chr(value)
