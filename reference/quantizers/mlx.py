r"""MLX's affine quantizer: evenly spaced numbers, counted from the end of a group's range that is farther from zero.

    n = 2^bits - 1      s0 = max(max_i w_i - min_i w_i, 10^-7 n) / n
    e = the largest or the smallest weight, whichever has the larger magnitude (the largest if they are equal)
    s0 becomes -s0 if e is the largest weight, so that codes count from e towards the other end
    k = rint(e / s0)    s = e / k, b = e    (if k = 0: s = s0, b = 0)
    q_i = clip(rint((w_i - b) / s), 0, n)   w_i ~ s q_i + b

(`mlx.core.quantize` with mode "affine", https://github.com/ml-explore/mlx.) Zero is the code -k. All steps are computed
in float32. After the codes are computed, s and b are rounded to the dtype of the weights. MLX calls s a scale and b a
bias. A scale is negative if the largest weight is farther from zero.

Guaranteed, if max - min does not overflow float32. u is 2^-24, and t is the largest relative error of rounding s and b
to the dtype of the weights:

    |w - (s q + b)|  <=  |s| (1 + n t) + t |b| + u (8 n |s| + 2 |b|)

Reasons: A weight that is not clipped moves by at most half a step, |s| / 2. But changing the step from s0 to s = e / k
may leave the last code up to one step before the other end of the group. It is at most one step, because |e / s0| is at
least n / 2, and k differs from e / s0 by at most 1/2.

Q(w) = s q + b are the dequantized weights. Sign: Q(-w) = -Q(w), because -w has the same codes, and -s and -b. The
exception is a group with largest and smallest weights of equal magnitude. Powers of two: the weights 2^k w have the
same codes as w, with 2^k s and 2^k b, while s0 is above its minimum. Quantized weights are not a fixed point in
general, because the end of the group that is nearer to zero moves, and this changes s0.

In memory, the codes of a row are a stream of bits, the lowest bits first, stored in uint32 words.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Integer, UInt8, UInt32

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite, join, split, spread

LEAST = np.float32(1e-7)
BITS = (2, 3, 4, 5, 6, 8)


class Mlx(NamedTuple):
    """Codes from 0 to 2^bits - 1, and a float32 scale and bias per group, not yet rounded to the weights' dtype."""

    codes: UInt8[np.ndarray, "*batch cols"]
    scales: Float32[np.ndarray, "*batch groups"]
    biases: Float32[np.ndarray, "*batch groups"]


def quantize(w: Float[np.ndarray, "*batch cols"], *, bits: int, group: int) -> Mlx:
    """Quantize weights. Raises ValueError if a weight is not finite, a group is incomplete, or bits are not in `BITS`.

    >>> q = quantize(np.array([[-3.0, 0.0, 6.0, 12.0]]), bits=4, group=4)
    >>> q.codes, q.scales, q.biases
    (array([[15, 12,  6,  0]], dtype=uint8), array([[-1.]], dtype=float32), array([[12.]], dtype=float32))
    """
    if bits not in BITS:
        raise ValueError(f"MLX's codes have {', '.join(map(str, BITS))} bits, not {bits}")
    block, last = (1,) * (w.ndim - 1) + (group,), np.float32(2**bits - 1)
    groups = split(finite(w).astype(np.float32), block)
    low, high = np.min(groups, axis=-1), np.max(groups, axis=-1)
    from_low = np.abs(low) > np.abs(high)
    steps = np.maximum((high - low) / last, LEAST)
    steps = np.where(from_low, steps, -steps)
    ends = np.where(from_low, low, high)
    counts = np.rint(ends / steps)
    scales = np.where(counts == 0, steps, ends / np.where(counts == 0, np.float32(1), counts))
    biases = np.where(counts == 0, np.float32(0), ends)
    codes = np.clip(np.rint((groups - biases[..., None]) / scales[..., None]), 0, last)
    return Mlx(join(codes, block).astype(np.uint8), scales, biases)


def dequantize(q: Mlx) -> Float64[np.ndarray, "*batch cols"]:
    """Return the weights: scale times code, plus bias."""
    scales, biases = (spread(a.astype(np.float64), q.codes.shape) for a in (q.scales, q.biases))
    return q.codes * scales + biases


def pack(codes: Integer[np.ndarray, "*batch codes"], *, bits: int) -> UInt32[np.ndarray, "*batch words"]:
    """Pack codes into words. Raises ValueError if the codes of a row do not fill whole words.

    >>> [hex(word) for word in pack(np.arange(8, dtype=np.uint8), bits=4)]
    ['0x76543210']
    """
    packed = packing.pack(codes, bits=bits)
    if packed.shape[-1] % 4:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill words of 32 bits")
    return packed.view("<u4").astype(np.uint32)


def unpack(words: UInt32[np.ndarray, "*batch words"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(np.ascontiguousarray(words).astype("<u4").view(np.uint8), bits=bits)
