"""The native matrix product: how near it is, and that a row's result is its own."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights import from_floats, random_raw, random_rows, rounding_bound, true_product

from anabranch.kernels.backends import cpu_native as native
from anabranch.kernels.backends.cpu import CpuBackend, CpuMatrix
from anabranch.kernels.formats import FORMATS, RawTensor, dequantize
from anabranch.kernels.layout import LayoutError
from anabranch.kernels.quantize import PanelKind

ISAS = {"plain": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(scope="module")
def fast() -> CpuBackend:
    return CpuBackend()


@pytest.fixture(scope="module")
def exact() -> CpuBackend:
    return CpuBackend(precision="exact")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has, in turn."""
    library = native.library()
    try:
        if library.anb_set_isa(ISAS[request.param]) != ISAS[request.param]:
            pytest.skip(f"this machine has no {request.param}")
        yield request.param
    finally:
        library.anb_set_isa(max(ISAS.values()))


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize("form", FORMATS)
def test_exact_precision_multiplies_by_the_very_weights_of_the_file(exact: CpuBackend, form: str, isa: str) -> None:
    raw = random_raw(form, 45, 512, seed=1)
    identity = np.eye(512, dtype=np.float32)
    np.testing.assert_array_equal(exact.matrix([raw]).multiply(identity).T, dequantize(raw))


@pytest.mark.parametrize("form", FORMATS)
def test_exact_precision_is_float32_accurate(exact: CpuBackend, form: str) -> None:
    raw, x = random_raw(form, 70, 512, seed=2), random_rows(9, 512, seed=3)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(dequantize(raw)).astype(np.float64).T
    assert (np.abs(exact.matrix([raw]).multiply(x) - true_product(raw, x)) <= magnitude * 512 * 2**-24).all()


@pytest.mark.parametrize("form", FORMATS)
def test_fast_precision_errs_by_no_more_than_rounding_the_activations_explains(fast: CpuBackend, form: str, isa: str) -> None:
    for seed, num_rows in enumerate((1, 3, 13, 30)):
        raw, x = random_raw(form, 77, 768, seed=seed), random_rows(num_rows, 768, seed=seed + 10)
        error = np.abs(fast.matrix([raw]).multiply(x) - true_product(raw, x))
        bound = rounding_bound(raw, x)
        assert (error <= bound).all(), f"seed {seed}: error / bound = {(error / bound).max()}"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_a_row_gives_the_same_bits_in_any_company_and_on_any_number_of_threads(form: str, precision: str) -> None:
    backend = CpuBackend(precision=precision, num_threads=2)
    matrix, x = backend.matrix([random_raw(form, 100, 1024, seed=4)]), random_rows(33, 1024, seed=5)
    alone = np.concatenate([matrix.multiply(x[i : i + 1]) for i in range(len(x))])
    for num_rows in range(1, 34):
        np.testing.assert_array_equal(bits(matrix.multiply(x[:num_rows])), bits(alone[:num_rows]))
    many = np.concatenate([x[::-1]] * 18)  # more than one block of rows
    for num_threads in (1, 2, 3):
        backend.set_num_threads(num_threads)
        np.testing.assert_array_equal(bits(matrix.multiply(many)), bits(np.concatenate([alone[::-1]] * 18)))
    backend.set_num_threads(2)


@pytest.mark.parametrize("form", FORMATS)
def test_avx2_and_avx512_agree_bit_for_bit(fast: CpuBackend, form: str) -> None:
    library = native.library()
    if library.anb_isa() < ISAS["avx512"]:
        pytest.skip("this machine has no avx512")
    raw, x = random_raw(form, 64, 1024, seed=6), random_rows(17, 1024, seed=7)
    matrix = fast.matrix([raw])
    wide = matrix.multiply(x)
    try:
        library.anb_set_isa(ISAS["avx2"])
        np.testing.assert_array_equal(bits(matrix.multiply(x)), bits(wide))
    finally:
        library.anb_set_isa(ISAS["avx512"])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_shape_multiplies_right(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"]))
    columns = data.draw(st.integers(1, 200)) if form in ("F32", "F16", "BF16") else 32 * data.draw(st.integers(1, 30))
    parts = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    seed, num_rows = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 20))
    raws = [random_raw(form, rows, columns, seed=seed + i) for i, rows in enumerate(parts)]
    biases = [random_rows(1, rows, seed=seed + 9)[0] for rows in parts] if data.draw(st.booleans()) else []
    x = random_rows(num_rows, columns, seed=seed)
    out = CpuBackend().matrix(raws, [from_floats("bias", b) for b in biases]).multiply(x)
    bias = np.concatenate(biases) if biases else np.zeros(sum(parts), np.float32)
    true = np.concatenate([true_product(raw, x) for raw in raws], axis=1) + bias
    bound = np.concatenate([rounding_bound(raw, x) for raw in raws], axis=1) + np.abs(true) * 1e-6 + np.abs(bias) * 1e-6
    assert (np.abs(out - true) <= bound).all()


