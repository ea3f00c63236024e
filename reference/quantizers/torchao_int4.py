r"""torchao's int4: evenly spaced numbers from the smallest weight of a group to the largest; zero need not be one.

    lo = min_i w_i      s = max(max_i w_i - lo, 10^-6) / 15      q_i = clip(rint((w_i - lo) / s), 0, 15) - 8
    z = lo + 8 s        w_i ~ q_i s + z

(Int4WeightOnlyConfig of https://github.com/pytorch/ao, which rounds with int4_row_quantize_zp of
https://github.com/meta-pytorch/MSLK.) Everything is computed in float32. After the codes are computed, s and z are
rounded to the dtype of the weights, usually bfloat16. z is a weight, not a code as in `affine`.

Guaranteed, if max - min is a float32 number, s and z have relative rounding errors of at most t, and u = 2^-24:

    |w - (q s + z)|  <=  s (1/2 + 8 t) + t |z| + u (100 s + 2 |z|)

This is half a step, plus the rounding errors of s and z, with |q| <= 8. In float32, w - lo and its quotient have errors
of 15 u s each, the last code may be 30 u s short, z has an error of u (8 s + |z|), and a wider w one of u (24 s + |z|).
Q(-w) may differ from -Q(w), because codes count from the smallest weight. Quantized weights are not a fixed point,
because z and s are rounded. Multiplying w by a power of two multiplies only s and z, while s is above its minimum.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int8

from llamaspec.reference.quantizers.blocks import finite, join, split, spread

LEAST = np.float32(1e-6)


class TorchaoInt4(NamedTuple):
    """Codes from -8 to 7; for each group a scale and the weight of code 0, before rounding."""

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
    """Return q s + z."""
    scales, zeros = (spread(a.astype(np.float64), q.codes.shape) for a in (q.scales, q.zeros))
    return q.codes * scales + zeros
