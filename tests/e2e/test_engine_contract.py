"""The contract of `lang/backend.py` over the engine's socket, and programs without a cache. Embedded: `test_language.py`."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.backend_contract import WAIT, BackendContract
from support.tiny_models import make_tiny_llama
from unit.lang.programs import CASES, Case

from anabranch.lang import api
from anabranch.runtime.engine import Engine
from anabranch.runtime.errors import ConfigError


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


class TestAConnectedEngineKeepsTheContract(BackendContract):
    many = 200

    @pytest.fixture
    def backend(self, engine: Engine) -> Iterator[Engine]:
        with Engine.connect(engine.address) as other:
            yield other
            gc.collect()
            stats = other.stats(check=True).result(WAIT)
        assert stats["check"] == "ok"

    def count(self, backend: Any) -> int:
        return int(backend.stats().result(WAIT)["branches"])

    def is_settled(self, backend: Any) -> bool:
        stats = backend.stats().result(WAIT)
        return bool(stats["running"] == 0 and stats["waiting"] == 0)


ABOUT_ANSWERS = [case for case in CASES if case.name != "sharing_is_visible"]  # which looks at the cache itself


@pytest.mark.parametrize("case", ABOUT_ANSWERS, ids=lambda c: f"{c.spelling}:{c.name}")
def test_a_program_says_the_same_without_a_cache(case: Case, engine: Engine, engine_without_cache: Engine) -> None:
    assert case.run(api, engine) == case.run(api, engine_without_cache)


def test_sglangs_name_for_the_model_is_understood_and_two_models_are_refused(tiny_model: Path) -> None:
    with Engine(model_path=str(tiny_model), num_pages=64, mode="inprocess") as engine:
        assert engine.generate("a", max_tokens=2).token_ids
    with pytest.raises(ConfigError, match="model and model_path are one setting"):
        Engine("default", model_path=str(tiny_model))
