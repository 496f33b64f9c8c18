"""Values with types: the constraint allows exactly what the parser accepts, and wrong text says so."""

import dataclasses
import enum
import json
import random
import re
from typing import Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.lang import api as ab
from anabranch.lang import fake_text
from anabranch.lang.testing import ScriptedBackend
from anabranch.lang.types import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR, build, dtype_spec, schema_of, type_spec


class Size(enum.Enum):
    SMALL = "s"
    LARGE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Shape:
    name: str
    corners: list[Point]
    kind: Literal["open", "closed"]
    size: Size
    note: str | None = None


class Options(TypedDict):
    fast: bool
    limit: NotRequired[int]


@dataclasses.dataclass
class Tree:
    children: "list[Tree]"


KINDS: list[Any] = [
    int, float, bool, str, Size, Literal["a", "b", 3], Point, Shape, Options, list[int], dict[str, bool],
    tuple[int, str], int | None, list[Point | str],
]  # fmt: skip


def generate(kind: Any, text: str, **kwargs: Any) -> Any:
    return ab.state(backend=ScriptedBackend([text])).gen("x", type=kind, **kwargs).result()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("draw", range(12))
def test_any_text_that_the_constraint_allows_becomes_a_value_of_the_type(kind: Any, draw: int) -> None:
    spec = type_spec(kind)
    text = fake_text.make_up(spec.constraint, random.Random(draw), 8)
    if spec.constraint is not None and spec.constraint.kind == "regex":
        text = text.rstrip("".join(spec.stop))  # what stops it is no part of it
    value = spec.parse(text)
    if isinstance(kind, type) and not dataclasses.is_dataclass(kind):
        assert isinstance(value, dict if kind is Options else kind)
    if spec.constraint is not None and spec.constraint.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(spec.constraint.source))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "-42", -42),
        (float, "0.25", 0.25),
        (float, "7", 7.0),
        (bool, "false", False),
        (str, " any text", " any text"),
        (Literal["yes", "no"], "no", "no"),
        (Literal[1, 2], "2", 2),
        (Size, "2", Size.LARGE),
        (Size, "s", Size.SMALL),
        (Point, '{"x": 1}', Point(1, 0.0)),
        (
            Shape,
            '{"name": "n", "corners": [{"x": 1, "y": 2}], "kind": "open", "size": 2, "note": null}',
            Shape("n", [Point(1, 2.0)], "open", Size.LARGE, None),
        ),
        (Options, '{"fast": true}', {"fast": True}),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (list[Point | str], '["a", {"x": 1}]', ["a", Point(1, 0.0)]),
        (dict[str, bool], '{"a": true}', {"a": True}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
    ],
)
def test_text_becomes_the_value_it_says(kind: Any, text: str, value: Any) -> None:
    made = generate(kind, text)
    assert made == value and type(made) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "4x"), (int, ""), (float, "-"), (bool, "True"), (Literal["a"], "b"), (Point, '{"x": "1"}'),
        (Point, '{"y": 1}'), (Point, '{"x": 1, "z": 2}'), (Point, '{"x": 1'), (tuple[int, str], "[1]"),
        (list[int], '["a"]'), (list[int], "{}"), (dict[str, bool], "[]"), (int | None, '"a"'), (list[int], "[true]"),
    ],
)  # fmt: skip
def test_text_that_is_no_value_raises_where_it_is_read_and_keeps_the_text(kind: Any, text: str) -> None:
    s = ab.state(backend=ScriptedBackend([text]))
    s += ab.gen("x", type=kind)
    for _ in range(2):
        with pytest.raises(ab.TypedValueError, match="'x' is no") as caught:
            s["x"]
        assert caught.value.text == text
    assert s.text() == text and s.error() is None  # the state itself is well


def test_a_value_that_was_cut_off_says_so() -> None:
    with pytest.raises(ab.TypedValueError, match="cut off by max_tokens"):
        generate(Point, '{"x": 1, "y": 2}', max_tokens=3)


