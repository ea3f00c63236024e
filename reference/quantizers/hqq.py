r"""HQQ: a zero point that is no integer, and is fitted without data.

    minimize over z  sum_i |w_i - s (q_i - z)|^p,  p = 0.7        q_i = clip(rint(w_i / s + z), 0, 2^bits - 1)

(Badri & Shaji, 2023, https://mobiusml.github.io/hqq_blog.) p < 1 wants most weights of a group very near and
lets a few be far off. By half-quadratic splitting the errors get variables of their own, e_i, tied to w - w^
by a quadratic of weight beta; both halves are solved in turn:

    e_i = sign(d_i) max(0, |d_i| - |d_i|^(p - 1) / beta),   d_i = w_i - s (q_i - z)
    z   = mean_i (q_i - (w_i - e_i) / s)

20 times from s = (max - min) / (2^bits - 1) and z = -min / s on, beta growing from 10 by 1 %; the z with the
smallest sum is kept. s does not change, and the range need not hold zero, which need not be exact either. s
and z are stored in float32, the codes are taken against them.

Guaranteed: the sum is no larger than that of the z it starts from, which is among those that the best is kept of;
and each code is that of the nearest number, as clip(rint()) is taken against the stored s and z, so that a weight
between the first and the last of them is off by s / 2 at most. A group of equal weights, or whose s underflows, has s
= 1 and z = -min. Not odd: z is not rounded as 2^bits - 1 - z is. Powers of two do not pass through, as beta has a
unit, that of |w|^(p - 2). A fixed point as a rule, as long as s is normal and both ends of the grid are in use, which
a z that has moved by half a code prevents. More bits are never worse on average for evenly spread weights: they fill
whole steps from min to max, and no z leaves them a smaller sum than the first.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite, join, split, spread

P = 0.7
BETA, GROWTH, STEPS = 10.0, 1.01, 20


class Hqq(NamedTuple):
    """Codes of w's shape; scales and zero points, one for each group."""

    codes: UInt8[np.ndarray, "*batch cols"]
    scales: Float32[np.ndarray, "*batch groups"]
    zeros: Float32[np.ndarray, "*batch groups"]


def quantize(w: Float[np.ndarray, "*batch cols"], *, bits: int, group: int) -> Hqq:
    """Raises ValueError for weights that are not finite, rows that are no whole groups, and bits other than 1 to 8.

    >>> q = quantize(np.array([[1.0, 2.0, 3.0, 4.0]]), bits=2, group=4)
    >>> q.codes, dequantize(q)
    (array([[0, 1, 2, 3]], dtype=uint8), array([[1., 2., 3., 4.]]))
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    highest = 2**bits - 1
    block = (1,) * (w.ndim - 1) + (group,)
    groups = split(finite(w), block)
    lo = np.min(groups, axis=-1)
    scales = ((np.max(groups, axis=-1) - lo) / highest).astype(np.float32)
    scales = np.where(scales == 0, np.float32(1), scales)
    zeros = best = (-lo / scales).astype(np.float32)
    least = np.full(lo.shape, np.inf)
    for step in range(STEPS + 1):
        _, d = nearest(groups, scales, zeros, bits=bits)
        loss = np.sum(np.abs(d) ** P, axis=-1)
        best, least = np.where(loss < least, zeros, best), np.minimum(loss, least)
        zeros = refit(groups, scales, zeros, bits=bits, beta=BETA * GROWTH**step)
    codes, _ = nearest(groups, scales, best, bits=bits)
    return Hqq(join(codes, block).astype(np.uint8), scales, best)


def nearest(
    groups: Float64[np.ndarray, "*grid group"],
    scales: Float32[np.ndarray, "*grid"],
    zeros: Float32[np.ndarray, "*grid"],
    *,
    bits: int,
) -> tuple[Float64[np.ndarray, "*grid group"], Float64[np.ndarray, "*grid group"]]:
    """q and d: the codes, and what they leave."""
    s, z = (a.astype(np.float64)[..., None] for a in (scales, zeros))
    q = np.clip(np.rint(groups / s + z), 0, 2**bits - 1)
    return q, groups - s * (q - z)


def refit(
    groups: Float64[np.ndarray, "*grid group"],
    scales: Float32[np.ndarray, "*grid"],
    zeros: Float32[np.ndarray, "*grid"],
    *,
    bits: int,
    beta: float,
) -> Float32[np.ndarray, "*grid"]:
    """The next z.

    >>> refit(np.array([0.0, 1.0, 5.0]), np.array(1.0, np.float32), np.array(0.0, np.float32), bits=1, beta=10.0)
    array(-0.0219918, dtype=float32)
    """
    q, d = nearest(groups, scales, zeros, bits=bits)
    size = np.abs(d)
    shrunk = size - np.where(size == 0, 1, size) ** (P - 1) / beta
    e = np.sign(d) * np.maximum(shrunk, 0)
    return np.asarray(np.mean(q - (groups - e) / scales.astype(np.float64)[..., None], axis=-1), np.float32)


def dequantize(q: Hqq) -> Float64[np.ndarray, "*batch cols"]:
    """s (q - z)."""
    scales, zeros = (spread(a.astype(np.float64), q.codes.shape) for a in (q.scales, q.zeros))
    return scales * (q.codes - zeros)


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """`bits` bits of every code, the first lowest."""
    return packing.pack(codes, bits=bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """The codes of `pack`."""
    return packing.unpack(packed, bits=bits)
