r"""Binary weights: one sign per weight, one scale per row.

    a = mean_i |w_i|        b_i = sign(w_i), +1 for 0        w ~ a b

(XNOR-Net, Rastegari et al., 2016, https://arxiv.org/abs/1603.05279.) Among all a and all signs, these have the
smallest sum of squared errors, which is guaranteed to be

    sum_i (w_i - a b_i)^2 = sum_i w_i^2 - n a^2        (and n (2^-24 a)^2 for the rounding of a to float32)

Here n is the length of the row. For any a and any signs b_i, the sum is sum_i w_i^2 - 2 a sum_i b_i w_i + n a^2. It is
smallest if b_i w_i = |w_i| for every i, and a is the mean of |w_i|.

Q(w) = a b are the dequantized weights. Powers of two: the weights 2^k w have the same signs as w, and the scale 2^k a,
while both scales are normal. Sign: Q(-w) = -Q(w) if no weight is 0. Fixed point: Q(Q(w)) = Q(w), because n a is exact
in float64, so the mean of n magnitudes a is exactly a. A row of zeros has a = 0.
"""

import numpy as np
from jaxtyping import Float, Float64, Int8, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite


def quantize(w: Float[np.ndarray, "*batch cols"]) -> Quantized:
    """Quantize to int8 codes (-1 or 1) and float32 scales [*batch, 1]. Raises ValueError unless all weights are finite.

    >>> q = quantize(np.array([[1.0, -2.0, 0.0, 3.0]]))
    >>> q.codes, q.scales
    (array([[ 1, -1,  1,  1]], dtype=int8), array([[1.5]], dtype=float32))
    """
    w = finite(w)
    scales = np.mean(np.abs(w), axis=-1, keepdims=True).astype(np.float32)
    return Quantized(np.where(w < 0, -1, 1).astype(np.int8), scales)


def dequantize(q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
    """Return each code times the scale of its row, exactly."""
    return q.codes * q.scales.astype(np.float64)


def pack(codes: Int8[np.ndarray, "*batch codes"]) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack one bit per code: 1 for +1 and 0 for -1. The first code is in the lowest bit of the first byte.

    >>> pack(np.array([1, -1, -1, -1, -1, -1, -1, 1], np.int8))
    array([129], dtype=uint8)
    """
    return packing.pack((codes > 0).astype(np.uint8), bits=1)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"]) -> Int8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=1).astype(np.int8) * np.int8(2) - np.int8(1)
