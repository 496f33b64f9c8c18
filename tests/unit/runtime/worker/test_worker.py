"""Plans in, tokens out: whatever a plan looks like, a branch gets what it would get alone."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import make_puppet_map, make_tiny_llama
from support.tokenizers import byte_bpe_tokenizer
from support.worker_driver import GREEDY, Branch, Driver, Row, errors_of, scores_of

from anabranch.kernels import registry
from anabranch.kernels.random import uniform
from anabranch.runtime.messages import NOT_FINITE, SamplingParams, StepPlan, as_ints, ints
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.worker.worker import Worker

VOCAB = 512
TOLERANCE = {
    "reference": 1e-4,
    "cpu": 0.0,
}  # of logprobs, whatever the batch, the chunks and the pages; PyTorch rounds by shape


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "m")


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both backends, the native one where it can be built."""
    try:
        registry.backend(request.param)
    except registry.BackendUnavailable as fault:
        pytest.skip(str(fault))
    return request.param


@pytest.fixture
def make(tiny: Path, backend: str) -> Iterator[Callable[..., Driver]]:
    opened: list[Worker] = []

    def make_driver(path: Path = tiny, **options: object) -> Driver:
        defaults = {
            "backend": backend,
            "num_pages": 256,
            "page_size": 4,
            "max_slots": 16,
            "poison_fresh_pages": True,
        }
        opened.append(Worker(path, **(defaults | options)))  # type: ignore[arg-type]
        return Driver(opened[-1])

    yield make_driver
    for worker in opened:
        worker.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def alone(driver: Driver, ids: list[int], params: SamplingParams, num_tokens: int, path: int = 0) -> Branch:
    branch = driver.open(ids, params, path=path)
    driver.generate(branch, num_tokens)
    driver.close(branch)
    return branch


MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=42),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=7),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, logit_bias={5: 4.0, 9: -3.0}, num_top_logprobs=3),
    SamplingParams(temperature=1.0, seed=9, min_tokens=30, banned_until_min=(2, 17), num_top_logprobs=0),
]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_crowd_in_random_chunks_gets_what_each_would_get_alone(
    make: Callable[..., Driver], backend: str, page_size: int
) -> None:
    rng = np.random.default_rng(page_size)
    prompts = [prompt(int(rng.integers(1, 40)), seed) for seed in range(len(MIXED) * 2)]
    params = [MIXED[i % len(MIXED)] for i in range(len(prompts))]
    solo = make(page_size=page_size, num_pages=512)
    expected = [alone(solo, ids, p, 12, path=i) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    crowd = make(page_size=page_size, num_pages=1024)
    branches = [crowd.open(ids, p, path=i) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while any(len(b.output) < 12 for b in branches):
        rows = []
        for b in branches:
            left = len(b.tokens) - b.computed
            if len(b.output) >= 12 or rng.random() < 0.3:
                continue
            chunk = int(rng.integers(1, left + 1))
            rows.append(Row(b, chunk, sample=chunk == left))
        if rows:
            crowd.step(*rows)
    for branch, want in zip(branches, expected, strict=True):
        assert branch.output[:12] == want.output[:12]
        for ours, theirs in zip(branch.logprobs, want.logprobs, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=TOLERANCE[backend], rtol=0)
            assert [ids for ids, _ in ours.tops] == [ids for ids, _ in theirs.tops]


def test_a_step_ahead_reads_the_last_token_from_the_slot(make: Callable[..., Driver]) -> None:
    driver = make()
    ids = prompt(9)
    expected = alone(driver, ids, MIXED[1], 6).output
    branch, other = driver.open(ids, MIXED[1]), driver.open(prompt(5, 1))
    driver.step(branch)
    known = list(branch.tokens)
    for _ in range(5):
        branch.tokens = list(known)  # what a scheduler knows that has not seen the last result
        plan = driver.plan([Row(branch, feedback=True), Row(other, 1, sample=False)])
        result = driver.worker.execute(plan)
        branch.computed += 1
        other.computed += 1
        known += as_ints(result.token_ids).tolist()
    assert known[len(ids) :] == expected


def test_a_branch_resumes_from_its_tokens_as_if_it_had_never_stopped(make: Callable[..., Driver]) -> None:
    driver = make()
    for params in MIXED:
        ids = prompt(11, 2)
        expected = alone(driver, ids, params, 14, path=77).output
        other = make()
        resumed = other.open(ids, params, path=77, generated=expected[:6])
        other.generate(resumed, 14)
        assert resumed.output == expected


def test_siblings_with_one_seed_differ_by_their_path_and_repeat(make: Callable[..., Driver]) -> None:
    driver = make()
    params = SamplingParams(temperature=1.0, seed=5)
    texts = [alone(driver, prompt(8), params, 12, path=path).output for path in (1, 2, 3, 1)]
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3


def test_a_fork_copies_its_partial_page_before_the_forward(make: Callable[..., Driver]) -> None:
    driver = make(page_size=8)
    parent = driver.open(prompt(13), GREEDY)
    driver.generate(parent, 6)
    child = driver.fork(parent, MIXED[1])
    assert child.pages[:2] == parent.pages[:2] and child.pages[2] != parent.pages[2]
    prefix = list(child.tokens)
    driver.step(parent, child)  # both write the next slot of the page that one of them has copied
    driver.generate(child, 8)
    driver.generate(parent, 15)
    assert child.output[:8] == alone(make(), prefix, MIXED[1], 8).output
    assert parent.output == alone(make(), prompt(13), GREEDY, 15).output


def test_a_page_may_be_copied_on_in_one_plan(make: Callable[..., Driver]) -> None:
    driver = make()
    branch = driver.open(prompt(4))
    driver.step(branch)
    first, second = driver.free.pop(), driver.free.pop()
    page = branch.pages[0]
    driver.worker.execute(StepPlan(step_id=99, copy_src=ints([page, first]), copy_dst=ints([first, second])))
    branch.pages[0], branch.sent = second, 0
    driver.generate(branch, 5)
    assert branch.output == alone(driver, prompt(4), GREEDY, 5).output[:5]


def test_pages_are_replaced_from_where_the_plan_says(make: Callable[..., Driver]) -> None:
    driver = make()
    branch = driver.open(prompt(10))
    driver.step(branch)
    src, dst = branch.pages[1], driver.free.pop()
    driver._copies.append((src, dst))
    branch.pages[1], branch.sent = dst, 1  # page 0 stays, 1 and on are sent again
    driver.generate(branch, 6)
    assert branch.output == alone(driver, prompt(10), GREEDY, 6).output


def test_siblings_sample_their_first_token_from_one_row_of_logits(make: Callable[..., Driver], backend: str) -> None:
    driver = make()
    ids, params = prompt(10), SamplingParams(temperature=1.2, seed=3, num_top_logprobs=1)
    expected = [alone(driver, ids, params, 1, path=path) for path in range(4)]
    host = driver.open(ids, params, path=0)
    twins = [driver.open(ids, params, path=path) for path in range(1, 4)]
    other = driver.open(prompt(6, 1))
    driver.step(Row(host), *(Row(twin, host=host) for twin in twins), Row(other))
    for branch, want in zip([host, *twins], expected, strict=True):
        assert branch.output == want.output
        np.testing.assert_allclose(
            branch.logprobs[0].logprobs, want.logprobs[0].logprobs, atol=TOLERANCE[backend], rtol=0
        )
    assert len(other.output) == 1


# ---------------------------------------------------------------- logprobs and scores


def test_prompt_logprobs_are_the_same_whole_and_in_chunks(make: Callable[..., Driver], backend: str) -> None:
    ids, params = prompt(23), SamplingParams(temperature=0.0, num_top_logprobs=2)
    driver = make()
    whole = driver.open(ids, params)
    driver.step(Row(whole, prompt_logprobs=True))
    (one,) = whole.prompt_logprobs
    assert one.token_ids == tuple(ids[1:])
    chunked = driver.open(ids, params)
    for size in (5, 1, 10, 7):
        driver.step(Row(chunked, size, sample=False, prompt_logprobs=True))
    joined = [value for part in chunked.prompt_logprobs for value in part.logprobs]
    np.testing.assert_allclose(joined, one.logprobs, atol=TOLERANCE[backend], rtol=0)
    assert [t for part in chunked.prompt_logprobs for t in part.token_ids] == ids[1:]
    assert [top[0] for part in chunked.prompt_logprobs for top in part.tops] == [top[0] for top in one.tops]
    for (top_ids, top_values), token, value in zip(one.tops, one.token_ids, one.logprobs, strict=True):
        assert len(top_ids) == 2 and list(top_values) == sorted(top_values, reverse=True)
        assert value <= top_values[0] + 1e-6 and (token not in top_ids or value in top_values)


def test_logprobs_do_not_depend_on_temperature_bias_or_penalties(make: Callable[..., Driver]) -> None:
    driver, ids = make(), prompt(12)
    rows = []
    for change in ({}, {"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.1}, {"presence_penalty": 2.0}):
        params = SamplingParams(**({"temperature": 0.0, "num_top_logprobs": 4, "logit_bias": {8: 100.0}} | change))
        branch = driver.open(ids, params)
        driver.step(branch)
        assert branch.output == [8]
        rows.append(branch.logprobs[0])
    for row in rows[1:]:
        np.testing.assert_allclose(row.logprobs, rows[0].logprobs, atol=1e-6)
        assert row.tops == rows[0].tops


def test_a_score_tree_gives_what_each_choice_would_give_alone(make: Callable[..., Driver], backend: str) -> None:
    driver, ids = make(), prompt(14)
    choices = [[7, 8, 9], [7, 8], [7, 30], [40], [7, 8, 11]]
    tokens, parents = [7, 8], [-1, 0]
    targets = [(-1, 7), (0, 8), (1, 9), (0, 30), (-1, 40), (1, 11)]
    branch, crowd = driver.open(ids), driver.open(prompt(20, 4))
    driver.step(Row(branch, 10, sample=False), Row(crowd, 3, sample=False))
    result = driver.step(Row(crowd), Row(branch, sample=False, tree=(tokens, parents, targets)))
    found = dict(zip(targets, scores_of(result)[0], strict=True))
    nodes = {(): -1, (7,): 0, (7, 8): 1}
    for choice in choices:
        single = driver.open(ids + choice, SamplingParams(num_top_logprobs=0))
        driver.step(Row(single, prompt_logprobs=True, sample=False))
        want = single.prompt_logprobs[0].logprobs[len(ids) - 1 :]
        ours = [found[nodes[tuple(choice[:i])], choice[i]] for i in range(len(choice))]
        np.testing.assert_allclose(ours, want, atol=TOLERANCE[backend], rtol=0)
        driver.close(single)
    assert len(crowd.output) == 1
    # The tree has left no trace: its slots are written again by what comes next.
    branch.computed -= 1
    driver.generate(branch, 5)
    assert branch.output == alone(driver, ids, GREEDY, 5).output


def test_scores_say_whether_a_token_is_the_most_likely_one(make: Callable[..., Driver]) -> None:
    driver, ids = make(), prompt(9)
    best = alone(driver, ids, GREEDY, 1).output[0]
    branch = driver.open(ids)
    result = driver.step(Row(branch, sample=False, tree=([], [], [(-1, best), (-1, (best + 1) % VOCAB)])))
    assert list(result.score_is_greedy[0]) == [1, 0]


# ---------------------------------------------------------------- sampling parameters


def test_min_tokens_holds_back_the_end_and_nothing_else(tmp_path: Path, make: Callable[..., Driver]) -> None:
    tokenizer = byte_bpe_tokenizer(300)
    end = tokenizer.eos_id
    puppet = make_puppet_map(tmp_path / "p", {token: {end: 0.9, 50: 0.1} for token in range(300)}, tokenizer)
    driver = make(puppet)
    assert alone(driver, [60, 61], GREEDY, 1).output == [end]
    patient = SamplingParams(temperature=0.0, min_tokens=5, banned_until_min=(end,))
    assert alone(driver, [60, 61], patient, 6).output == [50] * 5 + [end]


def test_the_highest_id_can_be_biased_and_ids_without_a_token_never_come(
    tmp_path: Path, make: Callable[..., Driver]
) -> None:
    tokenizer = byte_bpe_tokenizer(300)
    path = make_puppet_map(tmp_path / "p", {token: {50: 0.5, 310: 0.5} for token in range(300)}, tokenizer, vocab=320)
    text = open_model_text(path)
    driver = make(path, vocabulary=text.vocabulary)
    assert text.vocabulary.num_tokens == 300
    assert alone(driver, [60], SamplingParams(temperature=0.0, logit_bias={299: 100.0}), 1).output == [299]
    wild = SamplingParams(temperature=5.0, seed=1, logit_bias=dict.fromkeys(range(300, 320), 100.0))
    assert max(alone(driver, [60], wild, 60).output) < 300


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 9e-6])
def test_tiny_temperatures_are_greedy(make: Callable[..., Driver], temperature: float) -> None:
    driver = make()
    assert (
        alone(driver, prompt(9), SamplingParams(temperature=temperature, seed=3), 8).output
        == alone(driver, prompt(9), GREEDY, 8).output
    )


def test_a_draw_is_the_inverse_of_the_cdf_at_the_number_of_seed_path_and_position(
    tmp_path: Path, make: Callable[..., Driver]
) -> None:
    tokenizer = byte_bpe_tokenizer(300)
    path = make_puppet_map(tmp_path / "p", {token: {40: 0.25, 41: 0.25, 42: 0.5} for token in range(300)}, tokenizer)
    driver = make(path)
    output = alone(driver, [60] * 5, SamplingParams(temperature=1.0, seed=11), 30, path=13).output
    draws = uniform(np.uint64(11), np.uint64(13), np.arange(5, 35, dtype=np.uint64))
    assert output == [40 if u < 0.25 else 41 if u < 0.5 else 42 for u in draws]


# ---------------------------------------------------------------- rows that fail

NAN_TOKEN = 500


def with_nan_embedding(path: Path) -> Path:
    """The model in `path`, with a token whose embedding is not a number."""
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["model.embed_tokens.weight"]
    row = np.frombuffer(data, "<f4", 64, 8 + size + entry["data_offsets"][0] + NAN_TOKEN * 64 * 4)
    row[:] = np.nan
    file.write_bytes(data)
    return path


def test_a_row_that_is_not_finite_fails_alone_and_its_slot_can_be_used_again(
    tmp_path: Path, make: Callable[..., Driver]
) -> None:
    path = make_tiny_llama(tmp_path / "m", seed=3)
    clean = make(path)
    damaged = make(with_nan_embedding(make_tiny_llama(tmp_path / "d", seed=3)))
    good = [token for token in prompt(7, 5) if token != NAN_TOKEN]
    healthy = clean.open(good, MIXED[1])
    clean.generate(healthy, 6)
    bad, beside = damaged.open([4, NAN_TOKEN, 6], MIXED[3]), damaged.open(good, MIXED[1])
    result = damaged.step(bad, beside)
    assert errors_of(result).keys() == {bad.slot} and "not finite" in str(bad.error)
    assert errors_of(result)[bad.slot].error.code == NOT_FINITE
    # A row that was planned before the failure was known reports it again, and disturbs nobody.
    rows = [Row(bad, feedback=True), Row(beside)]
    result = damaged.worker.execute(damaged.plan(rows))
    damaged.take(rows, result)
    assert errors_of(result).keys() == {bad.slot}
    damaged.generate(beside, 6)
    assert beside.output == healthy.output
    slot = bad.slot
    damaged.close(bad)
    damaged._slots.sort(key=lambda free: free != slot)
    again = damaged.open(good, MIXED[1])
    damaged.generate(again, 6)
    assert again.slot == slot and again.output == healthy.output and again.error is None


def test_prompt_logprobs_and_scores_of_a_nan_row_are_an_error(tmp_path: Path, make: Callable[..., Driver]) -> None:
    driver = make(with_nan_embedding(make_tiny_llama(tmp_path / "m")))
    bad = driver.open([4, NAN_TOKEN, 6], SamplingParams(num_top_logprobs=1))
    beside = driver.open(prompt(5))
    result = driver.step(Row(bad, sample=False, prompt_logprobs=True), Row(beside, prompt_logprobs=True))
    assert errors_of(result).keys() == {bad.slot} and not bad.prompt_logprobs and beside.prompt_logprobs
    scored = driver.open([4, NAN_TOKEN, 6])
    result = driver.step(Row(scored, sample=False, tree=([], [], [(-1, 5)])))
    assert errors_of(result).keys() == {scored.slot}
    assert len(result.score_logprobs) == 1  # one entry per tree, whatever happened


def test_a_plan_without_rows_still_gives_slots_back_and_copies(make: Callable[..., Driver]) -> None:
    driver = make()
    result = driver.worker.execute(StepPlan(step_id=5, ends=(3,)))
    assert result.step_id == 5 and result.slots == b"" and not result.errors


# ---------------------------------------------------------------- setting up


def test_ready_tells_what_was_measured(make: Callable[..., Driver]) -> None:
    ready = make(num_pages=None, memory_bytes=1 << 20, page_size=16, kv_dtype="f16").ready
    per_token = 2 * 2 * 2 * 16 * 2  # k and v, layers, kv heads, head dim, bytes
    assert ready.kv_bytes_per_token == per_token
    assert ready.num_pages == (1 << 20) // (16 * per_token)
    assert (ready.vocab_size, ready.context_length, ready.num_layers, ready.max_slots) == (VOCAB, 1024, 2, 16)
    assert "lm_head.weight  F32  [512, 64]" in ready.load_report


def test_the_pool_is_bounded_by_default(make: Callable[..., Driver]) -> None:
    ready = make(num_pages=None, page_size=16).ready
    assert ready.num_pages == 65_536 // 16


def test_impossible_sizes_are_refused_with_the_numbers(tiny: Path) -> None:
    with pytest.raises(MemoryError, match=r"KV pages of 16 tokens need .* GiB, but .* GiB are free: at most \d+ pages"):
        Worker(tiny, backend="reference", num_pages=1 << 40)
    with pytest.raises(MemoryError, match="one page of 1024 tokens takes"):
        Worker(tiny, backend="reference", page_size=1024, memory_bytes=1 << 16)
    with pytest.raises(ValueError, match=r"context_length must be in 1..1024, the model's, got 2048"):
        Worker(tiny, backend="reference", context_length=2048, num_pages=4)
    with pytest.raises(ValueError, match="backend must be one of"):
        Worker(tiny, backend="cuda", num_pages=4)


def test_kv_dtypes_change_little(make: Callable[..., Driver]) -> None:
    ids, params = prompt(30), SamplingParams(temperature=0.0, num_top_logprobs=0)
    exact = make(kv_dtype="f32", precision="exact")
    expected = exact.open(ids, params)
    exact.step(Row(expected, prompt_logprobs=True))
    for dtype, bound in (("f16", 0.02), ("bf16", 0.15), ("int16", 0.02), ("int8", 0.25)):
        driver = make(kv_dtype=dtype, precision="exact")
        branch = driver.open(ids, params)
        for size in (10, 10, 10):
            driver.step(Row(branch, size, sample=False, prompt_logprobs=True))
        ours = [value for part in branch.prompt_logprobs for value in part.logprobs]
        error = np.abs(np.array(ours) - expected.prompt_logprobs[0].logprobs).max()
        assert 0 < error < bound, dtype
