import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import llm_int8
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, roundoff

GOLDENS = read_golden("quantizers/bitsandbytes")
U32 = roundoff(np.float32)
OVERFLOW = 127 / 2.0**127  # for smaller a, 127 / a may be infinite

weights = st.builds(
    Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 127)
)
moderate = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-10, 4))


@pytest.mark.parametrize("case", sorted(name for name, tensor in GOLDENS["tensors"].items() if "int8" in tensor))
def test_rows_are_those_of_bitsandbytes(case):
    kind, seed, exponent = case.split()
    w = Weights(kind, int(seed), int(exponent))(*GOLDENS["shape"])
    q = llm_int8.quantize(w)
    codes, tops = (base64.b64decode(GOLDENS["tensors"][case]["int8"][name]) for name in ("codes", "tops"))
    np.testing.assert_array_equal(q.codes.ravel(), np.frombuffer(codes, np.int8))
    np.testing.assert_array_equal(q.scales.ravel(), np.frombuffer(tops, "<f4"))


@given(weights=weights)
def test_the_error_is_bounded(weights):
    w = weights(2, 32)
    q = llm_int8.quantize(w)
    a = q.scales.astype(np.float64)
    assert_within(llm_int8.dequantize(q), w, np.where(a < OVERFLOW, a, (1 / 2 + 256 * U32) * a / 127) + 0 * w)


@given(weights=weights)
def test_laws(weights):
    w = weights(2, 32)
    q = llm_int8.quantize(w)
    np.testing.assert_array_equal(llm_int8.quantize(-w).codes, -q.codes)
    if np.all((q.scales == 0) | (q.scales > OVERFLOW)):
        again = llm_int8.quantize(llm_int8.dequantize(q))
        np.testing.assert_array_equal(again.codes, q.codes)
        np.testing.assert_array_equal(again.scales, q.scales)
    if np.all((q.scales == 0) | (q.scales > 16 * OVERFLOW)):
        smaller = llm_int8.quantize(w / np.float32(8))
        np.testing.assert_array_equal(smaller.codes, q.codes)
        np.testing.assert_array_equal(smaller.scales, q.scales / 8)


@given(w=moderate, x=moderate, threshold=st.sampled_from([0.5, 6.0, np.inf]))
def test_the_error_of_a_product_is_bounded(w, x, threshold):
    w, x = w(3, 32), x(2, 32)
    q = llm_int8.quantize(w)
    outliers = np.any(np.abs(x) >= threshold, axis=0)
    inliers = np.where(outliers, 0, x).astype(np.float32)
    tokens = np.where(outliers, x, llm_int8.dequantize(llm_int8.quantize(inliers)))
    weights = llm_int8.dequantize(q)
    exact, size = linear(x, w.astype(np.float64)), linear(np.abs(x), np.abs(weights))
    moved = linear(np.abs(x), np.abs(weights - w)) + linear(np.abs(tokens - x), np.abs(weights))
    assert_within(llm_int8.linear(x, q, threshold=threshold), exact, moved + 4 * 40 * U * (size + np.abs(exact)))


def test_outliers_save_the_other_features():
    x, w = Weights("normal", seed=25)(8, 64), Weights("normal", seed=26)(8, 64)
    x[:, 3] *= 100
    q = llm_int8.quantize(w)
    exact = linear(x, llm_int8.dequantize(q))
    with_outliers, without = (
        np.sum((llm_int8.linear(x, q, threshold=t) - exact) ** 2) for t in (llm_int8.THRESHOLD, np.inf)
    )
    assert with_outliers < without / 100
    np.testing.assert_array_equal(llm_int8.linear(x, q, threshold=0.0), exact)  # all features are outliers


def test_zeros_and_refusals():
    q = llm_int8.quantize(np.zeros((2, 4)))
    np.testing.assert_array_equal(llm_int8.dequantize(q), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="must be finite"):
        llm_int8.quantize(np.array([[1.0, -np.inf]]))
