"""Native sampling against a float64 oracle written from the rules alone, and against exact probabilities."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.sampling import batch_of, mask_of, oracle_token, raw_logprobs

from anabranch.kernels import sampling as reference
from anabranch.kernels.backends import cpu_native, cpu_sampling
from anabranch.kernels.layout import LayoutError, Sampled, SamplingBatch
from anabranch.kernels.random import uniform

F32 = NDArray[np.float32]
NAMES = ["plain", "avx2", "avx512"]
LIBRARY = cpu_sampling.declare(cpu_native.library())


@pytest.fixture(params=range(3), ids=NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[int]:
    before = LIBRARY.anb_isa()
    if LIBRARY.anb_set_isa(request.param) != request.param:
        pytest.skip(f"this machine has no {NAMES[request.param]}")
    yield request.param
    LIBRARY.anb_set_isa(before)


def sample(logits: F32, batch: SamplingBatch) -> Sampled:
    before = logits.copy()
    sampled = cpu_sampling.sample(LIBRARY, logits, batch)
    assert (logits.view(np.int32) == before.view(np.int32)).all(), "sampling must only read the logits"
    return sampled


def logits_of(rng: np.random.Generator, rows: int, vocab: int, spread: float = 3.0) -> F32:
    return (spread * rng.normal(size=(rows, vocab))).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 511, 512, 513, 1600, 49152])
def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(vocab: int, isa: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (12, vocab)).astype(np.float32)
    sampled = sample(logits, batch_of(12, temperature=0.0))
    assert sampled.token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-8, 1e-7])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = logits_of(np.random.default_rng(0), 20, 700, 60.0)
    assert (sample(logits, batch_of(20, temperature=temperature)).token_ids == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2, 1.0, 100.0, 1e9])
@pytest.mark.parametrize("largest", [0.0, 1.0, 1e4])
def test_no_temperature_overflows(temperature: float, largest: float, isa: int) -> None:
    logits = logits_of(np.random.default_rng(1), 8, 600)
    logits *= np.float32(largest) / np.abs(logits).max()
    sampled = sample(logits, batch_of(8, temperature=temperature, num_top_logprobs=4))
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < 600)).all() and np.isfinite(sampled.logprobs).all()
    if temperature <= 1e-4 and largest == 1e4:
        assert (sampled.token_ids == logits.argmax(axis=1)).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[F32, SamplingBatch]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, vocab = draw(st.integers(1, 6)), draw(st.sampled_from([3, 16, 33, 200, 1100]))
    logits = logits_of(rng, rows, vocab, draw(st.sampled_from([0.01, 1.0, 4.0, 30.0])))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    column = lambda values: np.array(draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)))  # noqa: E731
    batch = batch_of(
        rows, rng=rng, temperature=column([0.0, 0.3, 1.0, 2.5]), top_k=column([0, 0, 1, 2, 7, 5000]),
        top_p=column([1.0, 1.0, 0.0, 0.3, 0.9, 0.999]), min_p=column([0.0, 0.0, 0.05, 0.5, 1.0]), num_top_logprobs=column([-1, 0, 1, 3]),
    )  # fmt: skip
    if draw(st.booleans()):
        batch = replace(batch, mask=mask_of(rng.random((rows, vocab)) < draw(st.sampled_from([0.02, 0.5]))))
    if draw(st.booleans()):
        where = np.sort(rng.choice(rows * vocab, min(40, rows * vocab // 2), replace=False)).astype(np.int32)
        values = rng.choice([-np.inf, -100.0, -1.0, 2.0, 100.0], len(where)).astype(np.float32)
        batch = replace(batch, bias_rows=where // vocab, bias_ids=where % vocab, bias_values=values)
    if draw(st.booleans()):
        where = np.sort(rng.choice(rows * vocab, min(60, rows * vocab // 2), replace=False)).astype(np.int32)
        batch = replace(
            batch, penalty_rows=where // vocab, penalty_ids=where % vocab, penalty_counts=rng.integers(0, 4, len(where)).astype(np.int32),
            repetition_penalty=rng.choice([1.0, 1.3], rows).astype(np.float32),
            presence_penalty=rng.choice([0.0, -1.0, 2.0], rows).astype(np.float32),
            frequency_penalty=rng.choice([0.0, 0.7], rows).astype(np.float32),
        )  # fmt: skip
    return logits, replace(batch, vocab_limit=draw(st.sampled_from([0, 0, max(1, vocab - 5)])))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_row_follows_the_rules(case: tuple[F32, SamplingBatch]) -> None:
    logits, batch = case
    sampled = sample(logits, batch)
    for row in range(len(logits)):
        candidates = oracle_token(logits, batch, row)
        token = int(sampled.token_ids[row])
        assert token in candidates, f"row {row}: token {token}, the rules give {candidates}"
        if batch.num_top_logprobs[row] < 0 or token < 0:
            assert np.isnan(sampled.logprobs[row]) and sampled.tops[row] is None
            continue
        raw = raw_logprobs(logits[row])
        np.testing.assert_allclose(sampled.logprobs[row], raw[token], rtol=2e-6, atol=2e-6)
        check_top(sampled.tops[row], raw, logits[row], int(batch.num_top_logprobs[row]))


def check_top(top: tuple[NDArray[np.int32], F32] | None, raw: NDArray[np.float64], logits: F32, k: int) -> None:
    if k == 0:
        assert top is None
        return
    assert top is not None
    wanted = np.lexsort((np.arange(len(logits)), -logits))[:k]
    assert top[0].tolist() == wanted.tolist()
    np.testing.assert_allclose(top[1], raw[wanted], rtol=2e-6, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_a_row_gives_the_same_bits_in_any_batch(case: tuple[F32, SamplingBatch], data: st.DataObject) -> None:
    logits, batch = case
    threads = LIBRARY.anb_num_threads()
    together = sample(logits, batch)
    row = data.draw(st.integers(0, len(logits) - 1))
    LIBRARY.anb_set_num_threads(data.draw(st.integers(1, 3)))
    alone = sample(logits[row : row + 1], only(batch, row))
    LIBRARY.anb_set_num_threads(threads)
    assert alone.token_ids[0] == together.token_ids[row]
    assert alone.logprobs.view(np.int32)[0] == together.logprobs.view(np.int32)[row]


def only(batch: SamplingBatch, row: int) -> SamplingBatch:
    per_row = ("temperature", "top_k", "top_p", "min_p", "seeds", "paths", "positions", "num_top_logprobs")
    optional = ("repetition_penalty", "presence_penalty", "frequency_penalty", "mask")
    changes: dict[str, object] = {name: getattr(batch, name)[row : row + 1] for name in per_row}
    changes |= {name: getattr(batch, name)[row : row + 1] for name in optional if getattr(batch, name) is not None}
    for kind, values in (("bias", "values"), ("penalty", "counts")):
        mine = getattr(batch, f"{kind}_rows") == row
        changes |= {f"{kind}_{name}": getattr(batch, f"{kind}_{name}")[mine] for name in ("ids", values)}
        changes[f"{kind}_rows"] = np.zeros(int(mine.sum()), np.int32)
    return replace(batch, **changes)


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """How many standard deviations the statistic lies above its mean."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    assert counts[probabilities == 0].sum() == 0, "drew a token of probability 0"
    freedom = max(1, int(keep.sum()) - 1)
    return float((((observed - wanted)[keep] ** 2 / wanted[keep]).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 12, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (2.0, 30, 0.9, 0.05)],
)
def test_draws_follow_the_exact_probabilities(temperature: float, top_k: int, top_p: float, min_p: float, isa: int) -> None:
    rng = np.random.default_rng(7)
    logits = logits_of(rng, 1, 80, 1.5)
    draws = 20000
    batch = batch_of(draws, rng=rng, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    batch = replace(batch, seeds=np.full(draws, 11, np.uint64), paths=np.zeros(draws, np.uint64), positions=np.arange(draws, dtype=np.uint64))
    tokens = sample(np.repeat(logits, draws, axis=0), batch).token_ids
    weights = np.exp((logits[0].astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: top_k or 80]
    kept = kept[: int(np.searchsorted(np.cumsum(weights[kept]), top_p * weights[kept].sum())) + 1] if top_p < 1 else kept
    probabilities = np.zeros(80)
    probabilities[kept] = np.where(weights[kept] >= min_p * weights.max(), weights[kept], 0)
    assert chi_square(np.bincount(tokens, minlength=80), probabilities / probabilities.sum()) < 5


def test_the_draw_inverts_the_cdf_with_the_uniform_of_seed_path_and_position(isa: int) -> None:
    rng = np.random.default_rng(3)
    n = 4000
    batch = batch_of(n, rng=rng)
    logits = np.zeros((n, 1 << 12), np.float32)  # every step of the CDF is exactly 2^-12
    draws = uniform(batch.seeds, batch.paths, batch.positions)
    assert (sample(logits, batch).token_ids == np.floor(draws * (1 << 12))).all()


def test_top_p_keeps_the_shortest_run_that_reaches_it_ties_to_lower_ids(isa: int) -> None:
    logits = np.log(np.array([[1, 4, 2, 4, 4, 1]], np.float32)).repeat(400, axis=0)
    runs = ((0.0, {1}), (0.25, {1}), (0.26, {1, 3}), (0.5, {1, 3}), (0.51, {1, 3, 4}), (0.8, {1, 2, 3, 4}), (0.9375, {0, 1, 2, 3, 4}))
    for top_p, kept in runs:
        just_below = np.nextafter(np.float32(top_p), np.float32(0))  # logarithms round
        batch = batch_of(400, rng=np.random.default_rng(1), top_p=just_below)
        assert set(sample(logits, batch).token_ids.tolist()) == kept, top_p


def test_a_flat_distribution_under_top_p_over_the_whole_vocabulary_stays_exact(isa: int) -> None:
    logits = np.zeros((50, 49152), np.float32)
    tokens = sample(logits, batch_of(50, rng=np.random.default_rng(0), top_p=0.5)).token_ids
    assert tokens.max() < 24576 and tokens.min() >= 0 and tokens.max() > 20000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 17, 699])
