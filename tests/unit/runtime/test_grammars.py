import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from anabranch.runtime.ebnf import ebnf_to_lark, escape_regex
from anabranch.runtime.grammars import (
    MAX_CHOICES,
    MAX_SOURCE_BYTES,
    GrammarError,
    parser_limits,
    to_llguidance,
    validate_grammar,
)
from anabranch.runtime.json_schema import ANNOTATIONS, APPLICATORS, FORMATS, HONOURED, SchemaError, check_schema
from anabranch.runtime.messages import Grammar


class Bytes:
    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = LLTokenizer(Bytes(), n_vocab=257, eos_token=256, slices=[])  # type: ignore[arg-type]


def accepts(kind: str, source: Any, text: str) -> bool:
    """Whether `text` is a complete output under the grammar."""
    grammar = Grammar(kind, source if isinstance(source, str) else json.dumps(source))  # type: ignore[arg-type]
    validate_grammar(grammar)
    matcher = LLMatcher(BYTES, to_llguidance(grammar), log_level=0, limits=parser_limits())
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def problem(kind: str, source: Any) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        validate_grammar(Grammar(kind, source if isinstance(source, str) else json.dumps(source)))  # type: ignore[arg-type]
    assert caught.value.param == "grammar" and caught.value.type == "invalid_request_error"
    assert "<state>" not in str(caught.value) and "verbose" not in str(caught.value)
    return caught.value


# ---------------------------------------------------------------- JSON Schema


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"type": "strin"}, "#", "type is 'strin'"),
        ({"type": []}, "#", "type is []"),
        ({"type": "object", "properties": 5}, "#", "properties must be an object of schemas"),
        ({"properties": {"a": 7}}, "#/properties/a", "7 is not a schema"),
        ({"properties": {"a/b~c": {"type": "x"}}}, "#/properties/a~1b~0c", "type is 'x'"),
        (7, "#", "7 is not a schema"),
        (False, "#", "the schema is false"),
        ({"anyOf": []}, "#", "anyOf must be a list of one or more schemas"),
        ({"enum": []}, "#", "enum is []"),
        ({"minLength": -1}, "#", "minLength is -1"),
        ({"minItems": 1.5}, "#", "minItems is 1.5"),
        ({"maxItems": 10**9}, "#", "maxItems is 1000000000"),
        ({"minimum": "1"}, "#", "minimum is '1'"),
        ({"minimum": 10**30}, "#", "minimum is 1000000000"),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "#", "exclusiveMinimum is True"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#", "minimum (5) is greater than maximum (3)"),
        ({"type": "string", "pattern": "("}, "#", "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "#", "look-around"),
        ({"type": "string", "pattern": 5}, "#", "pattern is 5"),
        ({"required": "a"}, "#", "required is 'a'"),
        ({"const": "\x01"}, "#", "U+0001"),
        ({"enum": [{"a": ["\x7f", "\x02"]}]}, "#", "U+0002"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "#", "$schema is"),
        ({"items": {"$id": "x"}}, "#/items", "$id is supported at the root only"),
    ],
)
def test_a_fault_in_a_schema_is_named_with_its_path(schema: Any, path: str, words: str) -> None:
    fault = problem("json_schema", schema)
    assert fault.path == path and words in fault.message


REFUSED = {
    "uniqueItems": True, "contains": {"type": "integer"}, "minContains": 1, "if": {}, "then": {}, "else": {}, "not": {},
    "dependentRequired": {"a": ["b"]}, "dependentSchemas": {}, "dependencies": {}, "propertyNames": {}, "additionalItems": False,
    "unevaluatedProperties": False, "unevaluatedItems": False, "contentEncoding": "base64", "contentMediaType": "x", "nullable": True,
    "$anchor": "a", "$dynamicRef": "#a", "$dynamicAnchor": "a", "$recursiveRef": "#", "x-guidance": {"lenient": True}, "foo": 1,
    "items": [{}], "format": "regex", "minProperties": 2, "multipleOf": 3,
}  # fmt: skip


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_not_honoured_is_refused_by_name_and_path(keyword: str) -> None:
    fault = problem("json_schema", {"type": "object", "properties": {"x": {keyword: REFUSED[keyword]}}})
    assert fault.path == "#/properties/x" and keyword in fault.message


