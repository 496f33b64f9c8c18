"""The language on the real engine: the backend's contract, every program in both spellings, embedded and connected alike."""

import gc
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.backend_contract import BackendContract
from unit.lang.programs import CASES, Case

import anabranch as ab
from anabranch.lang import api


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with ab.Engine(listen=True) as engine:
        yield engine


def open_branches(engine: Any, expected: int = 0) -> int:
    """Branches in the engine. A client that has left is noticed a little later: asks again until it is as expected."""
    gc.collect()
    for _ in range(1000):
        count = int(engine.stats().result(60)["branches"])
        if count == expected:
            break
    return count


class TestTheEmbeddedEngineKeepsTheContract(BackendContract):
    many = 32

    @pytest.fixture
    def backend(self, engine: Any) -> Any:
        return engine

    def count(self, backend: Any) -> int:
        return int(backend.stats().result(60)["branches"])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.spelling}:{c.name}")
def test_a_program_gives_the_same_embedded_and_connected_cold_and_warm(case: Case, engine: Any) -> None:
    engine.flush_cache().result(60)
    cold = case.run(api, engine)
    connected = ab.Engine.connect(engine.address)
    try:
        warm = case.run(api, connected)
    finally:
        connected.close()
    assert json.dumps(cold, sort_keys=True) == json.dumps(warm, sort_keys=True)
    assert open_branches(engine) == 0


@pytest.mark.slow
def test_two_hundred_constrained_generations_are_all_valid_and_cost_less_than_a_step_a_token(engine: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["river", "lake", "sea"]},
            "depth": {"type": "integer", "minimum": 0, "maximum": 9999},
            "salty": {"type": "boolean"},
        },
        "required": ["name", "kind", "depth", "salty"],
        "additionalProperties": False,
    }

    @ab.function
    def describe(s: Any, i: int) -> None:
        s += f"Water number {i} as JSON: " + ab.gen("water", schema=schema, max_tokens=80)

    states = describe.run_batch([[i] for i in range(200)], backend=engine, seed=1, temperature=1.0)
    for state in states:
        jsonschema.validate(state["water"], schema)
    usage = ab.Usage.of(states)
    assert usage.forced_tokens > 0 and usage.num_steps < usage.completion_tokens


def test_a_tree_of_branches_computes_each_distinct_token_once(engine: Any) -> None:
    engine.flush_cache().result(60)
    s = ab.state(backend=engine, seed=3, temperature=1.0)
    s += "A river begins in the mountains and ends in the sea. " * 8
    s.gen("first", max_tokens=2).result()
    level, leaves = [s], []
    for _ in range(3):
        level = [child for branch in level for child in branch.fork(3)]
        for branch in level:
            branch += ab.gen("x", max_tokens=6, ignore_eos=True)
        leaves += level
    for branch in leaves:
        branch.sync()
    usage = s.usage()
    root = s.explain().length
    distinct = root + 6 * len(leaves)
    siblings = len(leaves)  # each has the last token of what it shares computed again, for its logits
    assert usage.total_computed <= distinct + siblings
    assert usage.cached_tokens >= usage.prompt_tokens - root - siblings


def test_a_thousand_branches_share_one_prefix(engine: Any) -> None:
    s = ab.state(backend=engine, seed=4)
    s += "Count with me: one, two, three,"
    s.gen("four", max_tokens=1).result()
    group = s.fork(1000)
    group += ab.gen("next", max_tokens=1)
    group.join()
    assert len(s["next"]) == 1000 and s.usage().hit_rate > 0.5
    del group, s
    assert open_branches(engine) == 0
