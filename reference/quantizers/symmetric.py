r"""Symmetric integers: the step of a block is its largest magnitude divided by the largest code.

    N = 2^(bits - 1) - 1        s = max_i |w_i| / N        q_i = rint(w_i / s)        w_i ~ s q_i

(Jacob et al., 2018, https://arxiv.org/abs/1712.05877, with a zero point of 0; "absmax".) Zero is exact. The code -N - 1
is not used. So Q(-w) = -Q(w), where Q(w) = s q are the dequantized weights. The largest weight keeps its value, up to
the rounding of s. s is rounded to float32, and the codes are computed from the rounded s.

Guaranteed, for weights of float32 or narrower:  |w - s q| <= max(s / 2, N 2^-150)

Reasons: A normal s has a relative error of at most u = 2^-24. So |w| / s <= N (1 + 2 u), and no code is clipped. The
bound is exactly s / 2, because we divide in float64: the quotient of two float32 numbers is never so near to a tie that
float64 rounds it to the tie. A denormal s has an error of up to 2^-150, and the largest weights may be clipped. If all
weights of a block are 0, or if s underflows to 0, the codes are 0.

Ties go to the even code. A kernel that divides in float32 gets the same code, unless w / s is within u |w / s| of a
tie. While s is normal, two laws hold. Powers of two: the weights 2^k w have the same codes as w, and the scale 2^k s.
Fixed point: Q(Q(w)) = Q(w), because the largest magnitude of Q(w) is N s, and N s / N is s again.

More bits can make a single weight worse, but not the average. Suppose that all weights of a block except the largest
follow a symmetric distribution with a density that does not increase with |w|. Then one more bit does not increase the
expected squared error. Proof: Such a distribution is a mixture of uniform distributions on [-a, a] (Khinchine), so
consider a single a. Let I be the integral of the squared error from 0 to a. If a <= s / 2, every weight becomes 0, and
I = a^3 / 3. No grid that contains 0 has a larger I. If a > s / 2, I differs from a s^2 / 12 by at most 0.0161 s^3. One
more bit divides s by 2 or more, which lowers a s^2 / 12 by more than these differences.
"""

import numpy as np
from jaxtyping import Float, Float64, Int8, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite, join, split, spread


def largest_code(bits: int) -> int:
    """Return N, the largest code. Raises ValueError unless 2 <= bits <= 8.

    >>> [largest_code(bits) for bits in (2, 4, 8)]
    [1, 7, 127]
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"symmetric codes have 2 to 8 bits, got {bits}")
    return 2 ** (bits - 1) - 1


def quantize(w: Float[np.ndarray, "*shape"], *, bits: int, block: tuple[int, ...]) -> Quantized:
    """Quantize to int8 codes and float32 scales, one per `block` (see `blocks`).

    Raises ValueError for weights that are not finite, a block that does not divide the shape, or bits outside 2 to 8.

    >>> q = quantize(np.array([[2.54, -1.27, 0.0, 0.0]]), bits=8, block=(1, 2))
    >>> q.codes, q.scales
    (array([[127, -64,   0,   0]], dtype=int8), array([[0.02, 0.  ]], dtype=float32))
    """
    largest = largest_code(bits)
    blocks = split(finite(w), block)
    scales = (np.max(np.abs(blocks), axis=-1) / largest).astype(np.float32)
    divisors = np.where(scales == 0, np.inf, scales)[..., None].astype(np.float64)
    codes = np.rint(blocks / divisors).clip(-largest, largest)
    return Quantized(join(codes.astype(np.int8), block), scales)


def dequantize(q: Quantized) -> Float64[np.ndarray, "*shape"]:
    """Return each code times the scale of its block. float64 holds these products exactly.

    >>> dequantize(Quantized(np.array([[127, -64]], np.int8), np.array([[0.5]], np.float32)))
    array([[ 63.5, -32. ]])
    """
    return q.codes * spread(q.scales.astype(np.float64), q.codes.shape)


def pack(codes: Int8[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack `bits` bits of every code in two's complement, the first code in the lowest bits."""
    return packing.pack(codes, bits=bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> Int8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`.

    >>> unpack(pack(np.array([-7, 7], np.int8), bits=4), bits=4)
    array([-7,  7], dtype=int8)
    """
    return packing.signed(packing.unpack(packed, bits=bits), bits=bits)
