r"""NF4 and FP4: four-bit codebooks for blocks scaled to [-1, 1].

    a = max_i |w_i|, in float32        q_i = the level nearest to w_i / a        w_i ~ a level(q_i)

(QLoRA, Dettmers et al., 2023, https://arxiv.org/abs/2305.14314.) NF4's levels are 0 and 15 quantiles of the normal
distribution, scaled to [-1, 1]. d = 1 - (1/32 + 1/30) / 2 avoids the infinite quantiles at 0 and 1. The 8 positive
levels are the quantiles of evenly spaced probabilities from d down to 1/2, without 1/2. The 7 negative levels are the
quantiles of evenly spaced probabilities from 1 - d up to 1/2, without 1/2. Normally distributed weights use all levels
about equally often. This is the table in the paper's appendix E and in bitsandbytes. The paper's equation (4) is
different. Its levels are means of neighboring quantiles, (Q(i / 17) + Q((i + 1) / 17)) / 2, where Q(p) is the quantile
of probability p, and none of them is 0.

FP4's levels are the numbers of a float with one bit of mantissa: 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1, and their
negatives.

As in bitsandbytes, w is multiplied by the float32 reciprocal of max(a, 1e-38). Ties go to the lower level, with
midpoints rounded to float32. (bitsandbytes writes some zeros of FP4 as -0.)

Guaranteed, where w^ is the dequantized weight, and l <= w / a <= l' are neighboring levels: |w - w^| <= a (l' - l) / 2
+ 3 2^-23 a. If a < 1e-38, only |w - w^| <= a is guaranteed. Reasons: The nearest level is at most half a gap away. The
reciprocal, the product with it and the midpoint each have a rounding error of at most 2^-24, relative to numbers up to
about 1. The widest gap is 0.304 for NF4, and 1/3 for FP4. 0 is a level, so zeros are exact. 1 and -1 are levels, so the
weight of largest magnitude in a block is exact in both formats.

While a is normal, two laws hold. Fixed point: quantizing w^ gives the same codes and a. Powers of two: the weights 2^k
w have the same codes as w, and 2^k a. A change of sign is not a law. Let Q(w) = w^: in NF4, Q(-w) may differ from
-Q(w). In FP4, Q(-w) = -Q(w), unless w / a is midway between two levels.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite, join, split, spread

SMALLEST = np.float32(1e-38)


@dataclass(frozen=True, eq=False)
class Codebook:
    """16 float32 levels, in the order of their codes. The largest magnitude is 1."""

    levels: Float32[np.ndarray, "16"]
    order: np.ndarray = field(init=False)  # codes in the order of levels, without -0

    def __post_init__(self) -> None:
        _, first = np.unique(self.levels, return_index=True)
        object.__setattr__(self, "order", first.astype(np.uint8))

    def quantize(self, w: Float[np.ndarray, "*batch cols"], *, group: int) -> Quantized:
        """Quantize to uint8 codes, and a float32 scale a for each `group` of a row.

        Raises ValueError for weights that are not finite, or incomplete groups.

        >>> q = NF4.quantize(np.array([[2.0, -2.0, 0.0, 1.0]]), group=4)
        >>> q.codes, q.scales
        (array([[15,  0,  7, 12]], dtype=uint8), array([[2.]], dtype=float32))
        """
        block = (1,) * (w.ndim - 1) + (group,)
        blocks = split(finite(w).astype(np.float32), block)
        tops = np.max(np.abs(blocks), axis=-1)
        scaled = blocks * (1 / np.maximum(tops, SMALLEST))[..., None]
        ordered = self.levels[self.order]
        places = np.searchsorted((ordered[1:] + ordered[:-1]) / 2, scaled, side="left")
        return Quantized(join(self.order[places], block), tops)

    def dequantize(self, q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
        """Return the level of each code times the scale of its block. float64 holds these products exactly."""
        return self.levels.astype(np.float64)[q.codes] * spread(q.scales.astype(np.float64), q.codes.shape)


def pack(codes: UInt8[np.ndarray, "*batch codes"]) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack two codes per byte, the first in the high half.

    >>> [hex(byte) for byte in pack(np.array([1, 15], np.uint8))]
    ['0x1f']
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} codes of 4 bits do not fill bytes")
    return packing.pack(codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape), bits=4)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"]) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    codes = packing.unpack(packed, bits=4)
    return codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)


# The paper's table (appendix E) was computed in float32; float64 quantiles are within 2^-22 of it.
_BELOW = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0]
_ABOVE = [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
_FP4 = np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
NF4 = Codebook(np.array(_BELOW + _ABOVE, np.float32))
FP4 = Codebook(np.concatenate([_FP4, -_FP4]))
