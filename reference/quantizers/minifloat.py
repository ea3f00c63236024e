r"""Minifloats: numbers of 4, 6 and 8 bits with a sign, an exponent and a mantissa, and tensors of them.

    v = (-1)^S 2^(E - bias) (1 + M / 2^m)        E > 0
    v = (-1)^S 2^(1 - bias) (M / 2^m)            E = 0, the subnormals

S is the sign bit, E the exponent bits and M the m mantissa bits, read as integers. e4m3 has 4 exponent bits and 3
mantissa bits. e4m3 and e5m2 (Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433) are the two "fp8" formats.
e4m3, here in its usual "fn" form, has NaN (one code for each sign) and no infinity; e5m2 has both, as in IEEE 754.
e2m3, e3m2 and e2m1 (the OCP's microscaling formats, version 1.0) have neither. All have -0.

A number is rounded to the nearest minifloat, with ties to the even code. A number beyond the largest minifloat
saturates, i.e. becomes the largest minifloat. (JAX and ml_dtypes turn it into a NaN in e4m3, so clip before `astype`.
Here, no float32 number becomes a NaN or an infinity.)

A tensor has a scale for each block, which maps the largest weight to the largest number of the format:

    s = max_i |w_i| / largest        q_i = round(w_i / s)        w_i ~ s q_i

Guaranteed, for weights of float32 or narrower:

    |w - s q|  <=  max(2^-(m+1) |w|, 2^-(bias+m) s) + largest 2^-150

The first number of the maximum is half a unit in the last place of w, and the second is half a subnormal step. The last
term is for a denormal s. We divide in float64, because float32 might round a quotient near a tie to the tie. If all
weights of a block are 0, or if s underflows, s = 0, and the codes are zeros with the signs of the weights.

Q(w) = s q are the dequantized weights. Powers of two: the weights 2^k w have the same codes as w, and the scale 2^k s,
while both scales are normal. Fixed point: Q(Q(w)) = Q(w) while s is normal. Sign: Q(-w) = -Q(w).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite, join, split, spread


@dataclass(frozen=True)
class Minifloat:
    """A format: how many exponent and mantissa bits it has, its largest number, and its codes of infinity and NaN."""

    exponent_bits: int
    mantissa_bits: int
    largest: float
    infinite: bool = False  # the last exponent is for infinity and NaN
    nan: bool = False  # only the last code is a NaN

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1

    def decode(self, codes: UInt8[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """Decode `codes` to numbers. Bits above the sign bit are ignored.

        >>> E4M3.decode(np.array([0x38, 0x01, 0xFE, 0x7F], np.uint8))
        array([ 1.000000e+00,  1.953125e-03, -4.480000e+02,           nan])
        """
        fields = codes.astype(np.int64)
        m = self.mantissa_bits
        sign = np.where(fields >> self.bits - 1 & 1, -1.0, 1.0)
        exponent = fields >> m & (1 << self.exponent_bits) - 1
        mantissa = fields & (1 << m) - 1
        value = np.ldexp(mantissa + np.where(exponent > 0, 1 << m, 0.0), np.maximum(exponent, 1) - self.bias - m)
        last = exponent == (1 << self.exponent_bits) - 1
        if self.infinite:
            value = np.where(last, np.where(mantissa == 0, np.inf, np.nan), value)
        if self.nan:
            value = np.where(last & (mantissa == (1 << m) - 1), np.nan, value)
        return sign * value

    def encode(self, x: Float64[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
        """Return the codes of the numbers nearest to `x`. `x` has no NaN.

        >>> [hex(code) for code in E4M3.encode(np.array([1.0, 1.0625, -1e9, -0.0]))]
        ['0x38', '0x38', '0xfe', '0x80']
        """
        magnitude = np.minimum(np.abs(x), self.largest)
        _, exponent = np.frexp(magnitude)  # magnitude < 2^exponent
        smallest = 1 - self.bias  # the exponent of subnormals and zero
        exponent = np.where(magnitude > 0, np.maximum(exponent - 1, smallest), smallest)
        steps = np.rint(np.ldexp(magnitude, self.mantissa_bits - exponent))
        # A normal number has an implicit 2^m steps, which add one to the exponent field. A carry does the same.
        code = ((exponent - smallest) << self.mantissa_bits) + steps.astype(np.int64)
        return (code | np.signbit(x).astype(np.int64) << self.bits - 1).astype(np.uint8)


E4M3 = Minifloat(4, 3, largest=448.0, nan=True)
E5M2 = Minifloat(5, 2, largest=57344.0, infinite=True)
E2M3 = Minifloat(2, 3, largest=7.5)
E3M2 = Minifloat(3, 2, largest=28.0)
E2M1 = Minifloat(2, 1, largest=6.0)


def quantize(w: Float[np.ndarray, "*shape"], *, to: Minifloat, block: tuple[int, ...]) -> Quantized:
    """Quantize to uint8 codes and float32 scales, one per `block` (see `blocks`).

    Raises ValueError for weights that are not finite, or a block that does not divide the shape.

    >>> q = quantize(np.array([[896.0, -2.0, 2.1]]), to=E4M3, block=(1, 3))
    >>> q.scales, dequantize(q, to=E4M3)
    (array([[2.]], dtype=float32), array([[896.,  -2.,   2.]]))
    """
    blocks = split(finite(w), block)
    scales = (np.max(np.abs(blocks), axis=-1) / to.largest).astype(np.float32)
    divisors = np.where(scales == 0, np.inf, scales)[..., None].astype(np.float64)
    return Quantized(join(to.encode(blocks / divisors), block), scales)


def dequantize(q: Quantized, *, to: Minifloat) -> Float64[np.ndarray, "*shape"]:
    """Return the number of each code times the scale of its block. float64 holds these products exactly."""
    return to.decode(q.codes) * spread(q.scales.astype(np.float64), q.codes.shape)


def pack(codes: UInt8[np.ndarray, "*batch codes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack the bits of all codes, lowest bits first. Codes of 8 bits do not change.

    >>> pack(np.array([1, 15], np.uint8), to=E2M1)
    array([241], dtype=uint8)
    """
    return packing.pack(codes, bits=to.bits)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, to: Minifloat) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack`."""
    return packing.unpack(packed, bits=to.bits)