def test_a_row_that_is_not_finite_fails_alone(bad: float, where: int, isa: int) -> None:
    logits = logits_of(np.random.default_rng(2), 5, 700)
    for temperature in (0.0, 1.0):
        batch = batch_of(5, temperature=temperature, num_top_logprobs=2, top_p=0.9)
        clean = sample(logits, batch)
        broken = logits.copy()
        broken[2, where] = bad
        sampled = sample(broken, batch)
        assert sampled.token_ids[2] == -1 and np.isnan(sampled.logprobs[2]) and sampled.tops[2] is None
        others = [0, 1, 3, 4]
        assert (sampled.token_ids[others] == clean.token_ids[others]).all()
        assert (sampled.logprobs[others] == clean.logprobs[others]).all()


def test_an_empty_mask_fails_its_row_alone(isa: int) -> None:
    logits = logits_of(np.random.default_rng(2), 3, 100)
    allowed = np.ones((3, 100), np.bool_)
    allowed[1] = False
    for temperature in (0.0, 1.0):
        assert (sample(logits, batch_of(3, temperature=temperature, mask=mask_of(allowed))).token_ids < 0).tolist() == [False, True, False]


def test_a_ban_holds_whatever_the_bias_and_a_mask_whatever_either(isa: int) -> None:
    logits = np.zeros((2, 40), np.float32)
    allowed = np.ones((2, 40), np.bool_)
    allowed[1, 7] = False
    batch = batch_of(
        2, temperature=0.0, mask=mask_of(allowed), bias_rows=np.array([0, 0, 0, 1, 1], np.int32),
        bias_ids=np.array([5, 5, 9, 7, 9], np.int32), bias_values=np.array([-np.inf, 100, 1, 100, 1], np.float32),
    )  # fmt: skip
    assert sample(logits, batch).token_ids.tolist() == [9, 9]


