import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from tests.support.strategies import U, assert_within, dtypes, noises, seeds, sizes

lengths = sizes(4)


def magnitude(x, weight):
    """Compute sum |x_i| |w_i| for each dot product. Its error bound is a multiple of this magnitude."""
    return linear(np.abs(x), np.abs(weight))


@given(seed=seeds, rows=lengths, cols=lengths)
def test_integers_are_exact(seed, rows, cols):
    random = np.random.default_rng(seed)
    x, weight, bias = (random.integers(-(2**20), 2**20, size) for size in [(3, cols), (rows, cols), (rows,)])
    exact = [
        [
            sum(a * w for a, w in zip(xs, ws, strict=True)) + b
            for ws, b in zip(weight.tolist(), bias.tolist(), strict=True)
        ]
        for xs in x.tolist()
    ]
    y = linear(x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64))
    np.testing.assert_array_equal(y, exact)


@given(noise=noises, rows=lengths, cols=lengths, power=st.integers(-20, 20))
def test_linear_in_x(noise, rows, cols, power):
    x, y, weight = noise(2, cols), noise(2, cols), noise(rows, cols)
    np.testing.assert_array_equal(linear(x * 2.0**power, weight), linear(x, weight) * 2.0**power)
    product = linear(x.astype(np.float64) + y, weight)
    size = magnitude(x, weight) + magnitude(y, weight)
    assert_within(product, linear(x, weight) + linear(y, weight), 2 * (cols + 1) * U * size)


@given(noise=noises, rows=lengths, cols=lengths)
def test_bias_is_added_to_every_row(noise, rows, cols):
    x, weight, bias = noise(2, 3, cols), noise(rows, cols), noise(rows)
    np.testing.assert_array_equal(linear(x, weight, bias), linear(x, weight) + bias)
    np.testing.assert_array_equal(linear(np.zeros((2, cols)), weight, bias), np.stack([bias, bias]))


@given(rows=lengths, cols=lengths, noise=noises)
def test_unit_vectors_give_the_columns(rows, cols, noise):
    weight = noise(rows, cols)
    np.testing.assert_array_equal(linear(np.eye(cols), weight), weight.T)


@given(noise=noises, rows=lengths, cols=lengths, dtype=dtypes)
def test_each_vector_alone(noise, rows, cols, dtype):
    x, weight, bias = noise(2, 3, cols, dtype=dtype), noise(rows, cols, dtype=dtype), noise(rows, dtype=dtype)
    y = linear(x, weight, bias)
    assert y.dtype == np.float64
    for row in np.ndindex(2, 3):
        size = magnitude(x[row], weight) + np.abs(bias)
        assert_within(y[row], linear(x[row].astype(np.float64), weight, bias), 2 * (cols + 1) * U * size)
