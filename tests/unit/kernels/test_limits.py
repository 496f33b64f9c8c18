"""Measured rates are of this world."""

import pytest

from anabranch.kernels.limits import Limits, measure

MIB = 1 << 20


def test_a_rate_lies_between_those_that_were_measured() -> None:
    limits = Limits("any", 2, 1e11, 1e12, {32 * MIB: 50e9, 128 * MIB: 30e9})
    assert limits.read_rate(MIB) == 50e9 and limits.read_rate(1024 * MIB) == 30e9
    assert limits.read_rate(64 * MIB) == pytest.approx(40e9)
    assert limits.read_rate(128 * MIB) == pytest.approx(30e9)


def test_measured_rates_are_plausible_on_any_number_of_threads() -> None:
    one, two = (measure(n, sizes=(MIB,)) for n in (1, 2))
    assert (one.num_threads, two.num_threads) == (1, 2)
    for limits in (one, two):
        assert limits.isa in ("plain", "avx2", "avx512-vnni")
        assert 1e7 < limits.float_ops_per_s < 1e14 and 1e7 < limits.byte_ops_per_s < 1e15
        assert 1e7 < limits.read_rate(MIB) < 1e13
