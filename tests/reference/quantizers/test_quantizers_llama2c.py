import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import llama2c, symmetric
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.goldens import read_golden
from tests.support.strategies import assert_within, roundoff

GOLDENS = read_golden("quantizers/llama2c")
U32 = roundoff(np.float32)

weights = st.builds(
    Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 127)
)
groups = st.sampled_from([1, 4, 32, 64])


@pytest.mark.parametrize("case", sorted(GOLDENS["tensors"]))
def test_groups_are_those_of_llama2c(case):
    kind, seed, exponent = case.split(", ")
    w = Weights(kind, int(seed), int(exponent))(*GOLDENS["shape"])
    q = llama2c.quantize(w, group=GOLDENS["group"])
    codes, scales = (base64.b64decode(GOLDENS["tensors"][case][name]) for name in ("codes", "scales"))
    assert llama2c.pack(q).tobytes() == codes + scales


@given(weights=weights, group=groups)
def test_the_error_is_bounded(weights, group):
    w = weights(2, 64)
    q = llama2c.quantize(w, group=group)
    steps = np.repeat(q.scales.astype(np.float64), group).reshape(w.shape)
    assert_within(llama2c.dequantize(q), w, (1 / 2 + 256 * U32) * steps + 64 * 2.0**-149)


def test_the_error_is_bounded_for_every_small_denormal():
    tops = np.arange(1, 4097)[:, None]
    w = (np.floor(tops * np.array([1, -1, 0.5, 0.25, -0.7, 0.99])) * 2.0**-149).astype(np.float32)
    q = llama2c.quantize(w, group=6)
    error = np.abs(llama2c.dequantize(q) - w)
    assert_within(error, 0 * error, (1 / 2 + 256 * U32) * q.scales[:, None].astype(np.float64) + 64 * 2.0**-149)
    assert np.max(error[q.scales == 0]) == 63 * 2.0**-149


@given(weights=weights, group=groups)
def test_laws(weights, group):
    w = weights(2, 64) / np.float32(2)
    q = llama2c.quantize(w, group=group)
    np.testing.assert_array_equal(llama2c.quantize(-w, group=group).codes, -q.codes)
    if np.all((q.scales == 0) | (q.scales > 2.0**-126)):
        again = llama2c.quantize(llama2c.dequantize(q), group=group)
        np.testing.assert_array_equal(again.codes, q.codes)
        np.testing.assert_array_equal(again.scales, q.scales)
    if np.all((q.scales == 0) | (q.scales > 2.0**-120)):
        smaller = llama2c.quantize(w / np.float32(8), group=group)
        np.testing.assert_array_equal(smaller.codes, q.codes)
        np.testing.assert_array_equal(smaller.scales, q.scales / 8)


@given(weights=weights)
def test_like_symmetric_but_for_near_ties(weights):
    w = weights(2, 64)
    expected, actual = symmetric.quantize(w, bits=8, block=(1, 64)), llama2c.quantize(w, group=64)
    np.testing.assert_array_equal(actual.scales, expected.scales.ravel())
    x = w / np.where(expected.scales == 0, 1, expected.scales).astype(np.float64)
    near = np.abs(np.abs(x - np.trunc(x)) - 0.5) <= U32 * np.abs(x)
    np.testing.assert_array_equal(actual.codes[~near], expected.codes[~near])
    assert np.all(np.abs(actual.codes.astype(int) - expected.codes)[near] <= 1)


@pytest.mark.parametrize(
    ("widths", "group"), [((64,), 64), ((288,), 32), ((64, 172), 4), ((512, 1376), 32), ((7,), 1), ((4096, 11008), 64)]
)
def test_group_size(widths, group):
    assert llama2c.group_size(*widths) == group


@given(weights=weights, group=groups)
def test_packing_keeps_everything(weights, group):
    q = llama2c.quantize(weights(2, 64), group=group)
    again = llama2c.unpack(llama2c.pack(q), shape=(2, 64), group=group)
    for before, after in zip(q, again, strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.dtype == after.dtype


def test_refusals():
    with pytest.raises(ValueError, match="must be finite"):
        llama2c.quantize(np.array([np.nan, 1.0]), group=2)
    with pytest.raises(ValueError, match=r"\b172\b.*\b64\b"):
        llama2c.quantize(np.zeros(172), group=64)
    with pytest.raises(ValueError, match=r"\b79 bytes.*\(2, 32\).*\b16\b"):
        llama2c.unpack(np.zeros(79, np.uint8), shape=(2, 32), group=16)
    with pytest.raises(ValueError, match=r"\b72 bytes.*\(2, 32\).*\b24\b"):
        llama2c.unpack(np.zeros(72, np.uint8), shape=(2, 32), group=24)
