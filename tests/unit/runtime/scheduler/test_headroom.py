import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.runtime.scheduler.headroom import Headroom


def expect(headroom: Headroom, generated: int, limit: int) -> int:
    return int(headroom.expect(np.array([generated]), np.array([limit]))[0])


def test_without_experience_an_output_is_expected_to_take_all_it_may() -> None:
    assert expect(Headroom(), 0, 800) == 800
    assert expect(Headroom(), 300, 800) == 500


def test_experience_of_short_outputs_brings_the_expectation_down() -> None:
    headroom = Headroom()
    for _ in range(200):
        headroom.observe(20, was_cut=False)
    assert expect(headroom, 0, 8000) < 250
    assert expect(headroom, 0, 10) == 10, "never more than it may have"


def test_an_output_longer_than_any_seen_is_expected_to_take_all_it_may() -> None:
    headroom = Headroom()
    for _ in range(200):
        headroom.observe(20, was_cut=False)
    assert expect(headroom, 500, 8000) == 7500


def test_what_was_cut_off_counts_as_longer() -> None:
    cut, ended = Headroom(), Headroom()
    for _ in range(100):
        cut.observe(100, was_cut=True)
        ended.observe(100, was_cut=False)
    assert expect(cut, 0, 10_000) > expect(ended, 0, 10_000)


def test_recent_outputs_count_more_than_old_ones() -> None:
    headroom = Headroom()
    for length in [1000] * 300 + [10] * 300:
        headroom.observe(length, was_cut=False)
    assert expect(headroom, 0, 4000) < 400


@given(st.lists(st.integers(0, 5000), max_size=50), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), min_size=1))
def test_the_expectation_lies_between_nothing_and_the_limit(lengths: list[int], asked: list[tuple[int, int]]) -> None:
    headroom = Headroom()
    for length in lengths:
        headroom.observe(length, was_cut=length % 2 == 0)
    generated, limit = (np.array(column) for column in zip(*asked))
    expected = headroom.expect(generated, limit)
    assert (expected >= 0).all() and (expected <= np.maximum(limit - generated, 0)).all()
