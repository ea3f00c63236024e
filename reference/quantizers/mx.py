r"""Microscaling formats: MXFP8, MXFP6 and MXFP4.

32 consecutive weights share a power of two, a byte e ("e8m0"), and are minifloats themselves (OCP MX v1.0;
Rouhani et al., 2023, https://arxiv.org/abs/2310.10537; see `minifloat`):

    w ~ 2^(e - 127) v        e - 127 = floor(log2(max_i |w_i|)) - emax        v_i = round(w_i / 2^(e - 127))

emax is the exponent of the format's largest number, so the largest weight of a block is at least 2^emax
and below 2^(emax + 1), where the format ends earlier: it saturates. That is the OCP's way
(`floor_exponent`). NVIDIA takes the smallest power of two with which nothing saturates (`ceil_exponent`),

    e - 127 = ceil(log2(max_i |w_i| / largest))

at the price of a bit for blocks that would have fitted nearly. Both are exact here, and e is at least 0:
a logarithm, or a cast to e8m0, would round some exponents up.

Guaranteed:

    |w - 2^(e - 127) v|  <=  max(c |w|, 2^(e - 127) 2^-(bias + m))        c = 2^-(m+1)

but with c = 1 - largest / 2^(emax + 1) for `floor_exponent`: 1/8 (e4m3, e5m2, e3m2), 1/16 (e2m3), 1/4 (e2m1).
c |w| is half a unit in w's last place; a saturated w is below 2^(emax + 1) in units of 2^(e - 127), and loses what lies
beyond `largest`. The second term is half a subnormal step, and holds for blocks far below 2^-127, too; zeros have e =
0. Powers of two pass into e. Q(-w) = -Q(w). Quantized weights are a fixed point of `floor_exponent`, since their
largest keeps its exponent; of `ceil_exponent` too, though codes and e may change: where the largest is rounded down
to what fits a smaller power, the finer grid of that has them all.

A format whose numbers are among another's, both divided by 2^emax, is not the better one for any
weight, with `floor_exponent`: e2m1 beside e2m3 and e3m2, e3m2 beside e4m3 and e5m2.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float64, Int, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite, join, split
from llamaspec.reference.quantizers.minifloat import Minifloat

BLOCK = 32
BIAS = 127  # of e; 255 is a NaN, which no quantizer here makes

Exponent = Callable[[np.ndarray, Minifloat], np.ndarray]


def floor_exponent(top: Float64[np.ndarray, "*grid"], to: Minifloat) -> Int[np.ndarray, "*grid"]:
    """floor(log2(top)) - emax; of 0, the smallest.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> floor_exponent(np.array([6.0, 7.9, 8.0]), E2M1).tolist()
    [0, 0, 1]
    """
    return np.where(top == 0, -BIAS, np.frexp(top)[1] - math.frexp(to.largest)[1])


def ceil_exponent(top: Float64[np.ndarray, "*grid"], to: Minifloat) -> Int[np.ndarray, "*grid"]:
    """ceil(log2(top / largest)); of 0, the smallest.

    >>> from llamaspec.reference.quantizers.minifloat import E2M1
    >>> ceil_exponent(np.array([6.0, 7.9, 8.0]), E2M1).tolist()
    [0, 1, 1]
    """
    exponents = floor_exponent(top, to)
    return np.where(np.ldexp(to.largest, exponents) < top, exponents + 1, exponents)


def quantize(w: Float[np.ndarray, "*batch cols"], *, to: Minifloat, exponent: Exponent = floor_exponent) -> Quantized:
    """Codes of w's shape, and e, a byte for each 32 of them.

    Raises ValueError for weights that are not finite, or rows that are no whole blocks of 32.

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
    """2^(e - 127) v, exactly. An e of 255, and codes that say so, give NaN."""
    exponents = np.repeat(q.scales.astype(np.int32), BLOCK, axis=-1)
    return np.where(exponents == 255, np.nan, np.ldexp(to.decode(q.codes), exponents - BIAS))


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch bytes"]:
    """The codes' bits, lowest first: of two e2m1 that share a byte, the first is the low half."""
    return packing.pack(codes, bits=to.bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch codes"]:
    """The codes of `pack`."""
    return packing.unpack(packed, bits=to.bits)
