"""More vectors than one kernel multiplies codes by: each has what it has alone, and its own place in the cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import interpreter
from pallas_kernels.gemv import gemv
from pallas_kernels.matrix import AT_ONCE, Codes, shares
from pallas_kernels.norm_gate_up import norm_gate_up
from pallas_kernels.norm_qkv import norm_qkv
from pallas_kernels.tile import Tile

ROWS, COLS, BATCH = 48, 1024, AT_ONCE + 1
TILE = Tile(16, 2)
RNG = np.random.default_rng(0)
W = Codes(
    jnp.asarray(RNG.integers(-127, 128, (ROWS, COLS)), jnp.int8),
    jnp.asarray(RNG.random((ROWS, COLS // 64)), jnp.float32),
)
X, NORM = jnp.asarray(RNG.standard_normal((BATCH, COLS)), jnp.float32), jnp.ones(COLS)


def test_vectors_are_shared_out_evenly_where_weights_are_codes():
    assert shares(W, 4) == [slice(0, 4)]
    assert shares(W, 5) == [slice(0, 3), slice(3, 6)]
    assert shares(W, 8) == [slice(0, 4), slice(4, 8)]
    assert shares(jnp.zeros((8, 8)), 8) == [slice(0, 8)]


@pytest.mark.parametrize(
    "form",
    [
        lambda x, r: gemv(W, x, residual=r, tile=TILE),
        lambda x, r: norm_gate_up(W, x, NORM, eps=1e-5, tile=TILE) + r[:, : ROWS // 2],
    ],
)
def test_each_of_several_vectors_has_what_it_has_alone(form):
    residual = jnp.asarray(RNG.standard_normal((BATCH, ROWS)), jnp.float32)
    with interpreter():
        together = np.asarray(form(X, residual))
        alone = [np.asarray(form(X[b : b + 1], residual[b : b + 1])) for b in (0, BATCH - 1)]
    np.testing.assert_array_equal(together[[0, -1]], np.concatenate(alone))


def test_each_of_several_sequences_has_its_own_place_in_the_cache():
    def run(start: int, stop: int):
        some = slice(start, stop)
        batch = stop - start
        at = jnp.arange(start, stop, dtype=jnp.int32)
        angles = jnp.arange(8.0)[None] * at[:, None]
        cache = jnp.full((batch, 1, 8, 16), -1.0)
        found = norm_qkv(
            W, X[some], NORM, cache, cache, at, jnp.cos(angles), jnp.sin(angles), heads=1, eps=1e-5, tile=TILE
        )
        return [np.asarray(a) for a in found]

    with interpreter():
        together, first, last = run(0, BATCH), run(0, 1), run(BATCH - 1, BATCH)
    for all_of_them, *ends in zip(together, first, last, strict=True):
        np.testing.assert_array_equal(all_of_them[[0, -1]], np.concatenate(ends))
