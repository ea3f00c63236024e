r"""HQQ: a zero point that need not be an integer, fitted without calibration data.

    minimize over z  sum_i |w_i - s (q_i - z)|^p,  p = 0.7        q_i = clip(rint(w_i / s + z), 0, 2^bits - 1)

(Badri & Shaji, 2023, https://mobiusml.github.io/hqq_blog.) With p < 1, most weights of a group get very small errors
and a few may get large ones. w^ = s (q - z) are the dequantized weights. Half-quadratic splitting introduces a variable
e_i for each error w_i - w^_i. A quadratic term with the weight beta keeps e_i near the error. We solve for e and for z
in turn:

    e_i = sign(d_i) max(0, |d_i| - |d_i|^(p - 1) / beta),   d_i = w_i - s (q_i - z)
    z   = mean_i (q_i - (w_i - e_i) / s)

We repeat this 20 times, starting from s = (max - min) / (2^bits - 1) and z = -min / s. beta starts at 10, and is
multiplied by 1.01 each time. s does not change. The result is the z with the smallest sum. The range from min to max
need not include zero, so zero need not be exact. s and z are rounded to float32, and the codes are computed from the
rounded values.

Guaranteed: the sum is at most the sum for the initial z, because the initial z is one of the candidates. Each code is
the nearest one, because it is computed from the stored s and z. So a weight within the range of the grid moves by at
most s / 2. If all weights of a group are equal, or if s underflows, s = 1 and z = -min.

Sign: Q(-w) may differ from -Q(w), where Q(w) = w^, because z and 2^bits - 1 - z round differently. Powers of two: 2^k w
may have different codes from w, because beta has the unit of |w|^(p - 2). Fixed point: quantizing w^ usually gives w^
again, if s is normal and the first and the last code of the group are used. It does not if z has moved by half a code.
More bits do not increase the expected error of evenly spread weights, because these fill whole steps from min to max,
and then no z has a smaller sum than the first.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite, join, split, spread

P = 0.7
BETA, GROWTH, STEPS = 10.0, 1.01, 20


class Hqq(NamedTuple):
    """Codes with the shape of w, and one scale and zero point per group."""

    codes: UInt8[np.ndarray, "*batch cols"]
    scales: Float32[np.ndarray, "*batch groups"]
    zeros: Float32[np.ndarray, "*batch groups"]


def quantize(w: Float[np.ndarray, "*batch cols"], *, bits: int, group: int) -> Hqq:
    """Quantize weights. Raises ValueError if a weight is not finite, a group is incomplete, or bits are outside 1 to 8.

    >>> q = quantize(np.array([[1.0, 2.0, 3.0, 4.0]]), bits=2, group=4)
    >>> q.codes, dequantize(q)
    (array([[0, 1, 2, 3]], dtype=uint8), array([[1., 2., 3., 4.]]))
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, got {bits}")
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
    """Return the nearest codes q, and the errors d = w - s (q - z) of the weights."""
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
    """Compute the next zero point z of each group: one step of half-quadratic splitting.

    >>> refit(np.array([0.0, 1.0, 5.0]), np.array(1.0, np.float32), np.array(0.0, np.float32), bits=1, beta=10.0)
    array(-0.0219918, dtype=float32)
    """
    q, d = nearest(groups, scales, zeros, bits=bits)
    size = np.abs(d)
    shrunk = size - np.where(size == 0, 1, size) ** (P - 1) / beta
    e = np.sign(d) * np.maximum(shrunk, 0)
    return np.asarray(np.mean(q - (groups - e) / scales.astype(np.float64)[..., None], axis=-1), np.float32)


def dequantize(q: Hqq) -> Float64[np.ndarray, "*batch cols"]:
    """Return the weights: scale times (code - zero point)."""
    scales, zeros = (spread(a.astype(np.float64), q.codes.shape) for a in (q.scales, q.zeros))
    return scales * (q.codes - zeros)


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack `bits` bits of every code, the first code in the lowest bits."""
    return packing.pack(codes, bits=bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=bits)
