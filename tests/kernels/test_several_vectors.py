"""Batches that need several launches of a quantized kernel: each vector gets its own result and its own cache row."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.norm_gate_up import norm_gate_up
from llamaspec.pallas_kernels.norm_qkv import norm_qkv
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.parts.matrix import AT_ONCE, MAX_BATCH, ScaledCodes, shares
from llamaspec.pallas_kernels.parts.tile import Tile

ROWS, COLS, BATCH = 48, 1024, AT_ONCE + 1
TILE = Tile(16, 2)
RNG = np.random.default_rng(0)
W = ScaledCodes(
    jnp.asarray(RNG.integers(-127, 128, (ROWS, COLS)), jnp.int8),
    jnp.asarray(RNG.random((ROWS, COLS // 64)), jnp.float32),
)
X, NORM = jnp.asarray(RNG.standard_normal((BATCH, COLS)), jnp.float32), jnp.ones(COLS)


def test_vectors_are_shared_out_evenly_where_weights_are_codes():
    assert shares(W, 4) == [slice(0, 4)]
    assert shares(W, 5) == [slice(0, 3), slice(3, 6)]
    assert shares(W, 8) == [slice(0, 4), slice(4, 8)]
    assert shares(jnp.zeros((8, 8)), 8) == [slice(0, 8)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "form",
    [
        lambda x, r: gemv(W, x, residual=r, tile=TILE),
        lambda x, r: norm_gate_up(W, x, NORM, eps=1e-5, tile=TILE) + r[:, : ROWS // 2],
    ],
)
def test_each_vector_of_a_batch_has_its_single_result(form):
    residual = jnp.asarray(RNG.standard_normal((BATCH, ROWS)), jnp.float32)
    with interpreter():
        together = np.asarray(form(X, residual))
        singles = [np.asarray(form(X[b : b + 1], residual[b : b + 1])) for b in (0, BATCH - 1)]
    np.testing.assert_array_equal(together[[0, -1]], np.concatenate(singles))


def test_each_of_several_sequences_has_its_own_place_in_the_cache():
    def run(start: int, stop: int):
        some = slice(start, stop)
        batch = stop - start
        at = jnp.arange(start, stop, dtype=jnp.int32)
        angles = jnp.arange(8.0)[None] * at[:, None]
        cache = jnp.full((batch, 1, 8, 16), -1.0)
        results = norm_qkv(
            W, X[some], NORM, cache, cache, at, jnp.cos(angles), jnp.sin(angles), heads=1, eps=1e-5, tile=TILE
        )
        return [np.asarray(a) for a in results]

    with interpreter():
        together, first, last = run(0, BATCH), run(0, 1), run(BATCH - 1, BATCH)
    for all_of_them, *ends in zip(together, first, last, strict=True):
        np.testing.assert_array_equal(all_of_them[[0, -1]], np.concatenate(ends))


@pytest.mark.parametrize("batch", range(AT_ONCE + 1, MAX_BATCH + 1))
@pytest.mark.parametrize("op", ["gemv", "norm_gate_up", "norm_qkv"])
def test_slices_for_a_kernel_are_aligned(op, batch):
    """Vectors of a second launch start at multiples of 256 bytes, because XLA may pass a slice as a view.

    An H200 refused five sequences with heads of 64: the RoPE angles of the second launch started at byte 384.
    """
    x, cache = jnp.ones((batch, COLS), jnp.bfloat16), jnp.ones((batch, 1, 8, 16), jnp.bfloat16)
    norm, angles = jnp.ones(COLS, jnp.bfloat16), jnp.ones((batch, 8))
    run = {
        "gemv": lambda: gemv(W, x, residual=jnp.ones((batch, ROWS), jnp.bfloat16), tile=TILE),
        "norm_gate_up": lambda: norm_gate_up(W, x, norm, eps=1e-5, tile=TILE),
        "norm_qkv": lambda: norm_qkv(
            W, x, norm, cache, cache, jnp.zeros(batch, jnp.int32), angles, angles, heads=1, eps=1e-5, tile=TILE
        ),
    }[op]
    starts = list(_slices(jax.make_jaxpr(run)().jaxpr))
    assert starts  # the slices for the second launch
    assert not any(start % 256 for start in starts)


def _slices(jaxpr) -> Iterator[int]:
    """Yield the byte offset of each slice of rows in a jaxpr, except for slices that start at 0."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "slice" and any(equation.params["start_indices"]):
            (operand,) = equation.invars
            first, *later = equation.params["start_indices"]
            assert not any(later)
            yield first * (operand.aval.size // operand.aval.shape[0]) * operand.aval.dtype.itemsize
        elif equation.primitive.name == "jit":
            yield from _slices(equation.params["jaxpr"].jaxpr)
