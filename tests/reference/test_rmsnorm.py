import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.rmsnorm import rmsnorm
from tests.support.strategies import U, assert_within, dtypes, noises, sizes

dims = sizes(8)


@given(noise=noises, dim=dims, power=st.integers(-20, 20))
def test_scale_of_the_input_does_not_matter(noise, dim, power):
    x, weight = noise(3, dim), noise(dim)
    once = rmsnorm(x, weight, eps=0.5)
    again = rmsnorm(x * 2.0**power, weight, eps=0.5 * 4.0**power)
    np.testing.assert_array_equal(once, again)  # exact, since powers of two do not round


@given(noise=noises, dim=dims)
def test_mean_square_becomes_one(noise, dim):
    noise.blank = False
    y = rmsnorm(noise(3, dim), np.ones(dim), eps=0.0)
    # Half of the n roundings of the sum of squares, and four more; the square doubles all of them.
    assert_within(np.mean(y**2, axis=-1), np.ones(3), (2 * dim + 8) * U)


@given(noise=noises, dim=dims, eps=st.sampled_from([0.0, 1e-6, 1e-5, 0.5]))
def test_definition(noise, dim, eps):
    noise.blank = False  # a blank row with eps 0 gives 0 / 0
    x, weight = noise(dim), noise(dim)
    root = math.sqrt(math.fsum(float(a) ** 2 for a in x) / dim + eps)
    exact = np.array([float(g) * float(a) / root for a, g in zip(x, weight, strict=True)])
    assert_within(rmsnorm(x, weight, eps=eps), exact, np.abs(exact) * (dim / 2 + 12) * U)


def test_eps_is_inside_the_root():
    # The mean square is 25, and adding eps = 11 gives 36.
    np.testing.assert_array_equal(rmsnorm(np.array([1.0, 7.0]), np.array([6.0, 12.0]), eps=11.0), [1.0, 14.0])


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_zero_stays_zero(eps):
    np.testing.assert_array_equal(rmsnorm(np.zeros((2, 3)), np.ones(3), eps=eps), np.zeros((2, 3)))


def test_mean_is_not_subtracted():
    np.testing.assert_array_equal(rmsnorm(np.full(4, 3.0), np.ones(4), eps=0.0), np.ones(4))


@given(noise=noises, dim=dims, dtype=dtypes)
def test_computes_in_float64_whatever_the_inputs(noise, dim, dtype):
    x, weight = noise(2, 3, dim, dtype=dtype), noise(dim, dtype=dtype)
    y = rmsnorm(x, weight, eps=1e-5)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, rmsnorm(x.astype(np.float64), weight.astype(np.float64), eps=1e-5))


@given(noise=noises, dim=dims)
def test_rows_are_independent(noise, dim):
    x, weight = noise(2, 3, dim), noise(dim)
    y = rmsnorm(x, weight, eps=1e-5)
    for row in np.ndindex(2, 3):
        np.testing.assert_array_equal(y[row], rmsnorm(x[row], weight, eps=1e-5))
