"""Fixed-point vectors for products with integer codes: which rounding errors are allowed."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.fixed_point import BITS, fixed_point
from llamaspec.verify.bounds.precision import TINY
from tests.support.strategies import Noise, noises

PLACES = 256.0 ** np.arange(3)


def digits_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert numbers [groups, lanes, 8] to fixed-point digits [groups, lanes, 3, 8] and units [groups]."""
    digits, units = fixed_point(jnp.asarray(x), None, None, Target(interpret=True))
    return np.asarray(digits), np.asarray(units)


def value(digits: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.einsum("gldv,d,g->glv", digits.astype(np.float64), PLACES, units.astype(np.float64))


@given(noise=noises)
@example(noise=Noise(0, outliers=True))
@example(noise=Noise(0, exponent=-126))
@example(noise=Noise(0, exponent=120))
def test_fixed_point_errors_are_relative_to_the_groups_maximum(noise):
    x = noise(3, 4, 8)
    largest = np.max(np.abs(x.astype(np.float64)), axis=(1, 2), keepdims=True)
    off = np.abs(value(*digits_of(x)) - x)
    assert np.all(off <= np.maximum(largest * 2.0 ** -(BITS + 1), TINY))


def test_integers_convert_exactly():
    """If the largest number of a group gives a step of 1, every integer below 2^21 in magnitude converts exactly."""
    integers = np.arange(-(2**21) + 1, 2**21, dtype=np.float32)
    x = np.concatenate([integers, [0]]).reshape(1, -1, 8)
    x[0, -1, -1] = 2**21 - 1
    digits, units = digits_of(x)
    assert units == 1
    np.testing.assert_array_equal(value(digits, units), x)
    magnitudes = np.abs(digits.astype(int)).transpose(0, 1, 3, 2) @ PLACES.astype(int)
    assert np.max(magnitudes[x != 0] / np.abs(x[x != 0])) <= 3.02


def test_the_largest_may_be_rounded_up_to_a_power_of_two():
    x = np.full((1, 1, 8), np.nextafter(np.float32(2), np.float32(0)), np.float32)
    np.testing.assert_array_equal(value(*digits_of(x)), np.full((1, 1, 8), 2.0))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nonfinite_numbers_affect_only_their_group(special):
    x = Noise(0)(2, 4, 8)
    x[1, 2, 3] = special
    _, units = digits_of(x)
    np.testing.assert_array_equal(np.isnan(units), [False, True])


def test_zeros_are_zeros():
    digits, units = digits_of(np.zeros((1, 1, 8), np.float32))
    np.testing.assert_array_equal(digits, np.zeros((1, 1, 3, 8)))
    assert np.isfinite(units).all()
