"""Tests that more bits are never worse, for each family of quantizers.

For a single weight, more bits can be worse: 3 bits represent the numbers of a 3-bit grid exactly, 4 bits do not. So
each test compares an error for which the claim holds:

-   the mean error of random weights, if their density does not rise away from zero (`symmetric`, `affine`), or is
    uniform over the whole range (`hqq`, Q4_1 and Q5_1);
-   the error of every weight, if the coarser grid is part of the finer one (`mx`, Q4_0 and Q5_0, masks);
-   the summed error of a row, if the quantizer minimizes this sum (`kmeans`).

A density that falls away from zero is a mixture of uniform densities that begin at zero (Khinchine), so uniform
densities suffice. The tests replace the integral over a uniform density by a sum over equally spaced weights
(`lattice`). There are so many of these weights that this changes the two errors by less than the difference between
them.
"""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import affine, ggml, hqq, kmeans, mx, pruning, symmetric
from llamaspec.reference.quantizers.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.strategies import U

POINTS = 2048
seeds = st.integers(0, 2**32 - 1)
weights = st.builds(Weights, kind=st.sampled_from(KINDS), seed=seeds, exponent=st.integers(-20, 20))
halves = st.floats(1e-3, 1)  # half widths of an interval, relative to the largest weight
tops = st.floats(2.0**-60, 2.0**60, width=32)


def lattice(lo: float, hi: float, points: int = POINTS) -> np.ndarray:
    """Return the middles of `points` equal parts of an interval."""
    return lo + (hi - lo) * (np.arange(points) + 0.5) / points


def falls(errors: list[float], *, ends: float = 0.0) -> None:
    """Assert that no error exceeds the previous one, except by rounding.

    The allowance covers the rounding of each sum of errors. If weights at the ends of the range have the magnitude
    `ends`, it also covers the rounding of scales, which moves these weights.
    """
    slack = 2 * (2.0**-23 * ends) ** 2
    for before, after in itertools.pairwise(errors):
        assert after <= before * (1 + 4 * POINTS * U) + slack


@given(top=tops, reaches=st.lists(halves, min_size=1, max_size=3), negative=st.booleans())
def test_symmetric_integers(top, reaches, negative):
    r"""More bits do not increase the error if the largest weight is m, and the others are uniform on [-a, a], a <= m.

    Let s be the step, and G_s(a) the integral of the squared error from 0 to a. For a <= s / 2, every weight becomes 0,
    so no step gives a larger error. For larger a, G_s(a) differs from a s^2 / 12 by at most s^3 / (36 sqrt 3). One more
    bit gives a step s' <= s / 2, so G_s(a) - G_s'(a) >= 0.026 a s^2.

    The test replaces an integral by a sum over 1024 parts of width h = a / 1024. The slope of the squared error is at
    most s, so the sum for s is off by at most a h s / 4. The sums for s and s' together are off by at most 0.375 a h s.
    This is at most 0.024 a s^2 if s >= m / 63, which holds for all steps except the smallest.
    """
    w = np.concatenate([[-top if negative else top], *(lattice(-top * part, top * part) for part in reaches)])[None]
    read = [symmetric.dequantize(symmetric.quantize(w, bits=bits, block=w.shape)) for bits in range(2, 9)]
    falls([float(np.sum((r - w) ** 2)) for r in read], ends=top)


@example(top=1.0, below=0.5, reaches=[(0.125, False)])  # 2 bits happen to hold both ends exactly, and 3 do not
@example(top=1.0, below=1.0, reaches=[(1.0, False), (1.0, True)])
@given(top=tops, below=st.floats(0, 1), reaches=st.lists(st.tuples(halves, st.booleans()), min_size=1, max_size=4))
def test_affine_integers(top, below, reaches):
    """More bits do not increase the error of weights that are uniform between zero and a point within the range.

    The proof for symmetric integers applies to each side of zero: z is an integer, so zero is on the grid. If z is
    rounded, the grid leaves out at most half a step at one end. Again s' < s / 2.
    """
    ends = -top * below, top
    pieces = [lattice(0, ends[up] * part) for part, up in reaches]
    w = np.concatenate([np.array(ends), *pieces])[None]
    read = [affine.dequantize(affine.quantize(w, bits=bits, block=w.shape)) for bits in range(2, 8)]
    falls([float(np.sum((r - w)[:, 2:] ** 2)) for r in read], ends=top)


