"""The first promise, on the real model: the cache changes nothing but time.

One request, greedy and seeded, with logprobs; then the same request warm, chunked, in a crowd, forked, preempted, on pages of other sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.lang.backend import Generation, Sampling, Text
from anabranch.runtime.engine import Engine

TOLERANCE = 0.0  # of logprobs: the native kernels are batch-invariant, bit for bit
PAGE_SIZES = (1, 4, 16)
KV_DTYPES = ("f16", "int16", "int8")
WAIT = 240

PROMPT = (
    "A lighthouse keeper wrote in his diary every evening. On Monday he saw seven ships, on Tuesday nine, and on Wednesday a storm "
    "came from the west, so that no ship passed at all. He cleaned the lamp, mended the railing, and cooked a soup of beans, "
    "leeks and a little smoked fish. On Thursday the sea was calm again, and the first ship that came by was"
)
SAMPLINGS = {
    "greedy": Sampling(max_tokens=24, temperature=0.0, ignore_eos=True, num_top_logprobs=2),
    "seeded": Sampling(max_tokens=24, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True, num_top_logprobs=2),
}


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


def answer_of(generation: Generation) -> Answer:
    logprobs = generation.logprobs
    assert logprobs is not None
    return Answer(tuple(generation.token_ids), tuple(float(x or 0.0) for x in logprobs.logprobs), generation.usage["cached_tokens"])


def assert_same(got: Answer, wanted: Answer, what: str) -> None:
    assert got.token_ids == wanted.token_ids, f"{what}: other tokens"
    worst = np.abs(np.array(got.logprobs) - np.array(wanted.logprobs)).max()
    assert worst <= TOLERANCE, f"{what}: logprobs differ by {worst}"


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Engine]:
    with Engine(str(model), **{"num_pages": 8192 // options.get("page_size", 16), **options}) as e:
        yield e


def ask(e: Engine, sampling: Sampling, prompt: str = PROMPT) -> Answer:
    branch = e.open()
    branch.append([Text(prompt)])
    return answer_of(branch.generate(sampling).result(WAIT))


@pytest.fixture(scope="module", params=KV_DTYPES)
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cold(model_path: Path, kv_dtype: str) -> dict[str, Answer]:
    """Each alone on a fresh engine without a prefix cache."""
    answers = {}
    for name, sampling in SAMPLINGS.items():
        with engine(model_path, cache=False, kv_dtype=kv_dtype) as e:
            answers[name] = ask(e, sampling)
            assert answers[name].cached == 0
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
class TestTheCacheChangesNothing:
    def test_warm_is_cold(self, model_path: Path, cold: dict[str, Answer], kv_dtype: str, page_size: int) -> None:
        with engine(model_path, page_size=page_size, kv_dtype=kv_dtype) as e:
            for name, sampling in SAMPLINGS.items():
                first, second = ask(e, sampling), ask(e, sampling)
                assert second.cached > 50, "the second run found nothing cached: this test would prove nothing"
                assert_same(first, cold[name], f"{name}, first")
                assert_same(second, cold[name], f"{name}, warm")

    def test_chunked_is_whole(self, model_path: Path, cold: dict[str, Answer], kv_dtype: str, page_size: int) -> None:
        with engine(model_path, page_size=page_size, kv_dtype=kv_dtype, max_slots=8, tokens_per_step=16) as e:
            for name, sampling in SAMPLINGS.items():
                assert_same(ask(e, sampling), cold[name], f"{name}, in chunks of 16")

    def test_a_crowd_is_as_good_as_alone(self, model_path: Path, cold: dict[str, Answer], kv_dtype: str, page_size: int) -> None:
        with engine(model_path, page_size=page_size, kv_dtype=kv_dtype) as e:
            others = [e.open(seed=i) for i in range(15)]
            started = []
            for i, other in enumerate(others):
                other.append([Text(PROMPT[: 40 + 13 * i])])
                started.append(other.generate(Sampling(max_tokens=30, temperature=1.0, ignore_eos=True)))
            mine = e.open()
            mine.append([Text(PROMPT)])
            first = answer_of(mine.generate(SAMPLINGS["seeded"]).result(WAIT))
            second = ask(e, SAMPLINGS["greedy"])
            assert all(f.result(WAIT).usage["completion_tokens"] == 30 for f in started)
        assert_same(first, cold["seeded"], "seeded, in a crowd")
        assert_same(second, cold["greedy"], "greedy, in a crowd")

    def test_a_fork_is_a_prompt_of_its_own(self, model_path: Path, cold: dict[str, Answer], kv_dtype: str, page_size: int) -> None:
        """Children that append text of their own, against whole prompts with the same tokens. Draws differ by path, so: greedy."""
        tails = [" a small red steamer", " an old barge", ""]
        with engine(model_path, page_size=page_size, kv_dtype=kv_dtype) as e:
            root = e.open()
            root.append([Text(PROMPT)])
            children = root.fork(len(tails))
            for child, tail in zip(children, tails):
                if tail:
                    child.append([Text(tail)])
            forked = [answer_of(c.generate(SAMPLINGS["greedy"]).result(WAIT)) for c in children]
        with engine(model_path, page_size=16, cache=False, kv_dtype=kv_dtype) as e:
            for tail, got in zip(tails, forked):
                assert_same(got, ask(e, SAMPLINGS["greedy"], PROMPT + tail), f"fork with {tail!r}")
        assert_same(forked[2], cold["greedy"], "fork without a tail")

    def test_preempted_is_undisturbed(self, model_path: Path, cold: dict[str, Answer], kv_dtype: str, page_size: int) -> None:
        """A pool that has learnt to expect short answers gets long ones: some are thrown out and come back."""
        short = Sampling(max_tokens=100, temperature=0.9, stop=(" ", "e"))
        long = Sampling(max_tokens=100, temperature=0.9, ignore_eos=True)
        with engine(model_path, page_size=page_size, num_pages=368 // page_size, kv_dtype=kv_dtype) as e:
            for i in range(16):
                teacher = e.open(seed=i)
                teacher.append([Text("Once upon a time")])
                teacher.generate(short).result(WAIT)
            branches = [e.open(seed=i) for i in range(4)]
            for i, branch in enumerate(branches):
                branch.append([Text(f"{i} {PROMPT}")])
            started = [b.generate(long) for b in branches]
            mine = [e.open() for _ in SAMPLINGS]
            for branch in mine:
                branch.append([Text(PROMPT)])
            got = [b.generate(s) for b, s in zip(mine, SAMPLINGS.values())]
            for name, future in zip(SAMPLINGS, got):
                assert_same(answer_of(future.result(WAIT)), cold[name], f"{name}, among preemptions")
            assert all(len(f.result(WAIT).token_ids) == 100 for f in started)
            stats = e.stats(check=True).result(WAIT)
            assert stats["preemptions"] > 0, f"nothing was preempted: this test would prove nothing; {stats}"
