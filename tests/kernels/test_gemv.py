"""Matrix-vector products in Pallas's interpreter: the gemv kernel, and the products in norm_qkv and norm_gate_up.

The interpreter detects races, reads of uninitialized memory and reads outside of arrays. The results must meet the
bounds of running error analysis (verify/bounds/running_error.py), which hold for any order of sums.
"""

from math import prod
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.norm_gate_up import norm_gate_up
from llamaspec.pallas_kernels.norm_qkv import norm_qkv
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.card import H200
from llamaspec.pallas_kernels.parts.compat import LANES, Target, current_target, interpreter, use_target
from llamaspec.pallas_kernels.parts.matrix import MAX_BATCH, ScaledCodes, product_of
from llamaspec.pallas_kernels.parts.quantized_product import Int4Product, Int8Product
from llamaspec.pallas_kernels.parts.row_product import RowProduct
from llamaspec.pallas_kernels.parts.row_tiles import BLOCK_MEMORY
from llamaspec.pallas_kernels.parts.tile import Tile
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.verify.bounds.running_error import Approx, added, exactly, gamma, gated, normalized, projected, rounded
from tests.support.strategies import DENORMAL, share_of

UNITS = {"float32": 0.0, "bfloat16": 2**-8}
EPS = 1e-5
settings = hypothesis.settings(max_examples=share_of(6), deadline=None)  # an interpreted call takes half a second
dtypes = st.sampled_from(sorted(UNITS))
scales = st.sampled_from([1.0, 1e-30, 1e4, 2.0**DENORMAL])
seeds = st.integers(0, 2**32 - 1)


def chunk(dtype: str) -> int:
    return LANES * 16 // np.dtype(dtype if dtype == "float32" else jnp.bfloat16).itemsize


def drawn(rng: np.random.Generator, *shape: int, dtype: str, scale: float = 1.0, outlier: bool = False):
    values = rng.standard_normal(shape) * scale
    if outlier:
        values.flat[rng.integers(values.size)] = 3e4 * scale
    return jnp.asarray(values, dtype)


def assert_within(y, bound: Approx) -> None:
    off = np.abs(np.asarray(y).astype(np.float64) - bound.value)
    assert np.all(off <= bound.error), f"off by up to {np.nanmax(off / bound.error):.2f} of the bound"


@given(
    dtype=dtypes,
    batch=st.integers(1, MAX_BATCH),
    tiles=st.integers(1, 3),
    tile=st.sampled_from(
        [Tile(8, 4), Tile(16, 2), Tile(8, 1), Tile(8, 3, 1), Tile(8, 4, 2), Tile(8, 2, chunks=2), Tile(8, 1, 2, 3)]
    ),  # some give a block several tiles, some give a step several chunks
    steps=st.sampled_from([1, 2, 3, 5, 7]),
    normed=st.booleans(),
    biased=st.booleans(),
    residual=st.booleans(),
    outlier=st.booleans(),
    scale=scales,
    seed=seeds,
)
@settings
@example("bfloat16", 1, 2, Tile(16, 2), 7, True, True, True, True, 1.0, 0)  # the ring wraps three times
@example("float32", 8, 1, Tile(8, 1), 3, True, False, False, False, 1e4, 1)
@example("float32", 2, 5, Tile(8, 5, 2), 3, True, True, True, False, 1.0, 2)  # the ring is longer than a tile
@example("bfloat16", 1, 5, Tile(8, 2, 1), 1, False, False, True, False, 1.0, 3)
@example("bfloat16", 1, 3, Tile(8, 2, 1, 2), 5, True, False, True, False, 1.0, 3)  # one block computes three tiles
@example("bfloat16", 6, 1, Tile(16, 3, chunks=4), 7, False, True, False, True, 1.0, 3)
@example("float32", 1, 1, Tile(8, 4), 1, False, False, True, False, 2.0**DENORMAL, 4)
@example("bfloat16", 2, 1, Tile(8, 4), 1, True, False, False, True, 2.0**DENORMAL, 4)
def test_gemv(dtype, batch, tiles, tile, steps, normed, biased, residual, outlier, scale, seed):
    rng = np.random.default_rng(seed)
    rows, cols = tiles * tile.rows, steps * (tile.chunks or 1) * chunk(dtype)
    w = drawn(rng, rows, cols, dtype=dtype)
    x = drawn(rng, batch, cols, dtype=dtype, scale=scale, outlier=outlier)
    norm = drawn(rng, cols, dtype=dtype) if normed else None
    bias = drawn(rng, rows, dtype=dtype) if biased else None
    r = drawn(rng, batch, rows, dtype=dtype, scale=scale) if residual else None
    try:
        with interpreter():
            y = np.asarray(gemv(w, x, norm=norm, eps=EPS, bias=bias, residual=r, tile=tile))
    except Unsupported as refusal:  # this tile of several long vectors, on a card with less shared memory
        assert current_target().card.shared < H200.shared and "bytes of shared memory" in str(refusal)
        return
    assert y.dtype == x.dtype
    n = exactly(x) if norm is None else normalized(exactly(x), exactly(norm).value, eps=EPS)
    exact = projected(n, exactly(w).value, None if bias is None else exactly(bias).value)
    exact = exact if r is None else added(exact, exactly(r))
    assert_within(y, rounded(exact, UNITS[dtype]))


