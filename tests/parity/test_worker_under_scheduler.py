"""The real scheduler over the real worker: what a request gets in a crowd, in a small pool, is what the worker alone gives it.

The scheduler's own tests run over a fake worker; this shows that the two workers read plans alike.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_models import make_tiny_llama
from support.worker_driver import Driver, Row

from anabranch.kernels import registry
from anabranch.runtime.config import CacheConfig, SchedulerConfig
from anabranch.runtime.messages import (
    Finished,
    Grammar,
    OpenBranch,
    Produced,
    SamplingParams,
    Submit,
    SubmitScore,
    ints,
)
from anabranch.runtime.scheduler.scheduler import Scheduler
from anabranch.runtime.testing import FakeEngine
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.worker.worker import Worker

END = 2
GRAMMARS = (
    None,
    None,
    Grammar("choices", '["one long sentence here", "another one"]'),
    Grammar(
        "json_schema",
        '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "yy"]}},'
        ' "required": ["a", "b"], "additionalProperties": false}',
    ),
)


class Setup:
    def __init__(self, path: Path, backend: str) -> None:
        self.path, self.backend = path, backend
        self.vocabulary = open_model_text(path).vocabulary
        self.opened: list[Worker] = []
        self.solo = Driver(self.worker(num_pages=512, max_slots=8))

    def worker(self, **sizes: int) -> Worker:
        worker = Worker(
            self.path, vocabulary=self.vocabulary, backend=self.backend, page_size=4, poison_fresh_pages=True, **sizes
        )
        self.opened.append(worker)
        return worker

    def alone(self, prompt: list[int], params: SamplingParams, path: int, max_tokens: int) -> list[int]:
        branch = self.solo.open(prompt, params, path=path)
        self.solo.generate(branch, max_tokens, stop=[END])
        self.solo.close(branch)
        output = branch.output[:max_tokens]
        return output[: output.index(END)] if END in output else output


@pytest.fixture(scope="module", params=["cpu", "reference"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    try:
        registry.backend(request.param)
    except registry.BackendUnavailable as fault:
        pytest.skip(str(fault))
    made = Setup(make_tiny_llama(tmp_path_factory.mktemp("tiny") / "m"), request.param)
    yield made
    for worker in made.opened:
        worker.close()


def random_request(rng: random.Random, base: list[int]) -> tuple[list[int], SamplingParams, int]:
    prompt = base[: rng.randrange(1, len(base))] + [rng.randrange(3, 512) for _ in range(rng.randrange(12))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(99),
        stop_token_ids=(END,),
        num_top_logprobs=rng.choice([None, None, 1]),
        grammar=rng.choice(GRAMMARS),
        frequency_penalty=rng.choice([0.0, 0.3]),
    )
    return prompt, params, rng.randrange(1, 20)


@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_in_a_small_pool_gets_what_each_would_get_alone(setup: Setup, seed: int) -> None:
    rng = random.Random(seed)
    worker = setup.worker(num_pages=rng.choice([40, 64, 200]), max_slots=8)
    config = SchedulerConfig(max_slots=8, tokens_per_step=rng.choice([16, 64]))
    engine = FakeEngine(Scheduler(config, worker.ready(), cache=CacheConfig(page_size=4)), worker)  # type: ignore[arg-type]
    base = [rng.randrange(3, 512) for _ in range(30)]
    requests: list[tuple[list[int], SamplingParams, int]] = []
    for number in range(24):
        again = number % 5 == 4  # the very prompt and parameters of somebody before, on another path
        requests.append(rng.choice(requests) if again else random_request(rng, base))
        prompt, params, max_tokens = requests[-1]
        logprobs_from = 0 if rng.random() < 0.2 else None
        engine.send(
            OpenBranch(number, 0, b"", path=number),
            Submit(number, number, ints(prompt), max_tokens, params, prompt_logprobs_from=logprobs_from),
        )
        for _ in range(rng.randrange(3)):
            engine.tick()
    engine.run_until_idle()
    outputs: dict[int, list[int]] = {number: [] for number in range(len(requests))}
    for event in engine.events:
        if isinstance(event, Produced):
            outputs[event.request_id] += event.token_ids
    assert {event.request_id for event in engine.events if isinstance(event, Finished)} == outputs.keys()
    for number, (prompt, params, max_tokens) in enumerate(requests):
        assert outputs[number] == setup.alone(prompt, params, number, max_tokens), f"request {number}: {params}"


def test_scores_in_a_crowd_are_those_of_each_choice_alone(setup: Setup) -> None:
    rng = random.Random(5)
    worker = setup.worker(num_pages=64, max_slots=8)
    engine = FakeEngine(
        Scheduler(SchedulerConfig(max_slots=8, tokens_per_step=32), worker.ready(), cache=CacheConfig(page_size=4)),
        worker,  # type: ignore[arg-type]
    )
    prompt = [rng.randrange(3, 512) for _ in range(21)]
    choices = [[7, 8, 9], [7, 8], [7, 30], [40], [7, 8, 11, 12, 13]]
    engine.send(OpenBranch(0, 0, b""), SubmitScore(0, 0, ints(prompt), tuple(map(ints, choices))))
    engine.send(OpenBranch(1, 0, b""), Submit(1, 1, ints(prompt[:9]), 12, SamplingParams(temperature=0.0)))
    engine.run_until_idle()
    (scored,) = (event for event in engine.events if isinstance(event, Finished) and event.request_id == 0)
    for choice, found in zip(choices, scored.choice_logprobs, strict=True):
        branch = setup.solo.open(prompt + choice, SamplingParams(num_top_logprobs=0))
        setup.solo.step(Row(branch, sample=False, prompt_logprobs=True))
        assert found == pytest.approx(branch.prompt_logprobs[0].logprobs[len(prompt) - 1 :], abs=1e-4)
        setup.solo.close(branch)
