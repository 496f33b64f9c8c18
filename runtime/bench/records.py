"""The record that the `json` workload asks for, and what makes an answer right: checked by hand, without a validator to install."""

import json
from typing import Any

LANGUAGES = ("Arabic", "English", "French", "German", "Hindi", "Mandarin", "Portuguese", "Spanish")
MAX_LENGTH = 24  # of a text field: a small model would fill a longer one
MAX_AGE = 120
MAX_TOKENS = 160  # more than the longest record needs
_TEXT = {"type": "string", "maxLength": MAX_LENGTH}
_FIELDS: dict[str, dict[str, Any]] = {
    "name": _TEXT,
    "age": {"type": "integer", "minimum": 0, "maximum": MAX_AGE},
    "occupation": _TEXT,
    "city": _TEXT,
    "native_language": {"type": "string", "enum": list(LANGUAGES)},
    "is_member": {"type": "boolean"},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}


def prompt(passage: str) -> str:
    return f"{passage}\n\nA person who could have written this, as a JSON record with the fields {', '.join(_FIELDS)}:\n"


def problem(text: str) -> str | None:
    """Why this is not a record of the schema; None if it is."""
    try:
        record = json.loads(text)
    except ValueError as fault:
        return f"not JSON: {fault}"
    if not isinstance(record, dict) or set(record) != set(_FIELDS):
        return f"not an object with the fields {', '.join(_FIELDS)}"
    for name in ("name", "occupation", "city"):
        if not isinstance(record[name], str) or len(record[name]) > MAX_LENGTH:
            return f"{name} is not a text of at most {MAX_LENGTH} characters: {record[name]!r}"
    age = record["age"]
    if isinstance(age, bool) or not isinstance(age, int) or not 0 <= age <= MAX_AGE:
        return f"age is not an integer in 0..{MAX_AGE}: {age!r}"
    if record["native_language"] not in LANGUAGES:
        return f"native_language is none of those allowed: {record['native_language']!r}"
    return None if isinstance(record["is_member"], bool) else f"is_member is not true or false: {record['is_member']!r}"
