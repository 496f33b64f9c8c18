"""Two thousand random requests on a tiny pool: every one ends, nothing is left, memory is flat."""

import gc
import random
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_models import make_tiny_llama

from anabranch.runtime.engine import Engine
from anabranch.runtime.errors import AnabranchError
from anabranch.runtime.messages import GenerateParams, Text

REQUESTS, WAVE, WAIT = 2000, 200, 60
FLAT_BYTES = 32 << 20


def settle(futures: "list[Future[Any]]") -> None:
    """Every request ends: with an answer, or with an error that says why."""
    for future in futures:
        try:
            future.result(WAIT)
        except (AnabranchError, CancelledError) as ending:
            assert isinstance(ending, CancelledError) or str(ending)
    futures.clear()


@pytest.mark.slow
def test_after_a_long_random_day_the_pool_is_exact_and_nothing_is_left(tmp_path: Path) -> None:
    rng, memory = random.Random(4), []
    model = make_tiny_llama(tmp_path / "tiny", seed=9)
    with Engine(str(model), num_pages=24, page_size=16, max_slots=8) as engine:
        live: list[Any] = []
        futures: list[Future[Any]] = []
        for number in range(1, REQUESTS + 1):
            act(engine, live, rng, number)
            params = GenerateParams(max_tokens=rng.randrange(1, 30), stop=("x",) if rng.random() < 0.3 else ())
            future = rng.choice(live).generate(params)
            futures.append(future)
            if rng.random() < 0.15:
                future.cancel()
            while len(live) > 12:
                live.pop(rng.randrange(len(live)))  # a handle that is dropped releases its branch
            if number % WAVE == 0:
                settle(futures)
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)
        live.clear()
        deadline = time.monotonic() + 30
        while (stats := engine.stats(check=True).result(WAIT))["branches"] and time.monotonic() < deadline:
            gc.collect()
        assert stats["check"] == "ok"
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == 24 and stats["pages_locked"] == 0
        assert not any(stats[name] for name in ("branches", "requests", "running", "waiting", "slots_in_use"))
        assert memory[-1] - memory[2] < FLAT_BYTES, f"resident bytes after each wave: {memory}"


def act(engine: Engine, live: list[Any], rng: random.Random, number: int) -> None:
    """Something that programs do between requests."""
    what = rng.choice(("open", "open", "fork", "rollback", "lease", "join")) if live else "open"
    branch = rng.choice(live) if live else None
    if what == "open" or branch is None:
        live.append(engine.open(seed=number))
        live[-1].append([Text("abc " * rng.randrange(1, 20))])
    elif what == "fork":
        live += branch.fork(2)
    elif what == "rollback":
        mark = branch.mark()
        branch.append([Text(" more")])
        branch.rollback(mark)
    elif what == "lease":
        branch.lease(0.5)
    elif live[-1] is not branch:
        branch.join(live[-1])