HONOURED_EXAMPLES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -5], [1.5, "1", True]),
    ({"type": ["null", "boolean"]}, [None, True], [1, "x"]),
    ({"enum": [1, "a", [1, {"b": None}]]}, [1, "a", [1, {"b": None}]], [2, "b"]),
    ({"type": "integer", "enum": ["a", 1]}, [1], ["a"]),
    ({"const": {"a": "x\n"}}, [{"a": "x\n"}], [{"a": "x"}, {}]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "üüü"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["", "ab"]),
    ({"type": "string", "pattern": "b", "maxLength": 3}, ["b", "abc"], ["aaa", "abca"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-02-30", "x"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29"]),
    ({"type": "string", "format": "time"}, ["10:00:00Z"], ["25:00:00Z"]),
    ({"type": "string", "format": "duration"}, ["PT1H", "P3D"], ["1 hour"]),
    ({"type": "string", "format": "email"}, ["a@b.co"], ["a"]),
    ({"type": "string", "format": "hostname"}, ["a.example"], ["-a", "a b"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.255"], ["1.2.3.256"]),
    ({"type": "string", "format": "ipv6"}, ["::1"], ["1.2.3.4"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "string", "format": "uri"}, ["https://a.example/b"], ["a b"]),
    ({"type": "number", "minimum": -1, "exclusiveMaximum": 2}, [-1, 1.99, 0], [2, -1.5]),
    ({"type": "integer", "exclusiveMinimum": 3, "maximum": 5}, [4, 5], [3, 6]),
    ({"type": "integer", "multipleOf": 7, "minimum": 20, "maximum": 50}, [21, 49], [20, 22]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3], ["a"]],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        [[1, "a"]],
        [["a", 1], [1], [1, "a", 2]],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        [{"a": 1}],
        [{}, {"a": "x"}, {"a": 1, "b": 2}],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{"q": 1}],
        [{}, {"q": "x"}, {"a": 1, "b": 2, "c": 3}],
    ),
    (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{"n_a": 1}, {}],
        [{"n_a": "x"}, {"m": 1}],
    ),
    (
        {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["z"]},
        [{"y": 1, "z": []}, {"z": 1}],
        [{"y": 1}],
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 3}, [3, "a"], [2, None]),
    ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True], ["a"]),
    ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]}, [1, 5], [0, 6]),
    ({"$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A", "minimum": 4}, [4], [3, "a"]),
    (
        {"definitions": {"A B/C": {"type": "integer"}}, "items": {"$ref": "#/definitions/A%20B~1C"}, "type": "array"},
        [[1]],
        [["a"]],
    ),
    (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"a": {"a": {}}}],
        [{"a": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), HONOURED_EXAMPLES, ids=lambda value: json.dumps(value)[:60])
def test_what_is_honoured_is_enforced(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert accepts("json_schema", schema, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not accepts("json_schema", schema, json.dumps(value, ensure_ascii=False)), value


def test_every_honoured_keyword_has_an_example() -> None:
    assert HONOURED.keys() <= {
        key for schema, _, _ in HONOURED_EXAMPLES for key in json.dumps(schema).replace(":", "").split('"')
    }


def test_annotations_and_extensions_are_let_through() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x/y", "title": "T", "description": "D", "default": 1,
        "examples": [1], "deprecated": True, "readOnly": True, "$comment": "c", "x-order": 3, "type": "integer",
    }  # fmt: skip
    assert accepts("json_schema", schema, "5")


def test_json_is_written_one_way() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "null"}},
    }
    assert accepts("json_schema", schema, '{"a": [1, 2], "b": null}')
    for text in ('{ "a": [1, 2]}', '{"a":[1,2]}', '{"a": [1,\n2]}', '{"a": [1, 2]} ', '{"\\u0061": "x"}', " {}"):
        assert not accepts("json_schema", schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"allOf": [{"type": "null"}, {"$ref": "#"}]}]},
        {"type": "object", "required": ["q"], "additionalProperties": {"$ref": "#"}},
        {"$ref": "#"},
    ],
)  # fmt: skip
def test_a_schema_without_a_finite_document_is_refused(schema: dict[str, Any]) -> None:
    assert "without an end" in problem("json_schema", schema).message


def test_recursion_that_can_end_is_accepted() -> None:
    chain = {
        "$defs": {f"D{i}": {"$ref": f"#/$defs/D{i + 1}"} for i in range(300)} | {"D300": {"type": "null"}},
        "$ref": "#/$defs/D0",
    }
    check_schema(chain)
    check_schema({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 2}, {"type": "null"}]})
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["kids"],
        "additionalProperties": False,
    }
    assert accepts("json_schema", tree, '{"kids": [{"kids": []}]}')


