import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels import sampling
from anabranch.kernels.layout import LayoutError, SamplingBatch

VOCAB = 40


def batch(rows: int = 1, **columns: object) -> SamplingBatch:
    """Greedy by default; a scalar fills its column."""
    defaults = {
        "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seeds": np.uint64,
        "paths": np.uint64, "positions": np.uint64, "num_top_logprobs": np.int32,
    }  # fmt: skip
    values = {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "seeds": 0,
        "paths": 0,
        "positions": 0,
        "num_top_logprobs": -1,
    }
    filled = {n: np.broadcast_to(np.asarray(columns.pop(n, values[n])), rows).astype(t) for n, t in defaults.items()}
    return SamplingBatch(**filled, **columns)  # type: ignore[arg-type]


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def pack(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def naive_distribution(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities by the definition, one token at a time."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    ranked = [i for i in ranked if row[i] > -np.inf]
    if top_k:
        ranked = ranked[:top_k]
    weight = {i: float(np.exp((float(row[i]) - float(row[ranked[0]])) / temperature)) for i in ranked}
    total, kept, reached = sum(weight.values()), [], 0.0
    for i in ranked:
        if kept and reached >= top_p * total:
            break
        kept.append(i)
        reached += weight[i]
    kept = [i for i in kept if weight[i] >= min_p * weight[ranked[0]]]
    probabilities = np.zeros(len(row))
    for i in kept:
        probabilities[i] = weight[i]
    return probabilities / probabilities.sum()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000), temperature=st.floats(0.1, 3), top_k=st.integers(0, VOCAB + 3), top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.5),
)  # fmt: skip
def test_a_draw_inverts_the_cdf_of_the_filtered_distribution(seed, temperature, top_k, top_p, min_p) -> None:
    row = random_logits(1, seed)[0]
    top_p, min_p = float(np.float32(top_p)), float(np.float32(min_p))
    probabilities = naive_distribution(row, temperature, top_k, top_p, min_p)
    edges = np.cumsum(probabilities)
    for draw in np.random.default_rng(seed).random(8):
        token = sampling.choose(row, temperature, top_k, top_p, min_p, float(draw))
        low, high = edges[token] - probabilities[token], edges[token]
        assert low - 1e-9 <= draw <= high + 1e-9
        assert probabilities[token] > 0


def test_tokens_come_as_often_as_their_probability_says() -> None:
    row = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32))
    n = 20_000
    sampled = sampling.sample(np.repeat(row, n, axis=0), batch(n, temperature=1, seeds=3, positions=np.arange(n)))
    shares = np.bincount(sampled.token_ids, minlength=4) / n
    assert np.abs(shares - [0.5, 0.25, 0.15, 0.1]).max() < 0.015


def test_greedy_takes_the_lowest_id_among_equals_and_ignores_the_seed() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [7, 9]] = 60
    assert sampling.sample(logits, batch(2, seeds=[1, 2])).token_ids.tolist() == [7, 7]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e9])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = random_logits(1) * 20
    token = sampling.sample(logits, batch(temperature=temperature)).token_ids[0]
    assert 0 <= token < VOCAB
    if temperature < 1:
        assert token == logits.argmax()


def test_top_p_zero_is_greedy() -> None:
    logits = random_logits(8)
    sampled = sampling.sample(logits, batch(8, temperature=2, top_p=0, seeds=np.arange(8)))
    assert (sampled.token_ids == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = random_logits(3)
    healthy = sampling.sample(logits, batch(3, temperature=1, seeds=5, positions=np.arange(3), num_top_logprobs=2))
    logits[1, 4] = bad
    sampled = sampling.sample(logits, batch(3, temperature=1, seeds=5, positions=np.arange(3), num_top_logprobs=2))
    assert sampled.token_ids[1] == -1 and np.isnan(sampled.logprobs[1]) and sampled.tops[1] is None
    for row in (0, 2):
        assert sampled.token_ids[row] == healthy.token_ids[row]
        assert sampled.logprobs[row] == healthy.logprobs[row]


def test_an_empty_mask_fails_its_row_alone() -> None:
    allowed = np.ones((2, VOCAB), bool)
    allowed[0] = False
    assert sampling.sample(random_logits(2), batch(2, mask=pack(allowed))).token_ids.tolist()[0] == -1
    assert sampling.sample(random_logits(2), batch(2, mask=pack(allowed))).token_ids.tolist()[1] >= 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_masked_tokens_are_never_sampled_whatever_their_bias(seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random((4, VOCAB)) < 0.2
    allowed[:, rng.integers(VOCAB)] = True
    rows, ids = np.nonzero(~allowed)
    edits = {
        "bias_rows": rows.astype(np.int32),
        "bias_ids": ids.astype(np.int32),
        "bias_values": np.full(len(ids), 100, np.float32),
    }
    sampled = sampling.sample(
        random_logits(4, seed), batch(4, temperature=1, seeds=seed, positions=np.arange(4), mask=pack(allowed), **edits)
    )
    assert allowed[np.arange(4), sampled.token_ids].all()


def test_a_ban_beats_a_bias_on_the_same_token() -> None:
    edits = {
        "bias_rows": np.zeros(2, np.int32), "bias_ids": np.full(2, 3, np.int32),
        "bias_values": np.array([-np.inf, 100], np.float32),
    }  # fmt: skip
    assert sampling.sample(random_logits(1), batch(**edits)).token_ids[0] != 3


def test_ids_without_a_token_are_never_sampled() -> None:
    logits = random_logits(1)
    logits[0, 30:] = 50
    assert sampling.sample(logits, batch(vocab_limit=30)).token_ids[0] < 30
    hot = sampling.sample(
        np.repeat(logits, 200, 0), batch(200, temperature=5, positions=np.arange(200), vocab_limit=30)
    )
    assert hot.token_ids.max() < 30


def test_penalties_follow_their_definitions() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5]], np.float32)
    edited = sampling.edit_logits(logits, batch(
        penalty_rows=np.zeros(3, np.int32), penalty_ids=np.array([0, 1, 2], np.int32), penalty_counts=np.array([3, 0, 1], np.int32),
        repetition_penalty=np.array([2], np.float32), presence_penalty=np.array([0.5], np.float32),
        frequency_penalty=np.array([0.25], np.float32),
    ))  # fmt: skip
    assert edited[0].tolist() == [2 / 2 - 0.5 - 3 * 0.25, -2 * 2, 1 / 2 - 0.5 - 0.25, 0.5]
    assert logits[0, 0] == 2.0


