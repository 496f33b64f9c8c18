"""Messages as clients send them, in the one form that templates see."""

from typing import Any

import pytest

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.chat_messages import MAX_MESSAGES, PART_JOINER, normalize_messages
from anabranch.runtime.tokenizer.templates import ChatTemplate, unmarked

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def one(**message: Any) -> dict[str, Any]:
    return normalize_messages([message])[0]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_list_of_text_parts_is_the_joined_string(role: str) -> None:
    chat = ChatTemplate("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}", named_tokens={})
    listed, joined = ([{"role": role, "content": content}] for content in (PARTS, f"a{PART_JOINER}b"))
    assert unmarked(chat.render(listed)) == unmarked(chat.render(joined)) == f"{role}: a{PART_JOINER}b"


def test_null_content_beside_tool_calls_is_the_empty_string() -> None:
    message = one(role="assistant", content=None, tool_calls=[call("{}")])
    assert message["content"] == ""
    chat = ChatTemplate("{% for m in messages %}{{ m['content'] + '|' + m.tool_calls[0].function.name }}{% endfor %}",
                        named_tokens={})  # fmt: skip
    assert unmarked(chat.render([message])) == "|add"


def test_null_fields_and_empty_tool_calls_are_left_out() -> None:
    assert one(role="user", content="x", tool_calls=None, name=None, refusal=None) == {"role": "user", "content": "x"}
    assert "tool_calls" not in one(role="assistant", content="x", tool_calls=[])


@pytest.mark.parametrize(
    ("wire", "seen"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("not json", "not json"), ("[1]", "[1]")],
)
def test_arguments_that_are_strings_on_the_wire_become_mappings(wire: object, seen: object) -> None:
    message = one(role="assistant", tool_calls=[call(wire)])
    assert message["tool_calls"][0]["function"]["arguments"] == seen


def test_arguments_are_not_quoted_twice() -> None:
    source = "{% for c in messages[0].tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    source += "{{ c.function.arguments | tojson }}{% endfor %}"
    chat = ChatTemplate(source, named_tokens={})
    assert unmarked(chat.render([{"role": "assistant", "tool_calls": [call('{"a": 1}')]}])) == 'a=1;{"a": 1}'


def test_the_caller_s_messages_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}]
    normalize_messages(messages)
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}]


def test_a_developer_is_a_system_unless_the_template_knows_better() -> None:
    assert one(role="developer", content="x")["role"] == "system"
    kept = normalize_messages([{"role": "developer", "content": "x"}], template="if role == 'developer'")
    assert kept[0]["role"] == "developer"


def test_unknown_fields_are_kept_for_the_template() -> None:
    assert one(role="tool", content="4", tool_call_id="c1", x_new={"a": (1, 2)})["x_new"] == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("hello", "list"),
        (None, "list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "x" * 1000, "content": "x"}], "64 characters"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "image input is not supported",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "audio input is not supported"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "name"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), str(MAX_MESSAGES)),
        ([{"role": "user", "content": "x", "extra": b"bytes"}], "not JSON"),
    ],
)
def test_messages_that_are_none_are_refused_by_their_place(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        normalize_messages(messages)


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested more than"):
        one(role="user", content="x", extra=deep)