@pytest.mark.parametrize(
    "reference",
    [
        "http://example.com/x",
        "file:///etc/passwd",
        "other.json",
        "#anchor",
        "#/$defs/B",
        "#/$defs",
        "#/type",
        "#/const/a",
    ],
)
def test_references_stay_inside_the_document_and_point_to_schemas(reference: str) -> None:
    fault = problem(
        "json_schema",
        {"type": "object", "properties": {"a": {"$ref": reference}}, "$defs": {"A": {}}, "const": {"a": {}}},
    )
    assert fault.path == "#/properties/a" and "$ref" in fault.message


def test_sizes_and_depth_are_bounded() -> None:
    deep: Any = {"type": "null"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    assert "nested more than 64 deep" in problem("json_schema", deep).message
    assert "more than 10000 parts" in problem("json_schema", {"anyOf": [{}] * 10_001}).message
    assert "nested too deeply" in problem("json_schema", "[" * 100_000).message
    assert str(MAX_SOURCE_BYTES) in problem("json_schema", json.dumps({"const": "a" * MAX_SOURCE_BYTES})).message
    assert str(MAX_SOURCE_BYTES) in problem("regex", "ü" * (MAX_SOURCE_BYTES // 2 + 1)).message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"), ("{", "is not JSON"), ('{"type": "null", "type": "null"}', "'type' twice"), ('{"const": NaN}', "NaN is not JSON"),
        ('{"const": 1e999}', "too large"), ('{"minimum": ' + "9" * 5000 + "}", "json_schema"),
    ],
)  # fmt: skip
def test_dubious_json_is_refused(text: str, words: str) -> None:
    assert words in problem("json_schema", text).message


def test_a_schema_that_the_compiler_refuses_is_blamed_on_the_keyword() -> None:
    schema = {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}}
    fault = problem("json_schema", schema)
    assert fault.path == "#/properties/a" and "oneOf is supported only where" in fault.message


def test_schema_errors_carry_their_path() -> None:
    with pytest.raises(SchemaError) as caught:
        check_schema({"items": {"type": "x"}})
    assert caught.value.path == "#/items" and "(at #/items)" in str(caught.value)


# ---------------------------------------------------------------- regex and choices


@pytest.mark.parametrize("pattern", ["(", "[a-", "*a", "(?=a)b", r"(a)\1", "a\\", r"\q", "(?<!a)b", r"\bword"])
def test_a_faulty_regex_is_refused(pattern: str) -> None:
    assert "regex" in problem("regex", pattern).message


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d{2}", ["12"], ["٣٣", "1", "123"]), ("^ab$", ["ab"], ["^ab$", "a"]), ("^a|b$", ["a", "b"], ["ab"]), (r"a\$", ["a$"], ["a"]),
        (r"a\\$", ["a\\"], ["a"]), ("/x/", ["/x/"], ["x"]), ("", [""], ["a"]), ("[é-ü]+", ["ê"], ["a"]), ("a.c", ["abc"], ["a\nc"]),
        (r"x\n\t", ["x\n\t"], ["x"]), ("a{2,3}?", ["aa", "aaa"], ["a"]), ("(?i)ab", ["aB"], ["ac"]),
    ],
)  # fmt: skip
def test_a_regex_means_the_whole_output(pattern: str, good: list[str], bad: list[str]) -> None:
    assert all(accepts("regex", pattern, text) for text in good)
    assert not any(accepts("regex", pattern, text) for text in bad)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=5), st.text(max_size=4))
def test_choices_are_exactly_themselves(choices: list[str], other: str) -> None:
    assert all(accepts("choices", choices, choice) for choice in choices)
    other = other.encode("utf-8", "replace").decode()
    assert accepts("choices", choices, other) == (other in choices)


@pytest.mark.parametrize("source", ["[]", '["a", 1]', '"a"', "{", "{}", json.dumps(["a"] * (MAX_CHOICES + 1))])
def test_choices_are_a_list_of_texts(source: str) -> None:
    assert problem("choices", source).message.startswith("choices: ")


def test_half_a_surrogate_pair_is_refused() -> None:
    assert "surrogate" in problem("regex", "\ud800").message


