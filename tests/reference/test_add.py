from fractions import Fraction

import numpy as np
from hypothesis import given

from llamaspec.reference.add import add
from tests.support.strategies import dtypes, noises


@given(noise=noises, x_dtype=dtypes, y_dtype=dtypes)
def test_is_the_exact_sum_rounded_once_to_float64(noise, x_dtype, y_dtype):
    x, y = noise(2, 5, dtype=x_dtype), noise(2, 5, dtype=y_dtype)
    exact = [float(Fraction(float(a)) + Fraction(float(b))) for a, b in zip(x.flat, y.flat, strict=True)]
    total = add(x, y)
    assert total.dtype == np.float64
    np.testing.assert_array_equal(total.ravel(), exact)


@given(noise=noises)
def test_commutes_and_has_zero_and_negatives(noise):
    x, y = noise(2, 5), noise(2, 5)
    np.testing.assert_array_equal(add(x, y), add(y, x))
    np.testing.assert_array_equal(add(x, np.zeros_like(x)), x)
    np.testing.assert_array_equal(add(x, -x), 0)


def test_inputs_are_left_as_they_were():
    x, y = np.ones((1, 2)), np.ones((1, 2))
    add(x, y)[:] = 7
    np.testing.assert_array_equal([x, y], 1)