@pytest.mark.slow  # 12 s
@given(
    dtype=dtypes,
    batch=st.integers(1, 3),
    steps=st.sampled_from([1, 9]),
    biased=st.booleans(),
    scale=scales,
    blocks=st.sampled_from([None, 1, 2]),
    chunks=st.sampled_from([None, 2]),
    outlier=st.booleans(),
    gates=st.sampled_from([1.0, 2.0**11]),
    seed=seeds,
)
@settings
@example("float32", 1, 9, False, 1e4, None, None, False, 1.0, 0)
@example("bfloat16", 1, 9, True, 1.0, 2, 2, False, 1.0, 1)
@example("float32", 2, 1, False, 1.0, None, 2, False, 2.0**11, 2)  # gates near 2e4 in magnitude, where exp overflows
@example("bfloat16", 1, 1, False, 2.0**DENORMAL, None, None, True, 1.0, 3)
def test_norm_gate_up(dtype, batch, steps, biased, scale, blocks, chunks, outlier, gates, seed):
    rng = np.random.default_rng(seed)
    ffn, cols = 24, steps * (chunks or 1) * chunk(dtype)
    w = drawn(rng, 2 * ffn, cols, dtype=dtype, scale=gates)
    x = drawn(rng, batch, cols, dtype=dtype, scale=scale, outlier=outlier)
    norm = drawn(rng, cols, dtype=dtype)
    bias = drawn(rng, 2 * ffn, dtype=dtype) if biased else None
    with interpreter():
        y = np.asarray(norm_gate_up(w, x, norm, eps=EPS, bias=bias, tile=Tile(16, 4, blocks, chunks)))
    n = normalized(exactly(x), exactly(norm).value, eps=EPS)
    product = projected(n, exactly(w).value, None if bias is None else exactly(bias).value)
    gate, up = (product.map(lambda part, half=half: np.split(part, 2, axis=-1)[half]) for half in (0, 1))
    assert_within(y, rounded(gated(gate, up), UNITS[dtype]))