# ---------------------------------------------------------------- EBNF and Lark

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws   # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (JSON_GBNF, ["{}", '{"a":1}', '{"a": [1, true, {"b": "x\\n\\u00e9"}]}'], ["[1]", '{"a":1', '{"a":1}x', ""]),
        ('root ::= "yes" | "no"', ["yes", "no"], ["y", "yesno", ""]),
        ('root ::= a* "b"\na ::= "(" a ")" | "x"', ["b", "xb", "((x))xb"], ["(x", "()b"]),
        (r"root ::= [^a-c\]]+", ["xyz", "-["], ["a", "x]", ""]),
        (r'root ::= "a/b{c}" "\x41\u00e9\U0001F600"?', ["a/b{c}", "a/b{c}Aé😀"], ["a/bc"]),
        ('root ::= "a" "b" "d" | "ab" "c"', ["abd", "abc"], ["ab"]),
        ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', ["1", "(1+22)+3"], ["1+", "()", "(1"]),
        ('root ::= "x"{2,3} .', ["xxa", "xxx\n", "xxxx"], ["xx"]),
        ('root ::= ("a"{2} "b"{ 1 , })+', ["aab", "aabbaab"], ["ab", "aa"]),
        ('root ::= "" | "a"', ["", "a"], ["b"]),
        ("root ::= [-a] [a-] [+-\\-]", ["-a+", "a-,"], ["b--"]),
        ('# a comment\nroot-Rule_1 ::= "a" # "b"\nroot ::=\n  root-Rule_1\n  | "c"', ["a", "c"], ["b"]),
        ('root ::= "{x}" "%" "{{"', ["{x}%{{"], ["x%{"]),
    ],
)
def test_ebnf_means_what_it_says(source: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts("ebnf", source, text)] == []
    assert [text for text in bad if accepts("ebnf", source, text)] == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("root ::=", "rule 'root' is empty"),
        ("x y z", "expected ::="),
        ('foo ::= "a"', "no rule 'root'"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\n\n  [z-a]', "line 3: the range z-a runs backwards"),
        ("root ::= (a", "expected ')'"),
        ("root ::= b", "'b', which is not defined"),
        (r'root ::= "\q"', "is not an escape"),
        ('root ::= "a"{3,2}', "must rise"),
        ('root ::= "a"{99999}', "at or below 10000"),
        ("root ::= " + "(" * 200, "nested more than 100 deep"),
        ("root ::= root", "no text at all"),
        ('root ::= root "a"', "no text at all"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= "a" )', "does not belong here"),
        (r'root ::= "\uD800"', "is not a character"),
        ("root ::= []", "is empty"),
        ("", "no rule 'root'"),
        ('root ::= * "a"', "does not belong here"),
        ("root ::= a::=", "is empty"),
    ],
)
def test_faults_in_ebnf_are_named(source: str, words: str) -> None:
    assert words in problem("ebnf", source).message


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
def test_any_text_can_be_an_ebnf_literal(text: str) -> None:
    escaped = "".join(f"\\U{ord(c):08x}" for c in text)
    assert accepts("ebnf", f'root ::= "{escaped}"', text)
    assert escape_regex(text).isprintable()


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='root::=ab"[]()|*+?{}0,9-^\\. \n#', max_size=40))
def test_ebnf_is_translated_or_refused_and_nothing_else(source: str) -> None:
    try:
        assert ebnf_to_lark(source).startswith("start: ")
    except ValueError as fault:
        assert str(fault)


def test_lark_is_passed_on_with_its_back_doors_closed() -> None:
    assert accepts("lark", 'start: "a" x\nx: "b" | "c" x', "accb")
    assert "%json" in problem("lark", 'start: "a" %json {"type": "string", "foo": 1}').message
    assert "temperature=" in problem("lark", 'start: x\nx[temperature=0.5]: "a"').message
    assert "nope" in problem("lark", "start: nope").message


def test_the_documentation_lists_what_is_honoured_and_what_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grammars.md").read_text()
    honoured, let_through, refused = (
        line for line in page.splitlines() if line.startswith(("| honoured", "| let", "| refused,"))
    )
    assert set(re.findall(r"`([^`]+)`", honoured)) == {*HONOURED, *APPLICATORS}
    assert set(re.findall(r"`([^`]+)`", let_through)) == {*ANNOTATIONS, "$id", "x-"}
    assert set(re.findall(r"`([^`]+)`", refused)) <= REFUSED.keys()
    assert all(f"`{name}`" in page for name in FORMATS)
