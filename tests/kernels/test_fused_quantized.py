"""Fused ops with quantized weights, run in Pallas's interpreter, compared with exact values.

The bounds come from benchmarks/common/kernel_cases/exact.py, which also judges kernels on a GPU. They follow from
running error analysis, and hold for any order of sums.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.benchmarks.common.kernel_cases import exact
from llamaspec.pallas_kernels.norm_gate_up import norm_gate_up
from llamaspec.pallas_kernels.norm_qkv import norm_qkv
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes
from llamaspec.pallas_kernels.parts.tile import Tile
from llamaspec.verify.bounds.running_error import Approx
from tests.support.strategies import Noise, assert_within, at_extremes, dtypes, noises, share_of

EPS = 1e-5
TILE = Tile(16, 2, 1)  # one thread block; with more than four steps of 1024 columns, the ring wraps twice
settings = hypothesis.settings(max_examples=share_of(4), deadline=None)  # an interpreted kernel takes seconds
# For each scheme, the bits of a code and the number of columns that share a scale.
BITS_AND_GROUPS = {"q8": (8, 64), "q8_row": (8, None), "q6_16": (6, 16), "q5_32": (5, 32), "q4": (4, 64)}
schemes = st.sampled_from(sorted(BITS_AND_GROUPS))
lengths = st.sampled_from([1024, 1280, 5 * 1024 + 512])


def draw(noise: Noise, rows: int, cols: int, scheme: str) -> ScaledCodes:
    """Draw codes from their whole range, and scales near 1 / sqrt(cols), so that products are about as large as x."""
    bits, group = BITS_AND_GROUPS[scheme]
    codes = noise.rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, cols)).astype(np.int8)
    scales = noise.rng.uniform(0.5, 1.5, (rows, cols // group) if group else rows) * 2.0 ** (1 - bits) / np.sqrt(cols)
    packed, low_bits = int4.pack(codes) if bits == 4 else codes, None
    if bits in (6, 5):
        unsigned, order = codes.view(np.uint8) & (1 << bits) - 1, int4.order_of(group or 0, levels=False)
        packed, low_bits = (jnp.asarray(a.view(np.int32)) for a in int4.packed_apart(unsigned, order, bits=bits))
    return ScaledCodes(jnp.asarray(packed), jnp.asarray(scales.astype(np.float32)), low_bits=low_bits)


def check(actual, expected: Approx):
    assert_within(np.asarray(actual), expected.value, expected.error)


@pytest.mark.slow  # 6 s
@settings
@given(noise=noises, scheme=schemes, cols=lengths, batch=st.integers(1, 3), dtype=dtypes)
@example(noise=Noise(0), scheme="q4", cols=5632, batch=1, dtype=np.dtype("float32"))
@example(noise=Noise(1, outliers=True), scheme="q8", cols=5632, batch=2, dtype=np.dtype("float32"))
@example(noise=Noise(2), scheme="q5_32", cols=5632, batch=1, dtype=np.dtype("bfloat16"))
@at_extremes(scheme="q8", cols=1024, batch=1, dtype=np.dtype("float32"))
def test_norm_gate_up(noise, scheme, cols, batch, dtype):
    w = draw(noise, 32, cols, scheme)
    x, norm = noise(batch, cols, dtype=dtype), noise(cols, dtype=dtype)
    with interpreter():
        y = np.asarray(norm_gate_up(w, jnp.asarray(x), jnp.asarray(norm), eps=EPS, tile=TILE))
    assert y.dtype == dtype
    check(y, exact.norm_gate_up(jax.tree.map(np.asarray, w), x, norm, eps=EPS))


@pytest.mark.slow  # 9 s
@settings
@given(noise=noises, scheme=schemes, cols=lengths, batch=st.integers(1, 2), dtype=dtypes)
@example(noise=Noise(0), scheme="q8_row", cols=5632, batch=1, dtype=np.dtype("bfloat16"))
@example(noise=Noise(1), scheme="q4", cols=5632, batch=2, dtype=np.dtype("float32"))
@example(noise=Noise(2), scheme="q6_16", cols=5632, batch=1, dtype=np.dtype("bfloat16"))
@at_extremes(scheme="q4", cols=1024, batch=1, dtype=np.dtype("bfloat16"))
def test_norm_qkv(noise, scheme, cols, batch, dtype):
    """norm_qkv's q, k and v are within their bounds. It writes one row of the KV cache; the other rows stay NaN."""
    heads, kv_heads, head_dim, capacity = 2, 1, 32, 4
    w = draw(noise, (heads + 2 * kv_heads) * head_dim, cols, scheme)
    x, norm = noise(batch, cols, dtype=dtype), noise(cols, dtype=dtype)
    at = noise.rng.integers(0, capacity, batch).astype(np.int32)
    angles = noise.rng.uniform(0, 100, (batch, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    stale = np.full((batch, kv_heads, capacity, head_dim), np.nan, dtype)
    with interpreter():
        actual = norm_qkv(
            w, *(jnp.asarray(a) for a in (x, norm, stale, stale, at, cos, sin)), heads=heads, eps=EPS, tile=TILE
        )
        actual = [np.asarray(a) for a in actual]
    expected = exact.norm_qkv(
        jax.tree.map(np.asarray, w), x, norm, stale, stale, at, cos, sin, heads=heads, eps=EPS
    )  # fmt: skip
    rows = np.arange(batch)
    check(actual[0], expected[0])
    for cache, expected_cache in zip(actual[1:], expected[1:], strict=True):
        check(cache[rows, :, at], expected_cache.map(lambda part: part[rows, :, at]))
        np.testing.assert_array_equal(np.isnan(cache.astype(np.float32)), np.isnan(expected_cache.value))


@pytest.mark.sampled(1)  # 3 s each
@pytest.mark.parametrize("scheme", sorted(BITS_AND_GROUPS))
def test_biases_are_added_to_their_rows(scheme):
    """With x = 0, the results of norm_gate_up and norm_qkv depend only on the biases."""
    w = draw(Noise(0), 48, 1024, scheme)
    x, norm, bias = jnp.zeros((1, 1024)), jnp.ones(1024), jnp.arange(1.0, 49)
    with interpreter():
        y = np.asarray(norm_gate_up(w, x, norm, eps=EPS, bias=bias))
        qkv = norm_qkv(
            w, x, norm, jnp.zeros((1, 1, 1, 16)), jnp.zeros((1, 1, 1, 16)), jnp.zeros(1, jnp.int32),
            jnp.ones((1, 8)), jnp.zeros((1, 8)), heads=1, eps=EPS, bias=bias,
        )  # fmt: skip
    gate, up = np.split(np.arange(1.0, 49), 2)
    np.testing.assert_allclose(y[0], gate / (1 + np.exp(-gate)) * up, rtol=8 * 2.0**-24)
    np.testing.assert_array_equal(np.concatenate([np.ravel(a) for a in qkv]), bias)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w, x: norm_gate_up(w, x[:, :512], x[0], eps=EPS), r"x \[batch, 1024\], got"),
        (lambda w, x: norm_gate_up(w, x, x[0, :8], eps=EPS), r"norm \[1024\] in float32, got \[8\]"),
        (
            lambda w, x: norm_gate_up(ScaledCodes(w.codes[:24], w.scales[:24]), x, x[0], eps=EPS),
            "rows of W in multiples of 16, got 24",
        ),
        (
            lambda w, x: norm_gate_up(ScaledCodes(w.codes[:, :512], w.scales[:, :8]), x[:, :512], x[0, :512], eps=EPS),
            "at least 1024 columns of W, in multiples of 256, got 512",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_they_cannot_do_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=f"norm_gate_up takes .*{says}"):
        call(draw(Noise(0), 32, 1024, "q8"), jnp.ones((1, 1024)))