def test_ids_beyond_the_limit_are_never_sampled_but_count_in_raw_logprobs(isa: int) -> None:
    logits = np.zeros((30, 64), np.float32)
    logits[:, 60:] = 8.0
    sampled = sample(logits, batch_of(30, rng=np.random.default_rng(0), num_top_logprobs=1, vocab_limit=50))
    assert (sampled.token_ids < 50).all() and (sampled.token_ids >= 0).all()
    np.testing.assert_allclose(sampled.logprobs, raw_logprobs(logits[0])[0], rtol=1e-6)
    assert sampled.tops[0] is not None and sampled.tops[0][0].tolist() == [60]


def test_agrees_with_the_reference_on_a_real_vocabulary() -> None:
    rng = np.random.default_rng(4)
    logits = logits_of(rng, 40, 49152, 4.0)
    batch = batch_of(
        40, rng=rng, temperature=rng.choice([0.0, 0.6, 1.0, 1.5], 40), top_k=rng.choice([0, 1, 40, 1000], 40),
        top_p=rng.choice([1.0, 0.9, 0.5], 40), min_p=rng.choice([0.0, 0.1], 40), num_top_logprobs=np.full(40, 5), vocab_limit=49000,
    )  # fmt: skip
    ours, theirs = sample(logits, batch), reference.sample(logits, batch)
    assert (ours.token_ids == theirs.token_ids).mean() > 0.95  # a draw may fall within rounding of a step of the CDF
    same = ours.token_ids == theirs.token_ids
    np.testing.assert_allclose(ours.logprobs[same], theirs.logprobs[same], rtol=2e-6, atol=2e-6)
    assert all(a is not None and b is not None and (a[0] == b[0]).all() for a, b in zip(ours.tops, theirs.tops))