@given(lo=st.floats(-4, 4), width=st.floats(0.1, 8))
def test_hqq(lo, width):
    """More bits do not increase the sum of |w - w^|^p over uniform weights w; w^ is the dequantized weight.

    The weights fill whole steps of the grid. So the sum is the same for every zero point z, except that weights beyond
    the ends of the grid increase it. Therefore no z decreases the sum, but one more bit multiplies it by at most
    (1/2)^p. The test sums over equally spaced weights with the distance h instead of an integral. This changes each sum
    by at most (h / 2)^p / (1 + p) per weight, and two such changes are less than half of the difference between the
    sums for b and b + 1 bits.
    """
    w = np.concatenate([[lo, lo + width], lattice(lo, lo + width)])[None]
    read = [hqq.dequantize(hqq.quantize(w, bits=bits, group=w.shape[1])) for bits in range(1, 8)]
    falls([float(np.sum(np.abs(r - w) ** hqq.P)) for r in read])


@given(lo=st.floats(-4, 4), width=st.floats(1, 8))
def test_q4_1_and_q5_1(lo, width):
    """Q5_1 is no worse than Q4_1 if blocks have the same smallest and largest weight and together cover the range."""
    w = np.concatenate(
        [np.full((64, 1), lo), np.full((64, 1), lo + width), lattice(lo, lo + width, 1920).reshape(30, 64).T], axis=1
    )
    falls([float(np.sum((ggml.decode(ggml.encode(w, name), name) - w) ** 2)) for name in ("Q4_1", "Q5_1")])


@given(weights=weights)
def test_q4_0_and_q5_0(weights):
    """Q5_0 is no worse than Q4_0 for each weight: Q4_0's levels are every second level of Q5_0.

    d is the largest weight times a power of two. The test allows for the rounding of d to float16, times a code up to
    16, and for float32's roundings of w / d.
    """
    w = weights(4, 64) * np.float32(2.0 ** -max(weights.exponent - 6, 0))
    four, five = (np.abs(ggml.decode(ggml.encode(w, name), name) - w) for name in ("Q4_0", "Q5_0"))
    d = ggml.TYPES["Q4_0"].quantize(w).scales.astype(np.float64)
    step = np.repeat(np.abs(d), 32, axis=-1).reshape(w.shape)
    assert np.all(five <= four + 2 * (8 * step * 2.0**-11 + 16 * 2.0**-25) + step * 2.0**-12)


CHAINS = [(E2M1, E2M3), (E2M1, E3M2), (E3M2, E4M3), (E3M2, E5M2)]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{chain[0].bits} to {chain[1].bits} bits")
@given(weights=st.builds(Weights, kind=st.sampled_from(KINDS), seed=seeds, exponent=st.integers(-140, 127)))
def test_microscaling(chain, weights):
    """The larger format is no worse for each weight: divided by 2^emax, it has all numbers of the smaller format."""
    w = weights(2, 64)
    small, large = (np.abs(mx.dequantize(mx.quantize(w, to=to), to=to) - w) for to in chain)
    assert np.all(large <= small)


@given(weights=weights, bits=st.integers(1, 4))
@example(weights=Weights("halves", seed=0), bits=4)
def test_codebooks(weights, bits):
    """The minimal loss with 2^(b + 1) levels is no larger than with 2^b levels: extra levels can stay unused.

    The test allows for two errors: the sum that float64 code finds may be above the minimum (`test_quantizers_kmeans`
    bounds by how much), and rounding a level to float32 adds the square of this rounding error for each weight.
    """
    w = weights(2, 64)
    rows = w.astype(np.float64)
    sums = []
    for b in (bits, bits + 1):
        sums.append(np.sum((kmeans.dequantize(kmeans.quantize(w, bits=b, levels=kmeans.optimal)) - rows) ** 2, axis=-1))
    spread = np.sum((rows - rows.mean(axis=-1, keepdims=True)) ** 2, axis=-1)
    largest = np.max(np.abs(rows), axis=-1)
    slack = 32 * 64 * U * spread + 64 * U**2 * np.sum(rows**2, axis=-1) + 64 * (2.0**-24 * largest + 2.0**-150) ** 2
    assert np.all(sums[1] <= sums[0] + slack)


@given(weights=weights)
def test_masks(weights):
    """A weight that one mask keeps is also kept by every mask that keeps more weights."""
    w = weights(4, 16)
    for keep in range(16):
        for few, more in (
            [pruning.fine_grained(w, keep=n) for n in (keep, keep + 1)],
            [pruning.n_of_m(w, n=n, m=16) for n in (keep, keep + 1)],
            [pruning.channels(w, keep=n) for n in (keep // 4, keep // 4 + 1)],
        ):
            assert np.all(few <= more)
