import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.add import SPAN, add
from pallas_kernels.compat import interpreter
from tests.strategies import Noise, dtypes, noises

settings = hypothesis.settings(max_examples=8, deadline=None)  # a call of the interpreter takes half a second
# Padded; one span; a span and a tail; several, and a tail.
shapes = st.sampled_from(
    [(1,), (127,), (128,), (129,), (3, 43), (SPAN - 1,), (SPAN,), (SPAN + 1,), (2, SPAN), (2, 3, 701)]
)


@given(noise=noises, dtype=dtypes, shape=shapes)
@settings
@example(Noise(0), np.dtype(jnp.bfloat16), (2 * SPAN + 8,))
def test_add_is_float32_addition_rounded_once(noise, dtype, shape):
    x, y = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype)
    with interpreter():
        z = add(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_array_equal(np.asarray(z), (x.astype(np.float32) + y.astype(np.float32)).astype(dtype))


def test_bad_input():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"add takes two arrays alike, got \[2, 3\] float32 and \[3\] float32"):
        add(x, x[0])
    with pytest.raises(ValueError, match=r"float32 and .* bfloat16"):
        add(x, x.astype(jnp.bfloat16))
