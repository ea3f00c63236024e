"""The table of quantization schemes, and the int8 KV cache."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import kv_cache
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.schemes import SCHEMES, scheme
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.strategies import U, assert_within, sizes

names = st.sampled_from(sorted(SCHEMES))


def draws(smallest: int, largest: int) -> st.SearchStrategy[Weights]:
    exponents = st.integers(smallest, largest)
    return st.builds(Weights, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), exponent=exponents)


weights = draws(-100, 100)
WORST = {  # largest error, divided by the largest weight of a group
    "q8": 1 / 254,
    "q8_row": 1 / 254,
    "q4": 1 / 14,
    "nf4": 0.152,
    "fp8": 2.0**-4,
    "mxfp4": 1 / 4,
}


def test_the_table():
    assert SCHEMES.keys() == WORST.keys()
    assert {name: s.group for name, s in SCHEMES.items()} == {
        "q8": 64,
        "q8_row": None,
        "q4": 64,
        "nf4": 64,
        "fp8": None,
        "mxfp4": 32,
    }


@given(name=names, weights=weights, rows=st.integers(1, 3), cols=sizes(64))
def test_a_row_of_any_length(name, weights, rows, cols):
    s = SCHEMES[name]
    w = weights(rows, cols)
    q = s.quantize(w)
    group = s.group or cols
    groups = -(-cols // group)
    assert q.codes.shape == w.shape and q.scales.shape == (rows, groups)
    assert np.isclose(s.bits_per_weight(cols) * cols, s.code_bits * cols + s.scale_bits * groups, rtol=4 * U)
    assert q.scales.dtype.itemsize * 8 == s.scale_bits
    tops = np.repeat(np.maximum.reduceat(np.abs(w), np.arange(0, cols, group), axis=-1), group, axis=-1)[:, :cols]
    assert_within(s.dequantize(q), w, WORST[name] * tops * (1 + 2.0**-20) + 2.0**-128)

    for start in range(0, cols, group):  # a group does not depend on other groups, or on the padding of a short one
        part = s.quantize(w[:, start : start + group])
        np.testing.assert_array_equal(part.codes, q.codes[:, start : start + group])
        np.testing.assert_array_equal(part.scales[:, 0], q.scales[:, start // group])
        np.testing.assert_array_equal(s.dequantize(part), s.dequantize(q)[:, start : start + group])


@given(name=names, weights=weights)
def test_quantized_weights_are_a_fixed_point(name, weights):
    s = SCHEMES[name]
    q = s.quantize(weights(2, 96) / np.float32(2))
    if weights.kind == "denormal":
        return
    again = s.quantize(s.dequantize(q))
    np.testing.assert_array_equal(s.dequantize(again), s.dequantize(q))


@given(name=names, weights=weights, experts=st.integers(1, 2))
def test_rows_may_be_stacked(name, weights, experts):
    s = SCHEMES[name]
    w = weights(experts, 2, 80)
    q = s.quantize(w)
    for expert in range(experts):
        single = s.quantize(w[expert])
        np.testing.assert_array_equal(single.codes, q.codes[expert])
        np.testing.assert_array_equal(single.scales, q.scales[expert])


@given(name=names, weights=weights)
def test_packing_keeps_everything(name, weights):
    s = SCHEMES[name]
    codes = s.quantize(weights(2, 96)).codes
    packed = s.pack(codes)
    assert packed.dtype == np.uint8 and packed.shape == (2, 96 * s.code_bits // 8)
    back = s.unpack(packed)
    np.testing.assert_array_equal(back, codes)
    assert back.dtype == codes.dtype
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(s.pack(s.unpack(every)), every)


def test_what_a_weight_costs():
    w = Weights("normal", seed=12)(64, 256)
    errors = {n: np.sqrt(np.mean((s.dequantize(s.quantize(w)) - w) ** 2) / np.mean(w**2)) for n, s in SCHEMES.items()}
    assert errors["q8"] < errors["q8_row"] < errors["fp8"] < errors["nf4"] < errors["q4"] < errors["mxfp4"]


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_refusals(name):
    with pytest.raises(ValueError, match="must be finite"):
        scheme(name).quantize(np.full((1, 64), np.nan))
    with pytest.raises(ValueError, match="has no weights"):
        scheme(name).quantize(np.zeros((0, 64)))


def test_an_unknown_scheme():
    with pytest.raises(ValueError, match=r"q5.*q8, q8_row, q4, nf4, fp8, mxfp4"):
        scheme("q5")


def step(q: Quantized) -> float:
    """Return half of the largest quantization step, plus the error of denormal scales."""
    return float(np.max(q.scales.astype(np.float64))) / 2 + 127 * 2.0**-150


@given(query=draws(-10, 3), key=draws(-10, 1), value=weights, keys=st.integers(1, 9))
def test_attention_over_a_quantized_cache(query, key, value, keys):
    heads, kv_heads, head_dim = 4, 2, 8
    q, k, v = query(1, heads, head_dim), key(keys, kv_heads, head_dim), value(keys, kv_heads, head_dim)
    k8, v8 = kv_cache.quantize(k), kv_cache.quantize(v)
    assert k8.scales.shape == (keys, kv_heads, 1)
    mask = causal_mask(1, keys, offset=keys - 1)
    exact = attention(q, k, v, mask)
    actual = attention(q, kv_cache.dequantize(k8), kv_cache.dequantize(v8), mask)
    e = step(k8) * np.sum(np.abs(q.astype(np.float64)), axis=-1, keepdims=True) / np.sqrt(head_dim)
    e = e + 64 * U * (1 + np.max(np.abs(k)) * np.sum(np.abs(q), axis=-1, keepdims=True))  # float64's own roundings
    with np.errstate(over="ignore"):
        bound = np.expm1(2 * e) * np.max(np.abs(v.astype(np.float64))) + step(v8)
    assert_within(actual, exact, np.minimum(bound, 1e300))


@given(query=draws(-10, 10), key=draws(-100, 100), keys=st.integers(1, 9))
def test_scores_over_a_quantized_cache(query, key, keys):
    """Quantized keys change a score by |(k - k^) q|, which is at most half a step of k times the sum of |q|."""
    head_dim = 8
    q, k = query(1, head_dim).astype(np.float64)[0], key(keys, head_dim)
    stored = kv_cache.quantize(k)
    scores, quantized_scores = (linear(a.astype(np.float64), q[None])[:, 0] for a in (k, kv_cache.dequantize(stored)))
    e = step(stored) * np.sum(np.abs(q)) / np.sqrt(head_dim)
    rounding = 2 * (head_dim + 1) * U * np.max(np.abs(k.astype(np.float64))) * np.sum(np.abs(q))
    assert_within(quantized_scores / np.sqrt(head_dim), scores / np.sqrt(head_dim), e + rounding)


@given(weights=weights, tokens=st.integers(2, 4))
def test_a_token_changes_nothing_of_the_others(weights, tokens):
    x = weights(tokens, 2, 8)
    after, before = kv_cache.quantize(x), kv_cache.quantize(x[:-1])
    np.testing.assert_array_equal(after.codes[:-1], before.codes)
    np.testing.assert_array_equal(after.scales[:-1], before.scales)


def test_a_cache_refuses_what_is_not_finite():
    with pytest.raises(ValueError, match="must be finite"):
        kv_cache.quantize(np.array([[np.inf, 1.0]]))
