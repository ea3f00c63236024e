r"""Microscaling formats: MXFP8, MXFP6 and MXFP4.

(OCP MX v1.0; Rouhani et al., 2023, https://arxiv.org/abs/2310.10537.) A block is 32 consecutive weights. Each weight
has a code, a minifloat v (see `minifloat`). The block has a common scale, a power of two, stored as a byte e ("e8m0"):

    w ~ 2^(e - 127) v        e - 127 = floor(log2(max_i |w_i|)) - emax        v_i = round(w_i / 2^(e - 127))

emax is the exponent of the format's largest number, and `largest` is that number. So the largest scaled weight of a
block is at least 2^emax and below 2^(emax + 1). It may exceed `largest`. Then it saturates, i.e. becomes `largest`.
This is the OCP's rule (`floor_exponent`). NVIDIA's rule takes the smallest power of two without saturation
(`ceil_exponent`):

    e - 127 = ceil(log2(max_i |w_i| / largest))

If the OCP's scale saturates even slightly, NVIDIA's scale is twice as large, and the other weights of the block lose a
bit. Here both rules are computed exactly, and e is at least 0. A floating-point logarithm, or a cast to e8m0, would
round some exponents up.

Guaranteed:

    |w - 2^(e - 127) v|  <=  max(c |w|, 2^(e - 127) 2^-(bias + m))        c = 2^-(m+1)

For `floor_exponent`, c is 1 - largest / 2^(emax + 1) instead: 1/8 (e4m3, e5m2, e3m2), 1/16 (e2m3), 1/4 (e2m1). Reasons:
2^-(m+1) |w| is half a unit in the last place of w. A weight that saturates is below 2^(emax + 1) in units of 2^(e -
127), and becomes `largest`. The second number of the maximum is half a subnormal step, also for blocks far below
2^-127.

Q(w) are the dequantized weights. A block of zeros has e = 0. Powers of two: the weights 2^k w have the same codes as w,
and e + k, within the range of e. Sign: Q(-w) = -Q(w). Fixed point: Q(Q(w)) = Q(w). With `floor_exponent`, the largest
weight of a block keeps its exponent, so codes and e stay, too. With `ceil_exponent`, codes and e may change: if the
largest weight was rounded down so that a smaller power of two fits, the finer grid of that power contains all numbers
of the block.

To compare formats with `floor_exponent`, divide the numbers of each format by its 2^emax. If format A then contains all
numbers of format B, the error of A is at most the error of B for every weight. So e2m3 and e3m2 are at least as good as
e2m1, and e4m3 and e5m2 at least as good as e3m2.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float64, Int, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite, join, split
from llamaspec.reference.quantizers.minifloat import Minifloat

BLOCK = 32
BIAS = 127  # bias of e; 255 is a NaN, which our quantizers never write

Exponent = Callable[[np.ndarray, Minifloat], np.ndarray]


def floor_exponent(top: Float64[np.ndarray, "*grid"], to: Minifloat) -> Int[np.ndarray, "*grid"]:
    """Return floor(log2(top)) - emax, or the smallest exponent if `top` is 0.

    `top` is a block's largest magnitude, and emax the exponent of the format's largest number.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> floor_exponent(np.array([6.0, 7.9, 8.0]), E2M1).tolist()
    [0, 0, 1]
    """
    return np.where(top == 0, -BIAS, np.frexp(top)[1] - math.frexp(to.largest)[1])


def ceil_exponent(top: Float64[np.ndarray, "*grid"], to: Minifloat) -> Int[np.ndarray, "*grid"]:
    """Return ceil(log2(top / largest)), or the smallest exponent if `top` is 0.

    `top` is a block's largest magnitude, and `largest` the format's largest number.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> ceil_exponent(np.array([6.0, 7.9, 8.0]), E2M1).tolist()
    [0, 1, 1]
    """
    exponents = floor_exponent(top, to)
    return np.where(np.ldexp(to.largest, exponents) < top, exponents + 1, exponents)


def quantize(w: Float[np.ndarray, "*batch cols"], *, to: Minifloat, exponent: Exponent = floor_exponent) -> Quantized:
    """Quantize to uint8 codes, and a scale byte e for each block of 32. `exponent` is the rule for e.

    Raises ValueError for weights that are not finite, or incomplete blocks of 32.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> q = quantize(np.array([[7.0, -0.6] * 16]), to=E2M1)
    >>> q.scales, dequantize(q, to=E2M1)[0, :2]
    (array([[127]], dtype=uint8), array([ 6. , -0.5]))
    """
    block = (1,) * (w.ndim - 1) + (BLOCK,)
    blocks = split(finite(w), block)
    exponents = np.maximum(exponent(np.max(np.abs(blocks), axis=-1), to), -BIAS)
    codes = to.encode(np.ldexp(blocks, -exponents[..., None]))
    return Quantized(join(codes, block), (exponents + BIAS).astype(np.uint8))


def dequantize(q: Quantized, *, to: Minifloat) -> Float64[np.ndarray, "*batch cols"]:
    """Return the weights exactly: the number of each code times 2^(e - 127), where e is the scale byte of its block.

    If e is 255 or a code is NaN, the weight is NaN.
    """
    exponents = np.repeat(q.scales.astype(np.int32), BLOCK, axis=-1)
    return np.where(exponents == 255, np.nan, np.ldexp(to.decode(q.codes), exponents - BIAS))


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack the bits of all codes, lowest bits first. The first of two e2m1 codes is in the low half of the byte."""
    return packing.pack(codes, bits=to.bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=to.bits)
