import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.argmax import argmax
from pallas_kernels.parts.compat import interpreter
from tests.strategies import DENORMAL, Noise, assert_within, dtypes, seeds
from verify.precision import TINY

settings = hypothesis.settings(max_examples=8, deadline=None)  # an interpreted call takes half a second
# Padded, one span, a span and a tail, several and a tail; a prime.
lengths = st.sampled_from([1, 127, 128, 129, 1024, 1025, 2047, 3079])


@given(seed=seeds, dtype=dtypes, length=lengths, values=st.sampled_from([2, 100]), low=st.booleans(), nan=st.booleans())
@settings
@example(0, np.dtype("float32"), 3079, 1, False, False)  # all equal
@example(0, np.dtype("float32"), 2047, 2, True, True)
def test_the_lowest_index_of_equals(seed, dtype, length, values, low, nan):
    """Draw few different values, so that many are equal; -inf and NaN count as in NumPy."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, values, (3, length)).astype(dtype)
    if low:
        x[0], x[1, : length // 2] = -np.inf, -np.inf
    if nan:
        x[2, rng.integers(0, length, 2)] = np.nan
    with interpreter():
        y = argmax(jnp.asarray(x))
    assert y.dtype == np.int32
    np.testing.assert_array_equal(np.asarray(y), np.argmax(x.astype(np.float32), axis=-1))


@pytest.mark.parametrize("place", [0, 1023, 1024, 2047, 2048, 2055])
def test_at_the_border_of_a_span(place):
    """2,056 logits: two spans of 1,024, and a tail that shares all but 8 with the second."""
    x = np.zeros((1, 2056), np.float32)
    x[0, place] = 1
    with interpreter():
        np.testing.assert_array_equal(np.asarray(argmax(jnp.asarray(x))), [place])


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
@pytest.mark.parametrize("noise", [Noise(0, exponent=DENORMAL), Noise(0, peak=True), Noise(0, exponent=14)])
def test_the_largest_of_scores_of_any_size(noise, dtype):
    """Denormals may all be taken for 0; an outlier and scores of some 2e4 either way are told apart."""
    x = noise(3, 1025, dtype=dtype)
    with interpreter():
        y = np.asarray(argmax(jnp.asarray(x)))
    x = x.astype(np.float64)
    chosen = np.take_along_axis(x, y[:, None], axis=-1)[:, 0]
    largest = x.max(axis=-1)
    assert_within(chosen, largest, np.where(np.abs(largest) < TINY, TINY, 0.0))


def test_bad_input():
    with pytest.raises(ValueError, match="argmax takes rows of at least one element, got shape \\[3, 0\\]"):
        argmax(jnp.ones((3, 0)))
