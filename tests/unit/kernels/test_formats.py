"""`dequantize` against the gguf package, and on its own terms."""

import gguf
import numpy as np
import pytest
from support.weights import random_raw

from anabranch.kernels.formats import FORMATS, RawTensor, dequantize


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_agrees_bit_for_bit_with_the_gguf_package(name: str) -> None:
    raw = random_raw(name, 7, 512, seed=1)
    expected = gguf.dequantize(raw.data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(raw), expected.reshape(raw.shape))


def test_a_vector_keeps_its_shape() -> None:
    raw = RawTensor("norm", "F32", (5,), np.arange(5, dtype=np.float32).view(np.uint8)[None])
    np.testing.assert_array_equal(dequantize(raw), np.arange(5, dtype=np.float32))


def test_an_unknown_format_names_the_ones_there_are() -> None:
    with pytest.raises(ValueError, match=r"'Q3_X', expected one of F32, .*Q6_K"):
        dequantize(RawTensor("t", "Q3_X", (1, 32), np.zeros((1, 4), np.uint8)))


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="rows of 33 values are not whole blocks of 32"):
        dequantize(RawTensor("t", "Q8_0", (1, 33), np.zeros((1, 34), np.uint8)))


def test_the_data_is_never_written() -> None:
    raw = random_raw("Q5_K", 2, 256)
    before = raw.data.copy()
    raw.data.flags.writeable = False
    dequantize(raw)
    np.testing.assert_array_equal(raw.data, before)
