r"""Codebooks by k-means: every row has its own 2^b levels, close to its weights.

    minimize  sum_i h_i (w_i - c_(q_i))^2        over levels c_1 < ... < c_k and codes q_i

k = 2^b is the number of levels. h_i is the importance of a weight: 1 (Han et al., 2016,
https://arxiv.org/abs/1510.00149), or its entry in the diagonal of the Fisher information (SqueezeLLM, Kim et al., 2023,
https://arxiv.org/abs/2306.07629). There are two ways to find levels:

`lloyd` (Lloyd, 1982, https://doi.org/10.1109/TIT.1982.1056489) starts with the quantiles (i + 1/2) / k of the row as
levels. It repeats two steps until the sum stops falling: each weight gets the nearest level, and each level becomes the
mean of its weights, weighted by h. A level without weights does not change. The sum never grows, but the result may be
a local minimum.

`optimal` finds the global minimum (Bruce, 1965; Wang & Song, 2011, https://doi.org/10.32614/RJ-2011-015). In sorted
order, the weights of a level are consecutive. Let W(i, j) be the smallest sum if the sorted weights i ... j - 1 have
one level, and S_m(j) the smallest sum if the first j weights have m levels. Then

    S_m(j) = min_i S_(m-1)(i) + W(i, j)

`optimal` takes time and memory n^2 for a row of n weights. We use it to judge other methods.

Guaranteed, up to rounding to float32: every weight has the nearest level (the lower one on ties), and every level is
the mean of its weights. `lloyd` has both properties, because it stops when neither step lowers the sum. `optimal`
reaches the minimum up to float64 rounding, because the recursion tries every first weight of the last level. The levels
are not evenly spaced, so there is no bound for a single weight.

Q(w) are the dequantized weights. Fixed point: Q(Q(w)) = Q(w) for `optimal`, with a sum of 0. For `lloyd`, Q(Q(w)) may
differ from Q(w), because its first levels may miss one of the values in Q(w). Powers of two: the weights 2^k w have
the same codes as w, and the levels times 2^k. Sign: Q(-w) = -Q(w), except for ties between two levels or two
partitions. With more levels, the sum of `optimal` never grows, but the sum of `lloyd` may grow.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite

Levels = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


class Codebooks(NamedTuple):
    """A code for each weight, and the levels of each row, in ascending order."""

    codes: UInt8[np.ndarray, "rows cols"]
    levels: Float32[np.ndarray, "rows levels"]


def quantize(
    w: Float[np.ndarray, "rows cols"],
    *,
    bits: int,
    levels: Levels,
    importance: Float[np.ndarray, "rows cols"] | None = None,
) -> Codebooks:
    """Quantize each row. `levels` (`lloyd` or `optimal`) finds its levels. `importance` is h; None means 1.

    Raises ValueError for weights that are not finite, bits outside 1 to 8, and an importance that is negative,
    not finite, or 0 in a whole row.

    >>> q = quantize(np.array([[1.0, 1.0, 5.0, 9.0]]), bits=1, levels=optimal)
    >>> q.codes, q.levels
    (array([[0, 0, 1, 1]], dtype=uint8), array([[1., 7.]], dtype=float32))
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codebooks have codes of 1 to 8 bits, got {bits}")
    rows = finite(w)
    h = np.ones_like(rows) if importance is None else importance.astype(np.float64)
    if np.any(~np.isfinite(h) | (h < 0)) or not np.all(np.any(h > 0, axis=-1)):
        raise ValueError("importance must be finite and not negative, and may not be 0 for all weights of a row")
    books = np.stack([levels(row, weight, 1 << bits) for row, weight in zip(rows, h, strict=True)]).astype(np.float32)
    codes = np.stack([nearest(row, book) for row, book in zip(rows, books.astype(np.float64), strict=True)])
    return Codebooks(codes.astype(np.uint8), books)


def dequantize(q: Codebooks) -> Float64[np.ndarray, "rows cols"]:
    return np.take_along_axis(q.levels.astype(np.float64), q.codes.astype(np.int64), axis=-1)


def lloyd(w: Float64[np.ndarray, " n"], h: Float64[np.ndarray, " n"], k: int) -> Float64[np.ndarray, " k"]:
    """Find k levels for weights w with importance h by Lloyd's iteration.

    >>> lloyd(np.array([0.0, 1.0, 10.0, 11.0]), np.ones(4), 2)
    array([ 0.5, 10.5])
    """
    order = np.argsort(w, kind="stable")
    w, h = w[order], h[order]
    shares = np.cumsum(h) / np.sum(h)
    levels = w[np.minimum(np.searchsorted(shares, (np.arange(k) + 0.5) / k), len(w) - 1)]
    least = np.inf
    while True:
        codes = nearest(w, levels)
        loss = np.sum(h * (w - levels[codes]) ** 2)
        if loss >= least:
            return levels
        least = loss
        mass, sums = np.bincount(codes, h, minlength=k), np.bincount(codes, h * w, minlength=k)
        levels = np.sort(np.where(mass > 0, sums / np.where(mass > 0, mass, 1), levels))


def optimal(w: Float64[np.ndarray, " n"], h: Float64[np.ndarray, " n"], k: int) -> Float64[np.ndarray, " k"]:
    """Find the k levels with the smallest sum of h times the squared error. Unneeded levels repeat the largest weight.

    >>> optimal(np.array([0.0, 1.0, 10.0, 11.0]), np.ones(4), 3)
    array([ 0. ,  1. , 10.5])
    """
    order = np.argsort(w, kind="stable")
    w, h = w[order], h[order]
    center = np.mean(w)  # sums of squares around the mean lose fewer digits
    mass, first, second = (np.concatenate([[0], np.cumsum(h * (w - center) ** p)]) for p in (0, 1, 2))

    def between(sums: np.ndarray) -> np.ndarray:
        return sums - sums[:, None]  # [i, j]: over the weights i ... j - 1

    total = between(mass)
    cost = between(second) - between(first) ** 2 / np.where(total > 0, total, np.inf)
    cost = np.where(np.tri(len(w) + 1, dtype=bool), np.inf, np.maximum(cost, 0))  # a level cannot be empty
    np.fill_diagonal(cost, 0)  # unless there are more levels than weights
    sums, starts = cost[0], []
    for _ in range(k - 1):
        with_one_more = sums[:, None] + cost
        starts.append(np.argmin(with_one_more, axis=0))
        sums = np.min(with_one_more, axis=0)
    ends = [len(w)]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    edges = np.array([0, *ends[::-1]])
    levels = [
        np.sum(h[i:j] * w[i:j]) / np.sum(h[i:j]) if np.any(h[i:j] > 0) else w[min(i, len(w) - 1)]
        for i, j in itertools.pairwise(edges)
    ]
    return np.sort(np.array(levels))


def nearest(w: Float64[np.ndarray, " n"], levels: Float64[np.ndarray, " k"]) -> Int[np.ndarray, " n"]:
    """Return the codes of the levels nearest to `w`, the lower one on ties.

    >>> nearest(np.array([0.4, 0.5, 0.6]), np.array([0.0, 1.0]))
    array([0, 0, 1])
    """
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, w, side="left")


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack `bits` bits of every code, the first code in the lowest bits."""
    return packing.pack(codes, bits=bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=bits)