@pytest.mark.slow  # 11 s
@given(
    dtype=dtypes,
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    head_dim=st.sampled_from([16, 64]),
    steps=st.sampled_from([1, 9]),
    biased=st.booleans(),
    blocks=st.sampled_from([None, 1, 5]),
    outlier=st.booleans(),
    scale=scales,
    seed=seeds,
)
@settings
@example("bfloat16", 2, (3, 1), 64, 9, True, None, False, 1.0, 0)
@example("bfloat16", 2, (3, 1), 64, 9, True, 3, True, 1.0, 0)
@example("float32", 1, (1, 1), 16, 1, False, None, True, 2.0**DENORMAL, 1)
def test_norm_qkv(dtype, batch, heads, head_dim, steps, biased, blocks, outlier, scale, seed):
    """norm_qkv returns q and writes k and v to one row of the KV cache; the other rows stay NaN."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = heads
    capacity, cols = 8, steps * chunk(dtype)
    w = drawn(rng, (heads + 2 * kv_heads) * head_dim, cols, dtype=dtype)
    x = drawn(rng, batch, cols, dtype=dtype, scale=scale, outlier=outlier)
    norm = drawn(rng, cols, dtype=dtype)
    bias = drawn(rng, len(w), dtype=dtype) if biased else None
    at = rng.integers(0, capacity, batch)
    angles = rng.uniform(0, 100, (batch, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    stale = jnp.full((batch, kv_heads, capacity, head_dim), jnp.nan, dtype)
    with interpreter():
        q, k, v = norm_qkv(
            w, x, norm, stale, stale, jnp.asarray(at, jnp.int32), jnp.asarray(cos), jnp.asarray(sin),
            heads=heads, eps=EPS, bias=bias, tile=Tile(16, 4, blocks),
        )  # fmt: skip
        q, k, v = (np.asarray(a) for a in (q, k, v))
    n = normalized(exactly(x), exactly(norm).value, eps=EPS)
    qkv = projected(n, exactly(w).value, None if bias is None else exactly(bias).value)
    qkv = qkv.map(lambda part: part.reshape(batch, -1, head_dim))
    turned = _turned(qkv, exactly(cos).value[:, None], exactly(sin).value[:, None])
    unit = UNITS[dtype]
    assert_within(q, rounded(turned.map(lambda part: part[:, :heads]), unit))
    rows = np.arange(batch)
    assert_within(k[rows, :, at], rounded(turned.map(lambda part: part[:, heads : heads + kv_heads]), unit))
    assert_within(v[rows, :, at], rounded(qkv.map(lambda part: part[:, heads + kv_heads :]), unit))
    unwritten = np.ones((batch, capacity), bool)
    unwritten[rows, at] = False
    for cache in (k, v):
        assert np.isnan(cache.swapaxes(1, 2)[unwritten].astype(np.float32)).all()


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize(
    ("bits", "at"),
    [(16, (-(2**31), 7)), (16, (-1, 8)), (16, (3, 2**31 - 1)), (8, (8, -1)), (4, (2**31 - 1, -(2**31)))],
)
def test_a_position_outside_of_the_cache_is_clamped(bits, at):
    """A position outside the cache is clamped to the nearest row.

    All other rows, heads and sequences stay unchanged.
    """
    heads, kv_heads, capacity, head_dim = 1, 2, 8, 16
    cols, rows = 256 if bits == 16 else 1024, (heads + 2 * kv_heads) * head_dim
    w: Any = jnp.ones((rows, cols), jnp.bfloat16)
    if bits < 16:
        codes = np.ones((rows, cols), np.int8)
        w = ScaledCodes(jnp.asarray(int4.pack(codes) if bits == 4 else codes), jnp.ones((rows, cols // 64)))
    rng = np.random.default_rng(0)
    canaries = rng.integers(0, 2**16, (2, 2, kv_heads, capacity, head_dim), np.uint16)
    k, v = jnp.asarray(canaries.view(jnp.bfloat16))
    x, angles = jnp.ones((2, cols), jnp.bfloat16), jnp.zeros((2, head_dim // 2), jnp.float32)
    with interpreter():
        _, *caches = norm_qkv(w, x, x[0], k, v, jnp.array(at, jnp.int32), angles + 1, angles, heads=heads, eps=EPS)
    expected = np.zeros((2, kv_heads, capacity), bool)
    expected[[0, 1], :, np.clip(at, 0, capacity - 1)] = True
    for canary, cache in zip(canaries, caches, strict=True):
        changed = (np.asarray(cache).view(np.uint16) != canary).any(axis=-1)
        np.testing.assert_array_equal(changed, expected)


def _turned(x: Approx, cos: np.ndarray, sin: np.ndarray) -> Approx:
    """Apply RoPE from tables of cos and sin."""
    a, b = np.split(x.value, 2, axis=-1)
    value = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def spread(part):
        a, b = np.split(part, 2, axis=-1)
        return np.concatenate([a * abs(cos) + b * abs(sin), b * abs(cos) + a * abs(sin)], axis=-1)

    return Approx(value, spread(x.error) + gamma(2) * spread(x.size))


W = jnp.ones((16, 256), jnp.bfloat16)
X = jnp.ones((1, 256), jnp.bfloat16)
K = jnp.ones((1, 1, 8, 16), jnp.bfloat16)
AT, ANGLES = jnp.zeros(1, jnp.int32), jnp.ones((1, 8), jnp.float32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gemv(W[:, :172], X[:, :172]), "columns of W in multiples of 256 in bfloat16, got 172"),
        (lambda: gemv(W, X, tile=Tile(8, chunks=2)), "columns of W in multiples of 512 in bfloat16, got 256"),
        (lambda: gemv(W[:13], X), "rows of W in multiples of 8, got 13"),
        (lambda: gemv(W[:0], X), "got 0"),
        (lambda: gemv(W, X[:, :8]), r"got \(16, 256\) and \(1, 8\)"),
        (lambda: gemv(W, X.astype(jnp.float32)), "both in bfloat16, got bfloat16 and float32"),
        (lambda: gemv(W, jnp.ones((9, 256), jnp.bfloat16)), "1 to 8 vectors, got 9"),
        (lambda: gemv(W, X, norm=X[0, :8]), r"norm \[256\] in bfloat16, got \[8\]"),
        (lambda: gemv(W, X, residual=X), r"residual \[1, 16\] in bfloat16, got \[1, 256\]"),
        (
            lambda: gemv(jnp.ones((8, 2**16), jnp.float32), jnp.ones((1, 2**16), jnp.float32)),
            "bytes of shared memory for 1 vectors of 65536",
        ),
        (lambda: norm_gate_up(W[:15], X, X[0], eps=EPS), "norm_gate_up takes rows of W in multiples of 16, got 15"),
        (
            lambda: norm_qkv(W, X, X[0], K, K, AT, ANGLES, ANGLES, heads=1, eps=EPS),
            r"norm_qkv .*1 \+ 2 x 1 heads of 16 rows.* got 16",
        ),
        (
            lambda: norm_qkv(W[:12], X, X[0], K[..., :12], K[..., :12], AT, ANGLES, ANGLES, heads=1, eps=EPS),
            "rows of W in multiples of 8, got 12|a head_dim that is a multiple of 16, got 12",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refusals(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def empty(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


@pytest.mark.parametrize(
    ("op", "rows", "cols", "dtype", "runs"),
    [
        ("gemv", 4096, 4096, "bfloat16", 1),
        ("gemv", 4096, 14336, "bfloat16", 1),
        ("norm_qkv", 6144, 4096, "bfloat16", 2),
        ("norm_gate_up", 28672, 4096, "bfloat16", 2),
        ("norm_gate_up", 28672, 4096, "int4", 2),
    ],
)
def test_shared_memory_limits_a_multiprocessor_to_its_share_of_blocks(op, rows, cols, dtype, runs):
    """Thread blocks ask for so much shared memory that a multiprocessor has room for only its even share of the blocks.

    Otherwise the first blocks would all go to a few multiprocessors, which would be slow (docs/lessons-gpu.md).
    """

    if dtype == "int4":
        w: Any = ScaledCodes(empty(rows, cols // 8, dtype=np.int32), empty(rows, cols // 64, dtype=np.float32))
    else:
        w = empty(rows, cols, dtype=dtype)
    normed = op != "gemv"
    with use_target(Target(card=H200)):
        product = product_of(op, w, empty(1, cols, dtype="bfloat16"), normed=normed, runs=runs)
    part = -(-product.blocks // H200.processors)
    block = product.scratch_bytes(normed=normed) + BLOCK_MEMORY
    assert part * block <= H200.shared < (part + 1) * block


def test_no_ring_has_more_stages_than_mosaic_has_barriers():
    """A ring buffer has at most 32 stages, even if memory has room for more, because a Mosaic Barrier allows 32."""
    w, x = empty(4232, 512, dtype="bfloat16"), empty(8, 512, dtype="bfloat16")
    with use_target(Target(card=H200)):
        assert product_of("gemv", w, x, normed=False).ring_stages == 32


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (RowProduct, {"chunks": 2}),
        (Int8Product, {"bits": 8, "group": 64}),
        (Int4Product, {"bits": 4, "group": 32}),
        (Int4Product, {"bits": 6, "group": 16}),
        (Int4Product, {"bits": 5, "group": 32, "minima": True}),
    ],
)
def test_shared_memory_is_counted_as_it_is_taken(kind, options, normed):
    sizes = {"tiles": 4, "blocks": 2, "rows": 8, "runs": 2, "cols": 2048, "batch": 2, "stages": 3}
    product = kind(**sizes, dtype=np.dtype("float32"), **options)
    arrays = [leaf for leaf in jax.tree.leaves(product.scratch(normed=normed)) if not isinstance(leaf, plgpu.Barrier)]
    assert product.scratch_bytes(normed=normed) == sum(prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)
