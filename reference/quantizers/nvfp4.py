r"""NVFP4: e2m1 in blocks of 16, with scales in e4m3.

    g = max |w| / (448 6)                          one per tensor, in float32
    s = e4m3(max_i |w_i| / (6 g))                  one per block, in a byte
    q_i = e2m1(w_i / (s g))        w_i ~ g s q_i

(NVIDIA, 2025, https://arxiv.org/abs/2509.25149; `minifloat` defines both formats and their rounding.) g brings the
scales of all blocks into the range of e4m3: the largest s is 448. If the weights of a block are so small that s is
rounded to 0, they all become 0. We compute products and quotients in float64. torchao multiplies by float32
reciprocals, and its s is at least 2^-6.

Guaranteed, where s' is s before rounding:

    |w - g s q|  <=  max(|w| / 5, g s / 4) + 6 g |s - s'|        |s - s'| <= max(2^-4 s', 2^-10) + 448 2^-23

Reasons: The first term is half a step of e2m1. The second term is for the clipping of the largest weight when s is
rounded down. 448 2^-23 is for the rounding of g, if g is normal.

Q(w) = g s q are the dequantized weights. Fixed point: Q(Q(w)) = Q(w) if no s is denormal in e4m3. In this case s has a
relative rounding error of at most 1/16, so the largest code of every block is 6 and gives the same s again. Sign: Q(-w)
= -Q(w). Powers of two: the weights 2^k w have the same codes and s as w, and 2^k g.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import finite, join, split, spread
from llamaspec.reference.quantizers.minifloat import E2M1, E4M3

BLOCK = 16


class Nvfp4(NamedTuple):
    """A quantized tensor: e2m1 codes, an e4m3 scale s for each block, and one float32 scale g."""

    codes: UInt8[np.ndarray, "*batch cols"]
    scales: UInt8[np.ndarray, "*batch blocks"]
    scale: Float32[np.ndarray, ""]


def quantize(w: Float[np.ndarray, "*batch cols"]) -> Nvfp4:
    """Quantize weights. Raises ValueError for weights that are not finite, or incomplete blocks of 16.

    >>> q = quantize(np.repeat([[2688.0, -6.0]], 16, axis=1))
    >>> q.scale, E4M3.decode(q.scales), dequantize(q)[0, [0, 16]]
    (array(1., dtype=float32), array([[448.,   1.]]), array([2688.,   -6.]))
    """
    block = (1,) * (w.ndim - 1) + (BLOCK,)
    blocks = split(finite(w), block)
    tops = np.max(np.abs(blocks), axis=-1)
    scale = np.float32(np.max(tops) / (E4M3.largest * E2M1.largest))
    g = np.float64(scale)
    scales = E4M3.encode(tops / (E2M1.largest * (g or np.inf)))
    steps = E4M3.decode(scales)[..., None] * g
    codes = E2M1.encode(blocks / np.where(steps == 0, np.inf, steps))
    return Nvfp4(join(codes, block), scales, np.asarray(scale))


def dequantize(q: Nvfp4) -> Float64[np.ndarray, "*batch cols"]:
    """Return each code's number times the scales of its block and of the tensor, exactly."""
    return E2M1.decode(q.codes) * spread(E4M3.decode(q.scales) * np.float64(q.scale), q.codes.shape)


def pack(codes: UInt8[np.ndarray, "*batch cols"]) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack two codes per byte, the first in the low half."""
    return packing.pack(codes, bits=4)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"]) -> UInt8[np.ndarray, "*batch cols"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=4)
