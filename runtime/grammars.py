"""From what a request asks for (`messages.Grammar`) to what llguidance compiles, checked on the way.

Used where requests are admitted (`validate_grammar`, inside `grammar_compiler`'s child process) and in the worker. Every kind constrains the
whole of what is generated:

json_schema   the table in `json_schema.py`; compact JSON as `json.dumps` writes it, so that white space is bounded and costs no steps
regex         Rust syntax without look-around and back-references; \\d is [0-9]; anchors at the ends are allowed and change nothing
ebnf          GBNF, as llama.cpp and xgrammar write it (`ebnf.py`)
lark          llguidance's dialect of Lark, without `%json` (use json_schema, which is checked) and `temperature=`
choices       a JSON list of texts, each meant literally
"""

import json
import re
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from anabranch.runtime.ebnf import ebnf_to_lark, escape_regex
from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.json_schema import SchemaError, blame, check_schema, parse_json
from anabranch.runtime.messages import Grammar

MAX_SOURCE_BYTES = 256 << 10
MAX_CHOICES = 4096

# ", " and ": " between parts and no other white space; only the short escapes, so that a key has one spelling.
_JSON_OPTIONS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrtbf\\"',
}


class GrammarError(InvalidRequest):
    """A grammar that cannot be compiled or is not allowed. `path` is where in a schema the fault lies, "" elsewhere."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{message} (at {path})" if path else message, param="grammar", code="invalid_grammar")
        self.path = path


def validate_grammar(grammar: Grammar) -> None:
    """Raises GrammarError. The time that this takes is not bounded by itself: see `grammar_compiler`."""
    matcher = LLMatcher(_byte_tokenizer(), to_llguidance(grammar), log_level=0, limits=parser_limits())
    may_begin = any(matcher.compute_bitmask())
    if matcher.is_error() or not may_begin:
        message = describe_failure(matcher.get_error())
        path = blame(parse_json(grammar.source), message) if grammar.kind == "json_schema" else ""
        raise GrammarError(message, path)


def to_llguidance(grammar: Grammar) -> str:
    """Raises GrammarError for what can be seen without compiling."""
    check_source(grammar)
    try:
        match grammar.kind:
            case "json_schema":
                return _from_schema(grammar.source)
            case "regex":
                return _from_regex(_unanchored(grammar.source))
            case "ebnf":
                return LLMatcher.grammar_from_lark(ebnf_to_lark(grammar.source))
            case "lark":
                return LLMatcher.grammar_from_lark(_checked_lark(grammar.source))
            case "choices":
                return _from_regex("|".join(map(escape_regex, _choices(grammar.source))))
    except SchemaError as fault:
        raise GrammarError(fault.problem, fault.path) from None
    except ValueError as fault:
        raise GrammarError(f"{grammar.kind}: {fault}") from None


def check_source(grammar: Grammar) -> None:
    """Raises GrammarError for a source that is too long, or no Unicode."""
    try:
        is_long = len(grammar.source) > MAX_SOURCE_BYTES or len(grammar.source.encode()) > MAX_SOURCE_BYTES
    except UnicodeEncodeError:
        raise GrammarError(f"the {grammar.kind} holds half of a surrogate pair; it is not valid Unicode") from None
    if is_long:
        raise GrammarError(f"the {grammar.kind} has more than {MAX_SOURCE_BYTES} bytes")


def parser_limits() -> LLParserLimits:
    """Bounds of one step of the parser, and of what a grammar may grow to. Source: the rates in llguidance's documentation."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


@cache
def _byte_tokenizer() -> LLTokenizer:
    """The smallest vocabulary that can spell everything."""
    return LLTokenizer(_Bytes(), n_vocab=257, eos_token=256, slices=[])  # type: ignore[arg-type]


class _Bytes:
    is_tokenizer_wrapper = True  # how llguidance knows what it may be given
    eos_token_id = 256
    bos_token_id = None

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def describe_failure(message: str) -> str:
    """llguidance's words, cut to what a client may see."""
    text = re.split(r"\n?<(?:state|non-verbose)", message)[0].strip()
    if "regex parse error" in text:
        text = "invalid regex: " + text.rpartition("error: ")[2].split("\n")[0]
    elif text.startswith("oneOf constraints"):
        text = "oneOf is supported only where its alternatives visibly exclude each other: give each a property with its own const, or use anyOf"
    elif not text or text.startswith("NoExtension"):
        text = "the grammar allows no text at all"
    return text if len(text) <= 500 else text[:500] + "..."


def _from_schema(source: str) -> str:
    schema = parse_json(source)
    check_schema(schema)
    if schema is False:
        raise SchemaError("the schema is false: no JSON satisfies it", "#")
    return LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), overrides=_JSON_OPTIONS)  # type: ignore[arg-type]


def _from_regex(pattern: str) -> str:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("ends with a backslash that escapes nothing")
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(pattern, 'd')}/")


def _unanchored(pattern: str) -> str:
    """Without ^ at the start and $ at the end, which say nothing where the whole text must match."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escapes = len(body) - len(body.rstrip("\\"))
    return body if escapes % 2 == 0 else pattern


def _checked_lark(source: str) -> str:
    if "%json" in source:
        raise ValueError("%json is not allowed here; send the schema as kind json_schema, which is checked")
    if re.search(r"\btemperature\s*=", source):
        raise ValueError("the attribute temperature= is not supported; set the temperature of the request")
    return source


def _choices(source: str) -> list[str]:
    choices: Any = parse_json(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("must be a JSON list of one or more strings")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"has {len(choices)} entries, over the limit of {MAX_CHOICES}")
    return choices
