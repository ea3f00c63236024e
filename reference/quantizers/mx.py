r"""Microscaling formats: MXFP8, MXFP6 and MXFP4.

32 consecutive weights are minifloats with a common power of two as scale, stored in a byte e ("e8m0") (OCP MX
v1.0; Rouhani et al., 2023, https://arxiv.org/abs/2310.10537; see `minifloat`):

    w ~ 2^(e - 127) v        e - 127 = floor(log2(max_i |w_i|)) - emax        v_i = round(w_i / 2^(e - 127))

emax is the exponent of the format's largest number. So the largest scaled weight of a block is at least 2^emax
and below 2^(emax + 1). The format ends before 2^(emax + 1), so this weight may saturate. This is the OCP's rule
(`floor_exponent`). NVIDIA's rule takes the smallest power of two without saturation (`ceil_exponent`),

    e - 127 = ceil(log2(max_i |w_i| / largest))

which costs a bit for blocks that nearly fit. Both are computed exactly here, and e is at least 0. A floating-point
logarithm, or a cast to e8m0, would round some exponents up.

Guaranteed:

    |w - 2^(e - 127) v|  <=  max(c |w|, 2^(e - 127) 2^-(bias + m))        c = 2^-(m+1)

but with c = 1 - largest / 2^(emax + 1) for `floor_exponent`: 1/8 (e4m3, e5m2, e3m2), 1/16 (e2m3), 1/4 (e2m1).
c |w| is half a unit in the last place of w. A saturated w is below 2^(emax + 1) in units of 2^(e - 127), and becomes
`largest`. The second term is half a subnormal step, also for blocks far below 2^-127. Zeros have e = 0. Multiplying w
by a power of two changes only e, and leaves the codes unchanged. Q(-w) = -Q(w). Quantized weights are a fixed point of
`floor_exponent`, because their largest keeps its exponent. They are also one of `ceil_exponent`, although codes and e
may change: if the largest is rounded down so that a smaller power fits, the finer grid of that power contains all the
numbers.

With `floor_exponent`, a format is never better for any weight than another one that contains all its numbers (both
divided by 2^emax). So e2m3 and e3m2 are at least as good as e2m1, and e4m3 and e5m2 at least as good as e3m2.
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
    """Return floor(log2(top)) - emax, or the smallest exponent for 0.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> floor_exponent(np.array([6.0, 7.9, 8.0]), E2M1).tolist()
    [0, 0, 1]
    """
    return np.where(top == 0, -BIAS, np.frexp(top)[1] - math.frexp(to.largest)[1])


def ceil_exponent(top: Float64[np.ndarray, "*grid"], to: Minifloat) -> Int[np.ndarray, "*grid"]:
    """Return ceil(log2(top / largest)), or the smallest exponent for 0.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> ceil_exponent(np.array([6.0, 7.9, 8.0]), E2M1).tolist()
    [0, 1, 1]
    """
    exponents = floor_exponent(top, to)
    return np.where(np.ldexp(to.largest, exponents) < top, exponents + 1, exponents)


def quantize(w: Float[np.ndarray, "*batch cols"], *, to: Minifloat, exponent: Exponent = floor_exponent) -> Quantized:
    """Quantize to codes, and a byte e for each block of 32.

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
    """Return 2^(e - 127) v, exactly. If e is 255 or a code is NaN, the weight is NaN."""
    exponents = np.repeat(q.scales.astype(np.int32), BLOCK, axis=-1)
    return np.where(exponents == 255, np.nan, np.ldexp(to.decode(q.codes), exponents - BIAS))


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack the bits of codes, lowest first: the first of two e2m1 codes is in the low half of the byte."""
    return packing.pack(codes, bits=to.bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=to.bits)
