r"""torchao's int4: 16 evenly spaced numbers from the smallest weight of a group to the largest.

Zero need not be among them.

    lo = min_i w_i      s = max(max_i w_i - lo, 10^-6) / 15      q_i = clip(rint((w_i - lo) / s), 0, 15) - 8
    z = lo + 8 s        w_i ~ q_i s + z

(Int4WeightOnlyConfig of https://github.com/pytorch/ao, which rounds with int4_row_quantize_zp of
https://github.com/meta-pytorch/MSLK.) Everything is computed in float32. After the codes are computed, s and z are
rounded to the dtype of the weights, usually bfloat16. z is the weight of code 0. (In `affine`, z is the code of weight
0.)

Guaranteed, if max - min does not overflow float32. u is 2^-24, and t is the largest relative error of rounding s and z
to the dtype of the weights:

    |w - (q s + z)|  <=  s (1/2 + 8 t) + t |z| + u (100 s + 2 |z|)

Reasons: Half a step is s / 2. Rounding s changes q s by at most 8 t s, because |q| <= 8, and rounding z changes it by t
|z|. The last term collects the float32 errors: 15 u s each for w - lo and its quotient, 30 u s because the last code
may not reach the largest weight, u (8 s + |z|) for z, and u (24 s + |z|) if w has more bits than float32.

Sign: Q(-w) may differ from -Q(w), where Q(w) = q s + z, because codes count from the smallest weight. Quantized weights
are not a fixed point, because s and z are rounded. Powers of two: the weights 2^k w have the same codes as w, with 2^k
s and 2^k z, while s is above its minimum.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int8

from llamaspec.reference.quantizers.blocks import finite, join, split, spread

LEAST = np.float32(1e-6)


class TorchaoInt4(NamedTuple):
    """Codes from -8 to 7, and float32 s and z for each group, not yet rounded to the dtype of the weights."""

    codes: Int8[np.ndarray, "*batch cols"]
    scales: Float32[np.ndarray, "*batch groups"]
    zeros: Float32[np.ndarray, "*batch groups"]


def quantize(w: Float[np.ndarray, "*batch cols"], *, group: int) -> TorchaoInt4:
    """Quantize weights. Raises ValueError for weights that are not finite, and incomplete groups.

    >>> q = quantize(np.array([[1.0, 2.0, 3.0, 16.0]]), group=4)
    >>> q.codes, q.scales, q.zeros
    (array([[-8, -7, -6,  7]], dtype=int8), array([[1.]], dtype=float32), array([[9.]], dtype=float32))
    """
    block = (1,) * (w.ndim - 1) + (group,)
    groups = split(finite(w).astype(np.float32), block)
    low = np.min(groups, axis=-1)
    scales = np.maximum(np.max(groups, axis=-1) - low, LEAST) / np.float32(15)
    codes = np.clip(np.rint((groups - low[..., None]) / scales[..., None]), 0, 15) - 8
    return TorchaoInt4(join(codes, block).astype(np.int8), scales, low + scales * np.float32(8))


def dequantize(q: TorchaoInt4) -> Float64[np.ndarray, "*batch cols"]:
    """Return the weights: code times scale, plus z (the weight of code 0)."""
    scales, zeros = (spread(a.astype(np.float64), q.codes.shape) for a in (q.scales, q.zeros))
    return q.codes * scales + zeros
