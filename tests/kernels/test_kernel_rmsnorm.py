import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.rmsnorm import rmsnorm
from llamaspec.verify.bounds.running_error import TINY, exactly, normalized, rounded
from tests.support.strategies import Noise, assert_within, at_extremes, dtypes, noises, roundoff, share_of

EPS = 1e-5
FLOAT32, BFLOAT16 = np.dtype("float32"), np.dtype(jnp.bfloat16)
settings = hypothesis.settings(max_examples=share_of(5), deadline=None)  # an interpreted call takes half a second
# Lengths that need padding, fill one span, leave a tail, are prime, or give a thread several vectors.
dims = st.sampled_from([1, 127, 128, 129, 255, 256, 288, 1021, 1024, 1032])


def check(y, x, weight):
    unit = 0.0 if x.dtype == FLOAT32 else roundoff(x.dtype)
    bound = rounded(normalized(exactly(x), exactly(weight).value, eps=EPS), unit)
    # A subnormal number may be flushed to 0, as an input and as a result.
    flushed = TINY * (np.abs(exactly(weight).value) / np.sqrt(EPS) + 1)
    assert y.dtype == x.dtype
    assert_within(y, bound.value, bound.error + flushed)


@given(noise=noises, dtype=dtypes, rows=st.integers(1, 3), dim=dims)
@settings
@example(Noise(0, outliers=True), BFLOAT16, 1, 1032)
@at_extremes(dtype=FLOAT32, rows=2, dim=129)
@at_extremes(dtype=BFLOAT16, rows=1, dim=1032)
@example(Noise(0), BFLOAT16, 1, 8200)  # wide enough that the weight is loaded late
def test_rmsnorm(noise, dtype, rows, dim):
    x, weight = noise(rows, dim, dtype=dtype), Noise(noise.seed + 1)(dim, dtype=dtype)  # a weight of usual size
    with interpreter():
        y = rmsnorm(jnp.asarray(x), jnp.asarray(weight), eps=EPS)
    check(y, x, weight)


def test_rows_are_independent():
    x = Noise(0)(2, 2, 129)
    x[0], x[1, 0] = np.nan, np.inf
    with interpreter():
        y = rmsnorm(jnp.asarray(x), jnp.ones(129), eps=EPS)
    assert np.isnan(y[0]).all()
    check(y[1, 1], x[1, 1], np.ones(129, np.float32))


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    x, weight = jnp.ones((2, 128)), jnp.ones(128)
    with pytest.raises(ValueError, match=r"rmsnorm.*weight \[128\].*float32.*\[64\]"):
        rmsnorm(x, weight[:64], eps=EPS)
    with pytest.raises(ValueError, match=r"rmsnorm.*weight.*float32.*bfloat16"):
        rmsnorm(x, weight.astype(jnp.bfloat16), eps=EPS)
    with pytest.raises(ValueError, match=r"rmsnorm.*8192.*8193"):
        rmsnorm(jnp.ones((1, 8193)), jnp.ones(8193), eps=EPS)
