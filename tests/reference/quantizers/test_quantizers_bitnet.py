"""Quantizers with one and two bits per weight: the signs of XNOR-Net and the trits of BitNet."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import binary, bitnet
from tests.goldens.quantizers.make_methods import inputs
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within, roundoff

GOLDENS = read_golden("quantizers/methods")["bitnet"]
U32 = roundoff(np.float32)

weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 40))


def test_weights_and_tokens_are_those_of_transformers():
    w, x = Weights("student", seed=21)(8, 16), inputs(3, 16)
    # transformers sums in float32, and divides by 1 / b where we multiply by b.
    exact = bitnet.dequantize(bitnet.quantize(w))
    assert_within(np.array(GOLDENS["weights"]), exact, (w.size + 4) * U32 * np.abs(exact))
    exact = bitnet.dequantize(bitnet.quantize_tokens(x))
    assert_within(np.array(GOLDENS["tokens"]), exact, 4 * U32 * np.abs(exact))


def test_packing_is_that_of_transformers():
    codes = np.array(GOLDENS["codes"], np.int8)
    np.testing.assert_array_equal(bitnet.pack(codes), GOLDENS["packed"])
    np.testing.assert_array_equal(bitnet.unpack(bitnet.pack(codes)), codes)
    every = np.arange(256, dtype=np.uint8).reshape(2, 128)
    np.testing.assert_array_equal(bitnet.pack(bitnet.unpack(every)), every)
    with pytest.raises(ValueError, match=r"multiple of 4\b.*\b6\b"):
        bitnet.pack(np.zeros((6, 2), np.int8))


@given(weights=weights)
def test_the_error_of_trits_is_bounded(weights):
    w = weights(4, 16)
    q = bitnet.quantize(w)
    b = q.scales.astype(np.float64)
    size = np.abs(w.astype(np.float64))
    assert_within(bitnet.dequantize(q), w, np.where(size <= 1.5 * b, (1 / 2 + 4 * U32) * b, size - b))
    np.testing.assert_array_equal(bitnet.quantize(-w).codes, -q.codes)
    mean = np.mean(size)
    assert_within(q.scales, np.full((1, 1), max(mean, 1e-5)), 2 * U32 * max(mean, 1e-5))


@given(weights=weights)
def test_the_error_of_tokens_is_bounded(weights):
    x = weights(4, 16)
    q = bitnet.quantize_tokens(x)
    assert_within(bitnet.dequantize(q), x, (1 / 2 + 512 * U32) * q.scales.astype(np.float64))


def test_no_scale_of_a_token_moves_when_it_is_quantized_again():
    """Requantizing a token keeps its scale: fl(fl(127 s) / 127) = s for s = fl(a / 127), for all float32 a in [1, 2).

    Scaling a by powers of two extends this to all normal numbers.
    """
    tops = np.arange(2**23, dtype=np.uint32)
    tops = (tops | np.float32(1).view(np.uint32)).view(np.float32)
    scales = tops / np.float32(127)
    np.testing.assert_array_equal(scales * np.float32(127) / np.float32(127), scales)


@given(w=weights, x=weights)
def test_the_product_of_integers_is_that_of_what_they_stand_for(w, x):
    w, x = w(3, 16), x(2, 16)
    q, tokens = bitnet.quantize(w), bitnet.dequantize(bitnet.quantize_tokens(x))
    exact = linear(tokens, bitnet.dequantize(q))
    size = linear(np.abs(tokens), np.abs(bitnet.dequantize(q)))
    assert_within(bitnet.linear(x, q), exact, 2 * (16 + 4) * U * size)


@given(weights=weights)
def test_no_sign_and_no_scale_is_better_than_xnor(weights):
    w = weights(2, 9)
    q = binary.quantize(w)
    n, a = 9, q.scales[:, 0].astype(np.float64)
    exact = np.sum(w.astype(np.float64) ** 2, axis=-1)
    loss = np.sum((binary.dequantize(q) - w) ** 2, axis=-1)
    # a is rounded to float32, which changes the loss by the square of that rounding; float64 rounds the squares and the
    # sums.
    rounding = n * (U32 * a + 2.0**-150) ** 2 + 8 * n * U * exact
    assert_within(loss, exact - n * a**2, 2 * n * a * (U32 * a + 2.0**-150) + rounding)
    for factor in (0.5, 0.99, 1.01, 2.0):
        other_loss = np.sum((factor * binary.dequantize(q) - w) ** 2, axis=-1)
        assert np.all(loss <= other_loss + rounding)
    flipped = q.codes.copy()
    flipped[:, 0] *= -1
    assert np.all(loss <= np.sum((binary.dequantize(q._replace(codes=flipped)) - w) ** 2, axis=-1) + rounding)


@given(weights=weights)
def test_laws_of_xnor(weights):
    w = weights(2, 16)
    q = binary.quantize(w)
    np.testing.assert_array_equal(q.codes[w == 0], 1)
    if np.all(w != 0):
        np.testing.assert_array_equal(binary.quantize(-w).codes, -q.codes)
    if np.all((w == 0) | (np.abs(w) > 2.0**-120)):
        smaller = binary.quantize(w / np.float32(8))
        np.testing.assert_array_equal(smaller.codes, q.codes)
        np.testing.assert_array_equal(smaller.scales, q.scales / 8)
    np.testing.assert_array_equal(binary.unpack(binary.pack(q.codes)), q.codes)
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(binary.pack(binary.unpack(every)), every)


@pytest.mark.parametrize("quantize", [binary.quantize, bitnet.quantize, bitnet.quantize_tokens])
def test_what_is_not_finite_is_refused(quantize):
    with pytest.raises(ValueError, match="must be finite"):
        quantize(np.array([[np.nan, 1.0]]))


@pytest.mark.parametrize("quantize", [bitnet.quantize, bitnet.quantize_tokens])
def test_zeros_stay_zero(quantize):
    np.testing.assert_array_equal(bitnet.dequantize(quantize(np.zeros((4, 8)))), np.zeros((4, 8)))
    np.testing.assert_array_equal(binary.dequantize(binary.quantize(np.zeros((4, 8)))), np.zeros((4, 8)))