def test_a_pydantic_model_leaves_no_room_for_properties_that_no_field_takes() -> None:
    import pydantic

    class Inner(pydantic.BaseModel):
        properties: str

    class Open(pydantic.BaseModel, extra="allow"):
        x: int

    class Outer(pydantic.BaseModel):
        one: Inner
        many: list[Inner]
        maybe: Inner | None
        by_name: dict[str, Inner]
        free: Open

    good = {"one": {"properties": "a"}, "many": [], "maybe": None, "by_name": {"k": {"properties": "b"}}, "free": {"x": 1, "y": 2}}
    bad = [
        {**good, "more": 1},
        {**good, "one": {"properties": "a", "more": 1}},
        {**good, "many": [{"properties": "a", "more": 1}]},
        {**good, "maybe": {"properties": "a", "more": 1}},
        {**good, "by_name": {"k": {"properties": "b", "more": 1}}},
    ]
    for kind in (Outer, list[Outer]):
        constraint = type_spec(kind).constraint
        assert constraint is not None
        validator = jsonschema.Draft202012Validator(json.loads(constraint.source))
        assert validator.is_valid(good if kind is Outer else [good])
        assert not any(validator.is_valid(value if kind is Outer else [value]) for value in bad)
    assert "more" not in repr(build(list[Outer], [good])) and build(list[Outer], [good])[0].one.properties == "a"


def test_pydantic_models_give_models() -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: str
        people: int = pydantic.Field(ge=0)

    assert generate(City, '{"name": "Oslo", "people": 7}') == City(name="Oslo", people=7)
    with pytest.raises(ab.TypedValueError):
        generate(City, '{"name": "Oslo", "people": -7}')
    assert generate(list[City], '[{"name": "a", "people": 1}]') == [City(name="a", people=1)]
    s = ab.state(backend=ScriptedBackend(['{"name": "Oslo", "people": 7}']))
    assert isinstance(s.gen("x", json_schema=City).result(), str)


def test_sglangs_dtypes_constrain_and_stay_strings() -> None:
    patterns = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
    for kind in (int, float, bool, str):
        for spelled in (kind, kind.__name__):
            spec = dtype_spec(spelled)
            assert spec.constraint is not None and spec.constraint.source == patterns[kind.__name__]
            assert spec.parse("7") == "7"
    assert generate_dtype(int, "24 \n") == "24" and generate_dtype(str, '"a b"') == '"a b"'


def test_a_regex_beside_a_dtype_is_what_holds() -> None:
    both = ab.gen("x", dtype=int, regex=r"[0-9]{2}")
    assert both == ab.gen("x", regex=r"[0-9]{2}") != ab.gen("x", dtype=int)
    state = ab.state(backend=ScriptedBackend(["24"]))
    state += both
    assert state["x"] == "24"
    with pytest.raises((TypeError, ValueError), match="dtype"):
        ab.gen("x", dtype=list, regex=r"[0-9]{2}")


def generate_dtype(kind: Any, text: str) -> Any:
    return ab.state(backend=ScriptedBackend([text])).gen("x", dtype=kind).result()


def test_types_that_cannot_be_a_schema_are_refused_by_name() -> None:
    for kind, words in ((Tree, "contains itself"), (set[int], "no JSON Schema for type"), (bytes, "bytes")):
        with pytest.raises(ab.Unsupported, match=words):
            schema_of(kind)
    with pytest.raises(ab.Unsupported, match="must have strings or numbers"):
        type_spec(Literal[b"x"])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "name"]), inner, max_size=3),
    max_leaves=6,
)


@given(values, st.sampled_from([Point, Shape, Options, list[int], dict[str, bool], tuple[int, str], int | None, Size]))
def test_the_parser_accepts_only_what_the_schema_accepts(data: Any, kind: Any) -> None:
    try:
        build(kind, data)
    except ValueError:
        return
    jsonschema.validate(data, schema_of(kind))


def test_the_number_patterns_match_what_python_reads_back() -> None:
    for kind, good, bad in (
        (int, ["0", "-7", "123", "1 ", "1."], ["", "007", "+1", "1" * 19, "1.0", "1  "]),
        (float, ["0", "-7.5", "3.14", "3.14)"], ["", ".5", "1.", "1e5", "nan", "1.5.", "1,5"]),
    ):
        spec = type_spec(kind)
        assert spec.constraint is not None
        assert all(re.fullmatch(spec.constraint.source, text) for text in good)
        assert all(isinstance(spec.parse(re.split("[" + "".join(spec.stop) + "]", text)[0]), kind) for text in good)
        assert not any(re.fullmatch(spec.constraint.source, text) for text in bad)
