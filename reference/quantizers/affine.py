r"""Affine integers: evenly spaced numbers from the smallest weight of a block to the largest.

    N = 2^bits - 1        lo = min(0, min_i w_i)        hi = max(0, max_i w_i)
    s = (hi - lo) / N     z = rint(-lo / s)             q_i = clip(rint(w_i / s) + z, 0, N)      w_i ~ s (q_i - z)

(Jacob et al., 2018, https://arxiv.org/abs/1712.05877; "asymmetric".) The range from lo to hi always includes zero, and
the zero point z is an integer. So the weight zero is exact. s is rounded to float32 first, and z and the codes are
computed from the rounded s. ONNX's QuantizeLinear and DynamicQuantizeLinear do the same, including ties to even. AWQ
and GPTQ store such numbers.

Guaranteed, for weights of float32 or narrower:  |w - s (q - z)| <= s / 2 + N (2 u s + 2^-150),  u = 2^-24

Reasons: A weight that is not clipped moves by at most half a step, s / 2. Rounding z moves the grid by at most half a
step, so the grid may end up to half a step before the largest or the smallest weight. That weight is then clipped, and
also moves by at most half a step. The second term of the bound is for the rounding of s to float32: a relative error of
u, or an absolute error of 2^-150 if s is denormal. If s underflows to 0, all dequantized weights are 0. A kernel that
computes w / s in float32 gets the same code, unless w / s is within u |w / s| of a tie.

Q(w) = s (q - z) are the dequantized weights. Powers of two: the weights 2^k w have the same codes and zero points as w,
and the scale 2^k s, while both scales are normal. Fixed point and sign: Q(Q(w)) = Q(w) and Q(-w) = -Q(w), unless lo / s
is within 4 N u of a tie. In this case, rint may leave the last or the first code unused. More bits: `symmetric` says
under which condition one more bit does not increase the expected error. The same is true here, except for the smallest
and the largest weight of a block. The reason is that each other weight moves to the nearest multiple of s, for every z.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Integer, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite, join, split, spread


class Affine(NamedTuple):
    """Codes with the shape of w, and one scale and zero point per block."""

    codes: UInt8[np.ndarray, "*shape"]
    scales: Float32[np.ndarray, "*grid"]
    zeros: UInt8[np.ndarray, "*grid"]


def quantize(w: Float[np.ndarray, "*shape"], *, bits: int, block: tuple[int, ...]) -> Affine:
    """Quantize to uint8 codes. Each `block` (see `blocks`) has a uint8 zero point and a float32 scale.

    Raises ValueError for weights that are not finite, a block that does not divide the shape, or bits outside
    2 to 8.

    >>> q = quantize(np.array([[-1.0, 0.0, 0.5, 2.0]]), bits=2, block=(1, 4))
    >>> q.codes, q.scales, q.zeros
    (array([[0, 1, 1, 3]], dtype=uint8), array([[1.]], dtype=float32), array([[1]], dtype=uint8))
    >>> dequantize(q)
    array([[-1.,  0.,  0.,  2.]])
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"affine codes have 2 to 8 bits, got {bits}")
    highest = 2**bits - 1
    blocks = split(finite(w), block)
    lo = np.minimum(np.min(blocks, axis=-1), 0)
    hi = np.maximum(np.max(blocks, axis=-1), 0)
    scales = ((hi - lo) / highest).astype(np.float32)
    zeros = encode(-lo, scales, np.zeros_like(lo), lowest=0, highest=highest)
    codes = encode(blocks, scales[..., None], zeros[..., None], lowest=0, highest=highest)
    return Affine(join(codes, block).astype(np.uint8), scales, zeros.astype(np.uint8))


def dequantize(q: Affine) -> Float64[np.ndarray, "*shape"]:
    """Return the weights: scale times (code - zero point). float64 holds these products exactly."""
    zeros, scales = (spread(a.astype(np.float64), q.codes.shape) for a in (q.zeros, q.scales))
    return (q.codes - zeros) * scales


def encode(
    w: Float64[np.ndarray, "*shape"],
    scales: Float[np.ndarray, "*#shape"],
    zeros: Float[np.ndarray, "*#shape"],
    *,
    lowest: int,
    highest: int,
) -> Float64[np.ndarray, "*shape"]:
    """Compute the codes of `w` on a fixed grid: clip(rint(w / s) + z, lowest, highest).

    If a scale is 0, its codes are z.

    >>> encode(np.array([0.5, 1.5, 9.0]), np.array([1.0]), np.array([1.0]), lowest=0, highest=3)
    array([1., 3., 3.])
    """
    divisors = np.where(scales == 0, np.inf, scales.astype(np.float64))
    return np.clip(np.rint(w / divisors) + zeros, lowest, highest)


def pack(codes: Integer[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack `bits` bits of every code, the first code in the lowest bits."""
    return packing.pack(codes, bits=bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`.

    >>> unpack(pack(np.array([15, 1], np.uint8), bits=4), bits=4)
    array([15,  1], dtype=uint8)
    """
    return packing.unpack(packed, bits=bits)
