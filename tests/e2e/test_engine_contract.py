"""The engine keeps the contract of `lang/backend.py`, in this process and over its socket; programs behave alike on both."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.backend_contract import WAIT, BackendContract
from support.tiny_models import make_tiny_llama
from unit.lang.programs import CASES, Case

from anabranch.lang import api
from anabranch.runtime.engine import Engine


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of two layers: fast, and no better at anything than chance."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=5)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), num_pages=2048, listen=True, mode="inprocess") as engine:
        yield engine


@pytest.fixture(scope="module")
def engine_without_cache(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), num_pages=2048, cache=False, mode="inprocess") as engine:
        yield engine


@pytest.fixture(scope="module", params=["embedded", "connected"])
def any_engine(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Engine]:
    if request.param == "embedded":
        yield engine
        return
    with Engine.connect(engine.address) as other:
        yield other


def settled(engine: Engine) -> dict[str, Any]:
    """Stats once nothing is open; a client that left is noticed at the next sign of life, a second later at most."""
    deadline = time.monotonic() + 10
    while True:
        stats: dict[str, Any] = engine.stats(check=True).result(WAIT)
        if not (stats["branches"] or stats["requests"]) or time.monotonic() > deadline:
            return stats
        time.sleep(0.05)


class TestTheEngineKeepsTheContract(BackendContract):
    many = 200

    @pytest.fixture
    def backend(self, any_engine: Engine) -> Iterator[Engine]:
        yield any_engine
        gc.collect()
        stats = any_engine.stats(check=True).result(WAIT)
        assert stats["check"] == "ok"

    def count(self, backend: Any) -> int:
        return int(backend.stats().result(WAIT)["branches"])

    def is_settled(self, backend: Any) -> bool:
        stats = backend.stats().result(WAIT)
        return bool(stats["running"] == 0 and stats["waiting"] == 0)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.spelling}:{c.name}")
def test_a_program_is_the_same_embedded_and_connected(case: Case, engine: Engine) -> None:
    embedded = case.run(api, engine)
    with Engine.connect(engine.address) as other:
        connected = case.run(api, other)
    assert embedded == connected
    gc.collect()
    stats = settled(engine)
    assert stats["check"] == "ok" and stats["branches"] == 0 and stats["requests"] == 0


ABOUT_ANSWERS = [case for case in CASES if case.name != "sharing_is_visible"]  # which looks at the cache itself


@pytest.mark.parametrize("case", ABOUT_ANSWERS, ids=lambda c: f"{c.spelling}:{c.name}")
def test_a_program_says_the_same_without_a_cache(case: Case, engine: Engine, engine_without_cache: Engine) -> None:
    assert case.run(api, engine) == case.run(api, engine_without_cache)
