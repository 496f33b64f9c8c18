"""Every primitive, in both spellings, on the scripted backend."""

import gc
from typing import Any

import pytest
from unit.lang.programs import CASES, Case

from anabranch.lang import api
from anabranch.lang.testing import ScriptedBackend


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.spelling}:{c.name}")
def test_program_runs_leaves_no_branch_and_repeats_itself(case: Case) -> None:
    def observe() -> Any:
        backend = ScriptedBackend()
        observed = case.run(api, backend)
        backend.settle()
        gc.collect()
        assert backend.open_branches() == 0
        return observed

    assert observe() == observe()


def test_there_are_programs_enough_in_both_spellings() -> None:
    spellings = [case.spelling for case in CASES]
    assert spellings.count("sglang") >= 15 and spellings.count("ours") >= 10
