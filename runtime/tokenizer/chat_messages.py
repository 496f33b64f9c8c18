"""Chat messages as clients write them, brought into the one form that templates see."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anabranch.runtime.errors import InvalidRequest

PART_JOINER = "\n"  # between the text parts of one message
MAX_MESSAGES = 4096
MAX_DEPTH = 32

Messages = Sequence[Mapping[str, Any]]


def normalize_messages(messages: Messages, *, template: str = "") -> list[dict[str, Any]]:
    """Messages with text content, a role that the template may know, and tool arguments as mappings.

    - content that is a list of parts becomes its texts, joined by a line break; anything but text is refused
    - null content becomes ""; other fields that are null, and empty tool_calls, are left out
    - arguments of tool calls, strings on the wire, become the mapping they encode
    - the role "developer" becomes "system", unless the template speaks of it

    Raises InvalidRequest naming the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", param="messages")
    keep_developer = "developer" in template
    return [_message(message, f"messages[{i}]", keep_developer) for i, message in enumerate(messages)]


def _message(message: object, where: str, keep_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object, got {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise InvalidRequest(f"{where}.role must be a string of 1 to 64 characters", param=f"{where}.role")
    rest = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
    plain = {str(key): plain_data(value, f"{where}.{key}") for key, value in rest.items()}
    plain["role"] = "system" if role == "developer" and not keep_developer else role
    plain["content"] = _content(message.get("content"), f"{where}.content")
    calls = plain.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    if calls:
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, null or a list of parts", param=where)
    return PART_JOINER.join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
        what = kind.removeprefix("input_").removesuffix("_url")[:32]
        raise InvalidRequest(f"{where}: {what} input is not supported; this model reads text only", param=where)
    raise InvalidRequest(f'{where} must be an object like {{"type": "text", "text": "..."}}', param=where)


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must be an object with a name", param=f"{where}.function")
    return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> Any:
    """The mapping that a string of JSON encodes; what is no JSON object stays as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """A copy that holds only dict, list, str, numbers, bool and None, so nothing that a template could call."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} deep", param=where)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain_data(item, where, depth + 1) for item in value]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}, which is not JSON", param=where)
