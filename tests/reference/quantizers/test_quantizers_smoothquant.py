import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import smoothquant, symmetric
from llamaspec.reference.rmsnorm import rmsnorm
from tests.goldens.quantizers.make_methods import inputs
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, roundoff

GOLDENS = read_golden("quantizers/methods")["smoothquant"]
U32 = roundoff(np.float32)

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 20))
alphas = st.sampled_from([0.0, 0.25, 0.5, 0.85, 1.0])


@pytest.mark.parametrize("alpha", sorted(GOLDENS["factors"]))
def test_factors_are_those_of_torchao(alpha):
    """Smoothing factors equal torchao's, which adds 2^-23 to both maxima and computes in float32."""
    x, w = inputs(GOLDENS["tokens"], GOLDENS["cols"]), Weights("normal", seed=20)(GOLDENS["rows"], GOLDENS["cols"])
    x_tops, w_tops = np.max(np.abs(x), axis=0), np.max(np.abs(w), axis=0)
    s = smoothquant.factors(x_tops, w, alpha=float(alpha))
    relative = 2 * U32 / x_tops + 2 * U32 / w_tops + 16 * U32
    assert_within(np.array(GOLDENS["factors"][alpha]), s, s * relative)


@given(w=weights, x=weights, norm=weights, alpha=alphas)
def test_the_product_stays_the_same(w, x, norm, alpha):
    w, x, norm = w(3, 8), x(4, 8), norm(8)
    inner = rmsnorm(x, norm, eps=1e-5)
    s = smoothquant.factors(np.max(np.abs(inner), axis=0), w, alpha=alpha)
    assert np.all(s > 0)
    folded = rmsnorm(x, smoothquant.fold(norm, s), eps=1e-5)
    size = linear(np.abs(inner), np.abs(w))
    # n + 1 roundings of a product of n terms on each side, and of s W, norm / s and the product with the norm.
    bound = (2 * 8 + 8) * U * size + 2.0**-1000
    assert_within(linear(folded, smoothquant.smooth(w, s)), linear(inner, w), bound)


@given(w=weights, x=weights)
def test_at_one_half_both_sides_are_equally_hard(w, x):
    w, x = w(3, 8), x(4, 8)
    x_tops, w_tops = np.max(np.abs(x.astype(np.float64)), axis=0), np.max(np.abs(w.astype(np.float64)), axis=0)
    s = smoothquant.factors(x_tops, w, alpha=0.5)
    alive = (x_tops > 0) & (w_tops > 0)
    harder = np.sqrt(x_tops * w_tops)
    assert_within((x_tops / s)[alive], harder[alive], 8 * U * harder[alive])
    assert_within((w_tops * s)[alive], harder[alive], 8 * U * harder[alive])
    np.testing.assert_array_equal(s[~alive], 1)


@given(w=weights, x=weights, power=st.integers(-20, 20), alpha=alphas)
def test_laws(w, x, power, alpha):
    w, x_tops, factor = w(3, 8), np.max(np.abs(x(4, 8).astype(np.float64)), axis=0), 2.0**power
    s = smoothquant.factors(x_tops, w, alpha=alpha)
    np.testing.assert_array_equal(smoothquant.factors(x_tops, -w, alpha=alpha), s)
    alive = (x_tops > 0) & np.any(w != 0, axis=0)
    scaled = smoothquant.factors(x_tops * factor, w.astype(np.float64) * factor, alpha=alpha)
    exact = s[alive] * factor ** (2 * alpha - 1)
    assert_within(scaled[alive], exact, 16 * U * exact)
    half = smoothquant.factors(x_tops, w, alpha=0.5)
    again = smoothquant.factors(x_tops / half, smoothquant.smooth(w, half), alpha=0.5)
    assert_within(again, np.ones(8), 16 * U)


@given(w=weights, x=weights)
def test_the_ends(w, x):
    """With alpha 1, factors are the activations' maxima; with alpha 0, one over the weights' maxima."""
    w, x_tops = np.abs(w(3, 8)) + np.float32(1), np.abs(x(8)) + np.float32(1)
    w_tops = np.max(w.astype(np.float64), axis=0)
    np.testing.assert_array_equal(smoothquant.factors(x_tops, w, alpha=1.0), x_tops.astype(np.float64))
    np.testing.assert_array_equal(smoothquant.factors(x_tops, w, alpha=0.0), 1 / w_tops)


def test_w8a8_gains():
    """SmoothQuant reduces the error of W8A8 if some features are 64 times larger and tokens have one scale each."""
    x, w = Weights("normal", seed=27)(32, 64), Weights("normal", seed=28)(16, 64)
    x[:, ::16] *= 64
    exact = linear(x, w)

    def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        x, w = (symmetric.dequantize(symmetric.quantize(a, bits=8, block=(1, 64))) for a in (x, w))
        return linear(x, w)

    s = smoothquant.factors(np.max(np.abs(x), axis=0), w, alpha=0.5)
    plain, smoothed = product(x, w), product(x / s, smoothquant.smooth(w, s))
    assert np.sum((smoothed - exact) ** 2) < np.sum((plain - exact) ** 2) / 2


def test_refusals():
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        smoothquant.factors(np.ones(2), np.ones((1, 2)), alpha=1.5)
    with pytest.raises(ValueError, match="must be finite"):
        smoothquant.factors(np.array([1.0, np.inf]), np.ones((1, 2)), alpha=0.5)
