"""x W^T by tensor cores against float64, at every border of a tile."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.gemm import GemmTile, gemm
from pallas_kernels.parts.compat import interpreter
from tests.strategies import Noise, assert_within, at_extremes, noises, roundoff
from verify.running_error import exactly, projected, rounded

BFLOAT16 = np.dtype(jnp.bfloat16)


@settings(max_examples=5)
@given(
    noise=noises,
    seq=st.sampled_from([1, 7, 8, 9, 63, 64, 65, 127, 128, 129]),
    rows=st.sampled_from([64, 128, 192, 256]),
    cols=st.sampled_from([64, 128, 448]),
    stages=st.integers(2, 3),
    out=st.sampled_from([BFLOAT16, np.dtype(np.float32)]),
)
@example(noise=Noise(0), seq=257, rows=64, cols=320, stages=2, out=BFLOAT16)
@example(noise=Noise(1, outliers=True), seq=1, rows=512, cols=128, stages=3, out=np.dtype(np.float32))
@at_extremes(seq=9, rows=64, cols=64, stages=2, out=BFLOAT16)
def test_product(noise, seq, rows, cols, stages, out):
    x, w = noise(seq, cols, dtype=BFLOAT16), noise(rows, cols, dtype=BFLOAT16)
    tile = GemmTile(next(size for size in (256, 128, 64) if rows % size == 0), stages)
    with interpreter():
        y = gemm(jnp.asarray(x), jnp.asarray(w), out=out, tile=tile)
    assert y.dtype == out
    due = rounded(projected(exactly(x), exactly(w).value), roundoff(out) if out == BFLOAT16 else 0.0)
    assert_within(y, due.value, due.error)


def refused(x=(8, 64), w=(64, 64), *, dtype="bfloat16", **options):
    arrays = jnp.zeros(x, dtype), jnp.zeros(w, "bfloat16")
    return lambda: gemm(*arrays, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refused(x=(64,)), r"x \[seq, cols\] and W \[rows, cols\], got \(64,\)"),
        (refused(x=(8, 128)), r"got \(8, 128\) and \(64, 64\)"),
        (refused(x=(0, 64)), r"got \(0, 64\)"),
        (refused(dtype="float32"), "in bfloat16, got float32 and bfloat16"),
        (refused(out=np.float16), "bfloat16 or float32, not float16"),
        (refused(w=(72, 64)), "rows of W in multiples of 64, got 72"),
        (refused(x=(8, 96), w=(64, 96)), "columns of W in multiples of 64, got 96"),
        (refused(tile=GemmTile(128, 2)), "divide those of W, got 128 for 64"),
        (refused(tile=GemmTile(64, 1)), "2 stages or more, got 1"),
        (refused(w=(256, 64), tile=GemmTile(256, 5)), "bytes of shared memory"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_it_cannot_do_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
