"""Roundings to narrow floats without ml_dtypes: equal to those of ml_dtypes, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from llamaspec.reference.quantizers.minifloat import E4M3
from llamaspec.verify.bounds.precision import PRECISIONS
from llamaspec.verify.mutant import bf16, e4m3

UPPER = np.arange(2**16, dtype=np.uint32)[:, None] << 16
# Every bfloat16 number, and float32 numbers around the ties between neighbors.
NUMBERS = (UPPER + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32).ravel()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_bfloat16():
    expected = NUMBERS.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bf16(NUMBERS), expected, strict=True)
    np.testing.assert_array_equal(np.signbit(bf16(NUMBERS)), np.signbit(expected))
    assert bf16(257) == 256 and bf16(np.float64(1 + 2**-8 + 2**-40)) == ml_dtypes.bfloat16(1 + 2**-8 + 2**-40)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_e4m3():
    levels = E4M3.decode(np.arange(127, dtype=np.uint8)).astype(np.float32)
    ties = (levels[1:] + levels[:-1]) / 2
    around = [np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(500))]
    limits = np.nextafter(np.float32(464), np.array([0, 464, 500], np.float32))
    numbers = np.concatenate([levels, *around, limits, NUMBERS])
    numbers = np.concatenate([numbers, -numbers])
    expected = numbers.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(
        e4m3(numbers).view(ml_dtypes.float8_e4m3fn).astype(np.float32), expected.astype(np.float32)
    )
    finite = np.isfinite(expected.astype(np.float32))  # the sign of a NaN means nothing
    np.testing.assert_array_equal(e4m3(numbers)[finite], expected.view(np.uint8)[finite])


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_limits_of_a_precision(name):
    known = PRECISIONS[name]
    limits = ml_dtypes.finfo(known.dtype)
    assert known.dtype == np.dtype(getattr(ml_dtypes, name, name))
    assert (known.normal, known.largest) == (float(limits.smallest_normal), float(limits.max))