def test_each_row_of_a_mixed_batch_is_as_it_would_be_alone() -> None:
    rng = np.random.default_rng(1)
    rows = 12
    logits = random_logits(rows, 4)
    columns = {
        "temperature": np.where(rng.random(rows) < 0.3, 0, rng.uniform(0.2, 2, rows)), "top_k": rng.integers(0, 9, rows),
        "top_p": rng.uniform(0.3, 1, rows), "min_p": rng.uniform(0, 0.1, rows), "seeds": rng.integers(0, 2**63, rows),
        "paths": rng.integers(0, 2**63, rows), "positions": rng.integers(0, 999, rows), "num_top_logprobs": rng.integers(-1, 5, rows),
    }  # fmt: skip
    together = sampling.sample(logits, batch(rows, **columns))
    for row in range(rows):
        alone = sampling.sample(logits[row : row + 1], batch(1, **{k: v[row] for k, v in columns.items()}))
        assert together.token_ids[row] == alone.token_ids[0]
        np.testing.assert_equal(together.logprobs[row], alone.logprobs[0])
        np.testing.assert_equal(together.tops[row], alone.tops[0])


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(2)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    edits = {
        "bias_rows": np.zeros(1, np.int32),
        "bias_ids": np.full(1, 3, np.int32),
        "bias_values": np.full(1, 90, np.float32),
    }
    for temperature in (0, 0.7, 1.5):
        sampled = sampling.sample(logits, batch(2, temperature=temperature, num_top_logprobs=[3, 0], **edits))
        assert sampled.token_ids[0] == 3
        np.testing.assert_allclose(sampled.logprobs, expected[[0, 1], sampled.token_ids], atol=1e-6)
        ids, values = sampled.tops[0]
        assert ids.tolist() == np.argsort(-logits[0], kind="stable")[:3].tolist()
        np.testing.assert_allclose(values, expected[0, ids], atol=1e-6)
        assert sampled.tops[1] is None


def test_top_logprobs_break_ties_by_id_and_sum_to_at_most_one() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    ids, values = sampling.top_logprobs(logits, np.array([0], np.int32), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    ids, values = sampling.top_logprobs(random_logits(3), np.arange(3, dtype=np.int32), 5)
    assert (np.diff(values, axis=1) <= 0).all() and (np.exp(values).sum(axis=1) <= 1 + 1e-6).all()
    everything = sampling.top_logprobs(random_logits(1), np.array([0], np.int32), VOCAB)
    assert sorted(everything[0][0].tolist()) == list(range(VOCAB))


def test_logprobs_of_marks_the_argmax() -> None:
    logits = random_logits(2)
    best = int(logits[1].argmax())
    values, is_best = sampling.logprobs_of(
        logits, np.array([1, 1], np.int32), np.array([best, (best + 1) % VOCAB], np.int32)
    )
    assert is_best.tolist() == [True, False] and values[0] > values[1]


def test_columns_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(LayoutError, match="temperature has 1 entries for 2 rows"):
        sampling.sample(random_logits(2), batch(1))
    with pytest.raises(LayoutError, match="mask has shape"):
        sampling.sample(random_logits(1), batch(mask=np.zeros((1, 1), np.uint32)))
