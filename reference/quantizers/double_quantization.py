r"""Double quantization: the scales of a tensor are quantized, too.

A group of 64 four-bit codes with a float32 scale takes 4.5 bits per weight, or 4.127 with quantized scales
(QLoRA, Dettmers et al., 2023, https://arxiv.org/abs/2305.14314).

    o = mean of the scales     b = max |a - o| in a block of 256     c = the code of the level nearest to (a - o) / b

    a ~ o + b level(c)

a is the scale of a group, b the largest deviation in a block of 256 scales, and c a code of 8 bits. The 256 levels form
a "dynamic" number format (Dettmers, 2015, https://arxiv.org/abs/1511.04561): 0, 1, and evenly spaced numbers of both
signs in each decade from 10^-6 to 10^0, twice as many per decade as in the decade before. So small numbers have fewer
significant digits. All scales of a tensor form one row, which is divided into blocks; the last block may be short.

Guaranteed, where a^ is the dequantized scale, and l <= (a - o) / b <= l' are neighboring levels:

    |a - a^|  <=  b (l' - l) / 2 + 2^-22 (|a| + |o| + b)

The first term is at most 0.0071 b. This includes a quotient between -1 and the lowest level, -0.993. Reasons: The
nearest level is at most half a gap away. Four results are rounded to float32, each with a relative error of u = 2^-24:
a - o, the quotient by b, the product with the level, and the sum with o. Together they give 4 u = 2^-22.

o is the exact mean, rounded to float32. bitsandbytes adds the scales in float32 in a different order, so its o may be a
neighboring number. If all scales of a tensor are equal, b = 0, and they are exact. Powers of two: the scales 2^k a have
the same codes as a, with 2^k o and 2^k b. Quantized scales are not a fixed point, because their mean differs from o.
Sign: Q(-a) is not -Q(a), because 1 is a level and -1 is not. That does no harm, because scales of weights are never
negative.

A code is a byte, so there is nothing to pack.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, UInt8

BLOCK = 256


class Scales(NamedTuple):
    """Quantized scales: a code for each scale, the largest deviation b of each block of 256, and the mean o."""

    codes: UInt8[np.ndarray, "*grid"]
    tops: Float32[np.ndarray, " blocks"]
    offset: Float32[np.ndarray, ""]


def dynamic_levels() -> Float32[np.ndarray, "256"]:
    """Return the levels in ascending order, each rounded once to float32.

    (bitsandbytes computes 22 of them in float32, with further rounding errors.)

    >>> levels = dynamic_levels()
    >>> levels[127:129], levels[-2:]
    (array([0.0e+00, 5.5e-07], dtype=float32), array([0.99296874, 1.        ], dtype=float32))
    """
    positive = []
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2**decade + 1)
        positive.append(10.0 ** (decade - 6) * (ends[1:] + ends[:-1]) / 2)
    positives = np.concatenate(positive)
    return np.sort(np.concatenate([-positives, positives, [0, 1]])).astype(np.float32)


def quantize(scales: Float32[np.ndarray, "*grid"]) -> Scales:
    """Quantize scales. Raises ValueError if they are not finite.

    >>> q = quantize(np.array([1.0, 2.0, 3.0], np.float32))
    >>> q.offset, q.tops, dequantize(q)
    (array(2., dtype=float32), array([1.], dtype=float32), array([1.00703126, 2.        , 3.        ]))
    """
    if not np.isfinite(scales).all():
        raise ValueError("scales must be finite, but some are NaN or infinite")
    offset = np.float32(np.mean(scales, dtype=np.float64))
    row = scales.reshape(-1) - offset
    tops = np.maximum.reduceat(np.abs(row), np.arange(0, row.size, BLOCK))
    scaled = row * (1 / np.maximum(tops, np.float32(1e-38)))[np.arange(row.size) // BLOCK]
    levels = dynamic_levels()
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled, side="left").astype(np.uint8)
    return Scales(codes.reshape(scales.shape), tops, np.asarray(offset))


def dequantize(q: Scales) -> Float64[np.ndarray, "*grid"]:
    """Return the scales: the mean o, plus each code's level times the largest deviation b of its block."""
    levels = dynamic_levels().astype(np.float64)[q.codes.reshape(-1)]
    scales = np.float64(q.offset) + levels * q.tops.astype(np.float64)[np.arange(levels.size) // BLOCK]
    return scales.reshape(q.codes.shape)
