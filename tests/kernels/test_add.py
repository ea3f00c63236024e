import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.add import SPAN, add
from pallas_kernels.parts.compat import interpreter
from tests.strategies import DENORMAL, Noise, assert_within, dtypes, noises, roundoff
from verify.precision import TINY

settings = hypothesis.settings(max_examples=8, deadline=None)  # an interpreted call takes half a second
# Padded; one span; a span and a tail; several, and a tail.
shapes = st.sampled_from(
    [(1,), (127,), (128,), (129,), (3, 43), (SPAN - 1,), (SPAN,), (SPAN + 1,), (2, SPAN), (2, 3, 701)]
)


@given(noise=noises, dtype=dtypes, shape=shapes)
@settings
@example(Noise(0), np.dtype(jnp.bfloat16), (2 * SPAN + 8,))
@example(Noise(0, peak=True), np.dtype(jnp.bfloat16), (129,))
def test_add_is_float32_addition_rounded_once(noise, dtype, shape):
    x, y = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype)
    with interpreter():
        z = add(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_array_equal(np.asarray(z), (x.astype(np.float32) + y.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
def test_denormals_are_added_or_taken_for_0(dtype):
    """Any of the three numbers below `TINY` may be taken for 0; the result is rounded once."""
    noise = Noise(0, exponent=DENORMAL)
    x, y = noise(129, dtype=dtype), noise(129, dtype=dtype)
    with interpreter():
        z = add(jnp.asarray(x), jnp.asarray(y))
    x, y = x.astype(np.float64), y.astype(np.float64)
    small = sum((np.abs(a) < TINY) * np.abs(a) for a in (x, y, x + y))
    assert_within(z, x + y, small + roundoff(dtype) * (np.abs(x + y) + small))


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"add takes two arrays alike, got \[2, 3\] float32 and \[3\] float32"):
        add(x, x[0])
    with pytest.raises(ValueError, match=r"float32 and .* bfloat16"):
        add(x, x.astype(jnp.bfloat16))
