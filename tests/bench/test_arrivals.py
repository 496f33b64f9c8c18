"""Arrivals are drawn as they should be, and traces of other people are read or refused with the line that is wrong."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from anabranch.runtime.bench.arrivals import (
    MIX,
    Arrival,
    TraceError,
    at_rate,
    fitting,
    offered_rate,
    poisson,
    read_trace,
)


def test_gaps_of_a_poisson_stream_have_its_mean_and_the_spread_of_an_exponential() -> None:
    arrivals = poisson(4.0, 4000, seed=1)
    gaps = [b.at - a.at for a, b in pairwise(arrivals)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.06) and pstdev(gaps) == pytest.approx(0.25, rel=0.08)
    assert len({a.num_prompt for a in arrivals}) > len(MIX) and offered_rate(arrivals) == pytest.approx(4.0, rel=0.06)


def test_the_same_seed_is_the_same_stream_and_another_seed_is_not() -> None:
    assert poisson(2.0, 50, seed=3) == poisson(2.0, 50, seed=3) != poisson(2.0, 50, seed=4)


def test_a_stream_can_be_sped_up_to_a_rate() -> None:
    assert offered_rate(at_rate([Arrival(float(i), 1, 1) for i in range(11)], 5.0)) == pytest.approx(5.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be above 0"):
        poisson(rate, 3, 0)


def test_requests_are_cut_to_the_context_and_counted() -> None:
    fitted, num_cut = fitting([Arrival(0, 100, 10), Arrival(1, 5000, 900)], 1024)
    assert num_cut == 1 and fitted[0] == Arrival(0, 100, 10)
    assert fitted[1].num_prompt + fitted[1].num_output <= 1024 and fitted[1].num_output == 512


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_a_csv_with_dates_is_read_from_its_first_arrival_on(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,110,27\n"
    assert read_trace(write(tmp_path, text), 10) == [Arrival(0.0, 4808, 10), Arrival(pytest.approx(0.5), 110, 27)]


def test_json_lines_have_milliseconds_and_blocks(tmp_path: Path) -> None:
    text = '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}\n\n' + (
        '{"timestamp": 1000, "input_length": 20, "output_length": 0}\n'
    )
    assert read_trace(write(tmp_path, text), 10) == [Arrival(0.0, 20, 1), Arrival(2.0, 700, 5, (4, 9))]


def test_only_as_many_requests_as_wanted_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n1,2,3\n2,2,3\nbroken,2,3\n")
    assert len(read_trace(path, 2)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no requests"),
        ("arrival_s,prompt_tokens\n1,2\n", "no column for the output"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", ":2: 2 columns under a header of 3"),
        ("arrival_s,prompt_tokens,output_tokens\nsoon,2,3\n", ":2: 'soon' is neither"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", ":2: 'nan' is no time"),
        ("arrival_s,prompt_tokens,output_tokens\n1,many,3\n", "prompt_tokens must be a number"),
        ("arrival_s,prompt_tokens,output_tokens\n1,-2,3\n", "must not be negative"),
        ('{"timestamp": 1', "not JSON"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": ["a"]}', "hash_ids must be"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_place(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(write(tmp_path, text), 10)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere is not a file"):
        read_trace(tmp_path / "nowhere", 10)
