import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.softmax import MAX_SCORES, REGISTER_SCORES, softmax
from llamaspec.reference.softmax import softmax as exact_softmax
from llamaspec.verify.bounds.running_error import ELEMENTARY, TINY, gamma
from tests.support.strategies import Noise, assert_within, at_extremes, dtypes, noises, roundoff, share_of

FLOAT32, BFLOAT16 = np.dtype("float32"), np.dtype(jnp.bfloat16)
U = roundoff(FLOAT32)
settings = hypothesis.settings(max_examples=share_of(5), deadline=None)  # an interpreted call takes half a second
# Lengths that need padding, fill one span, leave a tail, are odd, or are so long that two kernels run.
lengths = st.sampled_from([1, 127, 128, 129, 1021, 1024, REGISTER_SCORES + 8, 9 * 1024, 9001])
hidden = st.sampled_from(["nothing", "some", "the first half", "all but one", "all"])


def drawn(noise: Noise, rows: int, length: int, dtype, hidden: str) -> np.ndarray:
    """Draw scores [rows, length], and set some scores of the first row to -inf; `hidden` says which."""
    x = noise(rows, length, dtype=dtype)
    match hidden:
        case "some":
            x[0, noise.rng.random(length) < 0.5] = -np.inf
        case "the first half":
            x[0, : length // 2] = -np.inf
        case "all but one":
            x[0, : length - 1] = -np.inf
        case "all":
            x[0] = -np.inf
    return x


def spread(x: np.ndarray) -> np.ndarray:
    """Return the largest minus the smallest finite score of each row, [rows, 1]."""
    seen = np.isfinite(x)
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    return np.maximum(top - np.min(x, axis=-1, keepdims=True, initial=np.inf, where=seen), 0)


def sum_error(x: np.ndarray) -> np.ndarray:
    """Bound the relative error of each row's sum of exp(x_j - maximum), [rows, 1].

    The kernel cuts a row into spans, subtracts each span's own maximum, and rescales the span's sum to the row's
    maximum. So two exponentials enter for each score. Each exponent is rounded by at most u times its size, and the
    sizes of the two exponents add up to at most the row's spread. The other errors are those of two exponentials, of
    their product, and of a sum of n terms.
    """
    return np.expm1(2 * U * spread(x) + 2 * ELEMENTARY + gamma(x.shape[-1] + 1))


@given(noise=noises, dtype=dtypes, length=lengths, hidden=hidden)
@settings
@example(Noise(0, exponent=13), FLOAT32, 9001, "some")  # scores near 2e4 in magnitude
@example(Noise(0, outliers=True), BFLOAT16, REGISTER_SCORES + 8, "all")
@example(Noise(0), FLOAT32, 129, "all but one")
@at_extremes(dtype=FLOAT32, length=129, hidden="some")
@at_extremes(dtype=BFLOAT16, length=REGISTER_SCORES + 8, hidden="the first half")
def test_softmax(noise, dtype, length, hidden):
    x = drawn(noise, 2, length, dtype, hidden)
    with interpreter():
        p = softmax(jnp.asarray(x))
    assert p.dtype == dtype
    x = x.astype(np.float64)
    exact = exact_softmax(x)
    # Rounding of the numerator's exponent, its exponential, 1 / sum and the product; a subnormal probability may be 0.
    off = np.exp(U * spread(x) + 2 * ELEMENTARY + U) / (1 - sum_error(x))
    unit = 0.0 if dtype == FLOAT32 else roundoff(dtype)
    assert_within(p, exact, exact * (off * (1 + unit) - 1) + 2 * TINY)
    np.testing.assert_array_equal(np.asarray(p)[np.isneginf(x)], 0)


def test_rows_are_independent():
    x = Noise(0)(3, 9001)
    x[0] = np.nan
    with interpreter():
        p = softmax(jnp.asarray(x))
        part = softmax(jnp.asarray(x[1:]))
    assert np.isnan(p[0]).all()
    np.testing.assert_array_equal(np.asarray(p)[1:], np.asarray(part))


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    with pytest.raises(ValueError, match=r"softmax.*1048576.*1048577"):
        softmax(jnp.ones((1, MAX_SCORES + 1)))
    with pytest.raises(ValueError, match=r"softmax.*float32.*bfloat16.*int32"):
        softmax(jnp.ones((1, 128), jnp.int32))
