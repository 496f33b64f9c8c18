"""Only records of the schema pass, by our own check and by a validator."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.bench import RECORD

from anabranch.runtime.bench import records

WRONG: list[Any] = [
    "no JSON", "[]", json.dumps({**RECORD, "more": 1}), json.dumps({k: v for k, v in RECORD.items() if k != "age"}),
    *(json.dumps({**RECORD, **wrong}) for wrong in (
        {"age": 121}, {"age": -1}, {"age": "36"}, {"age": True}, {"age": 36.5}, {"name": "x" * 25}, {"city": None},
        {"native_language": "Latin"}, {"is_member": 1},
    )),
]  # fmt: skip


def test_a_record_that_fits_has_no_problem() -> None:
    assert records.problem(json.dumps(RECORD)) is None
    Draft202012Validator(records.SCHEMA).validate(RECORD)


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_has_one_and_a_validator_agrees(text: str) -> None:
    assert records.problem(text)
    try:
        record = json.loads(text)
    except ValueError:
        return
    assert list(Draft202012Validator(records.SCHEMA).iter_errors(record))
