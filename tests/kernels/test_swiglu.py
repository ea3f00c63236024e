import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.parts.compat import interpreter
from pallas_kernels.swiglu import SPAN, swiglu
from reference.swiglu import swiglu as exact_swiglu
from tests.strategies import Noise, assert_within, at_extremes, dtypes, noises, roundoff
from verify.running_error import ELEMENTARY, TINY, gamma

settings = hypothesis.settings(max_examples=8, deadline=None)  # an interpreted call takes half a second
# Padded; one span; a span and a tail; several, and a tail.
widths = st.sampled_from([1, 127, 128, 129, 172, SPAN - 1, SPAN, SPAN + 8, 2 * SPAN, 2 * SPAN + 1])


@given(noise=noises, dtype=dtypes, rows=st.integers(1, 3), ffn=widths)
@settings
@example(Noise(0, exponent=12), np.dtype("float32"), 2, 2 * SPAN + 1)  # gates of -88 and below, where exp overflows
@example(Noise(0), np.dtype(jnp.bfloat16), 1, SPAN + 8)
@at_extremes(dtype=np.dtype("float32"), rows=2, ffn=129)
@at_extremes(dtype=np.dtype(jnp.bfloat16), rows=1, ffn=128)
def test_swiglu(noise, dtype, rows, ffn):
    gate, up = noise(rows, ffn, dtype=dtype), noise(rows, ffn, dtype=dtype)
    with interpreter():
        y = swiglu(jnp.concatenate([jnp.asarray(gate), jnp.asarray(up)], axis=-1))
    assert y.dtype == dtype
    exact = exact_swiglu(gate, up)
    # The exponential, 1 + it, the quotient (which is not rounded correctly on a GPU), the product.
    off = (1 + ELEMENTARY) ** 2 * (1 + gamma(2)) * (1 + (0 if dtype == np.float32 else roundoff(dtype))) - 1
    # Where exp overflows, at gates below -88, the exact value is small, but not 0.
    size = np.abs(gate.astype(np.float64)) * np.abs(up.astype(np.float64))
    assert_within(y, exact, off * np.abs(exact) + TINY * (size + 1))


def test_bad_input():
    with pytest.raises(ValueError, match="swiglu takes rows of gate and up side by side, got an odd length of 3"):
        swiglu(jnp.ones((2, 3)))