def test_logprobs_of_any_rows_and_ids(isa: int) -> None:
    rng = np.random.default_rng(5)
    logits = np.round(logits_of(rng, 6, 1000), 1)
    logits[3, 500] = np.nan
    rows, ids = rng.integers(0, 6, 60).astype(np.int32), rng.integers(0, 1000, 60).astype(np.int32)
    ids[:6], rows[:6] = logits.argmax(axis=1), np.arange(6)
    logprobs, is_best = cpu_sampling.logprobs_of(LIBRARY, logits, rows, ids)
    for j, (row, token) in enumerate(zip(rows, ids)):
        if row == 3:
            assert np.isnan(logprobs[j]) and not is_best[j]
        else:
            np.testing.assert_allclose(logprobs[j], raw_logprobs(logits[row])[token], rtol=2e-6, atol=2e-6)
            assert is_best[j] == (logits[row].argmax() == token)


@pytest.mark.parametrize("k", [0, 1, 5, 16, 100, 333])
def test_top_logprobs_are_sorted_ties_by_id(k: int, isa: int) -> None:
    logits = np.round(logits_of(np.random.default_rng(6), 4, 333, 2.0))
    ids, logprobs = cpu_sampling.top_logprobs(LIBRARY, logits, np.array([2, 0], np.int32), k)
    for j, row in enumerate((2, 0)):
        check_top((ids[j], logprobs[j]) if k else None, raw_logprobs(logits[row]), logits[row], k)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": np.ones(3, np.float32)}, "top_p has 3 entries for 2 rows"),
        ({"mask": np.zeros((2, 1), np.uint32)}, r"the mask must be \[2, 2\] words"),
        ({"num_top_logprobs": np.full(2, 41, np.int32)}, "at most 40"),
        ({"bias_rows": np.array([2], np.int32), "bias_ids": np.zeros(1, np.int32), "bias_values": np.zeros(1, np.float32)}, "bias row"),
        ({"bias_rows": np.array([0], np.int32), "bias_ids": np.array([40], np.int32), "bias_values": np.zeros(1, np.float32)}, "bias id"),
        (
            {"penalty_rows": np.array([1, 0], np.int32), "penalty_ids": np.zeros(2, np.int32), "penalty_counts": np.zeros(2, np.int32)},
            "penalty_rows must ascend",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        sample(np.zeros((2, 40), np.float32), replace(batch_of(2), **changes))