def test_parts_of_different_formats_make_one_matrix(fast: CpuBackend) -> None:
    raws = [random_raw("Q4_K", 64, 512, seed=1), random_raw("Q6_K", 48, 512, seed=2), random_raw("Q8_0", 20, 512, seed=3)]
    x = random_rows(5, 512)
    together = fast.matrix(raws).multiply(x)
    np.testing.assert_array_equal(together, np.concatenate([fast.matrix([raw]).multiply(x) for raw in raws], axis=1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_1", "Q4_0", "Q6_K", "F32"])
def test_a_row_that_is_not_finite_stays_alone(fast: CpuBackend, form: str, bad: float) -> None:
    matrix, x = fast.matrix([random_raw(form, 64, 256, seed=8)]), random_rows(20, 256, seed=9)
    clean = matrix.multiply(x)
    for row, column in ((0, 0), (7, 37), (19, 255)):
        broken = x.copy()
        broken[row, column] = bad
        out = matrix.multiply(broken)
        assert np.isnan(out[row]).all()
        others = np.arange(20) != row
        np.testing.assert_array_equal(bits(out[others]), bits(clean[others]))


@pytest.mark.parametrize("form", ["Q8_0", "Q4_1", "Q6_K", "F32"])
def test_zeros_give_zero_and_extreme_magnitudes_stay_in_bounds(fast: CpuBackend, form: str, isa: str) -> None:
    raw = random_raw(form, 40, 256, seed=11)
    matrix = fast.matrix([raw])
    np.testing.assert_array_equal(matrix.multiply(np.zeros((3, 256), np.float32)), 0)
    for magnitude in (1e-45, 1e-37, 1e-20, 1e20, 1e33):
        x = random_rows(4, 256, seed=12) / np.float32(1000) * np.float32(magnitude)
        error = np.abs(matrix.multiply(x).astype(np.float64) - true_product(raw, x))
        weights = np.abs(dequantize(raw)).sum(axis=1)
        assert (error <= rounding_bound(raw, x) + weights * 1e-37).all(), magnitude  # below it, a group counts as zero


def test_weights_whose_scales_exceed_half_precision_keep_their_accuracy(fast: CpuBackend) -> None:
    rng = np.random.default_rng(13)
    for magnitude in (1e-9, 1e-6, 1e-3, 1.0, 1e8, 1e12):
        raw = from_floats("w", (rng.normal(0, 1, (40, 96)) * magnitude).astype(np.float32))
        x = random_rows(3, 96, seed=14)
        assert (np.abs(fast.matrix([raw]).multiply(x) - true_product(raw, x)) <= rounding_bound(raw, x)).all(), magnitude


def test_only_misfits_take_wide_scales(fast: CpuBackend) -> None:
    def kind(values: np.ndarray) -> PanelKind:
        matrix = fast.matrix([from_floats("w", values.astype(np.float32))])
        matrix.native_matrix()
        return matrix._packed[0].kind

    ordinary = np.random.default_rng(0).normal(0, 0.05, (32, 64))
    assert kind(ordinary) == PanelKind.SYM8 and kind(np.zeros((32, 64))) == PanelKind.SYM8
    assert kind(ordinary * 1e-6) == PanelKind.SYM8_WIDE and kind(ordinary * 1e9) == PanelKind.SYM8_WIDE


def test_a_code_of_minus_128_is_a_code_like_any_other(fast: CpuBackend, isa: str) -> None:
    data = np.zeros((32, 34), np.uint8)
    data[:, :2] = np.full((32, 1), 0.5, np.float16).view(np.uint8)
    data[:, 2:] = 0x80
    x = np.full((2, 32), -127.0, np.float32)
    np.testing.assert_array_equal(fast.matrix([RawTensor("w", "Q8_0", (32, 32), data)]).multiply(x), 0.5 * 128 * 127 * 32)


def test_rows_of_a_table_are_read_exactly(fast: CpuBackend) -> None:
    library = native.library()
    for form in FORMATS:
        raw = random_raw(form, 50, 256, seed=15)
        ids = np.array([0, 49, 7, 7], np.int32)
        out = np.empty((4, 256), np.float32)
        library.anb_read_rows(fast.matrix([raw]).native_table(), ids.ctypes.data, 4, out.ctypes.data)
        np.testing.assert_array_equal(out, dequantize(raw)[ids])


def test_the_files_bytes_may_be_read_only_and_strided(fast: CpuBackend) -> None:
    raw = random_raw("Q4_1", 64, 128, seed=16)
    wide = np.zeros((64, raw.data.shape[1] + 12), np.uint8)
    wide[:, : raw.data.shape[1]] = raw.data
    wide.flags.writeable = False
    x = random_rows(2, 128)
    strided = RawTensor("w", "Q4_1", (64, 128), wide[:, : raw.data.shape[1]])
    np.testing.assert_array_equal(fast.matrix([strided]).multiply(x), fast.matrix([raw]).multiply(x))


def made(backend: CpuBackend, *parts: RawTensor, bias: tuple[RawTensor, ...] = ()) -> CpuMatrix:
    return backend.matrix(parts, bias)


def test_what_does_not_fit_is_refused_by_name(fast: CpuBackend) -> None:
    good = random_raw("Q8_0", 32, 64)
    with pytest.raises(LayoutError, match="at least one part"):
        made(fast)
    with pytest.raises(LayoutError, match="differ in columns"):
        made(fast, good, random_raw("Q8_0", 32, 96))
    with pytest.raises(LayoutError, match="bias of 3 values for 32 rows"):
        made(fast, good, bias=(from_floats("b", np.zeros(3, np.float32)),))
    with pytest.raises(LayoutError, match="unknown format 'Q2_X'"):
        made(fast, RawTensor("w", "Q2_X", (32, 64), good.data))
    with pytest.raises(LayoutError, match=r"takes uint8 \(32, 68\), got uint8 \(32, 34\)"):
        made(fast, RawTensor("w", "Q8_0", (32, 64), good.data[:, :34]))
    with pytest.raises(LayoutError, match="cannot take x of shape"):
        made(fast, good).multiply(np.zeros((2, 65), np.float32))
