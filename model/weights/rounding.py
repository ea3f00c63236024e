"""Rounding weights to codes on the device, bit for bit as the reference does: see `model.weights.quantizing`."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Float64, Int32, Shaped

from llamaspec.reference.quantizers.minifloat import Minifloat

EXPONENT = 0x7F800000
FRACTION, BIAS = 23, 127  # bits of a float32's fraction, and what its exponent is stored with
UPPER = -1 << 12  # mask of the upper half of a float32's digits

Encoded = tuple[Shaped[Array, "rows groups group"], Shaped[Array, "rows groups"]]
Blocks = Float32[Array, "rows groups group"]
Tops = Float32[Array, "rows groups"]


def symmetric(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Do what `reference.quantizers.symmetric.quantize` does."""
    scales, reciprocals = scales_for(tops, largest)
    codes = nearest(jnp.abs(blocks), scales[..., None], reciprocals[..., None])
    codes = jnp.minimum(codes, largest.astype(jnp.int32))
    return jnp.where(blocks < 0, -codes, codes).astype(jnp.int8), scales


def scales_for(tops: Tops, largest: Float64[Array, ""]) -> tuple[Tops, Tops]:
    """Compute scales with which each top becomes `largest`, rounded once, and their reciprocals; of 0 both are 0."""
    scales = (tops.astype(jnp.float64) / largest).astype(jnp.float32)
    reciprocals = jnp.where(scales == 0, 0, 1 / scales.astype(jnp.float64)).astype(jnp.float32)
    return scales, reciprocals


Spread = Float32[Array, "rows groups #group"]


def nearest(magnitudes: Blocks, divisors: Spread, reciprocals: Spread) -> Int32[Array, "rows groups group"]:
    """Round quotients below 256 to the nearest integers, ties to even, as if they were exact.

    With `below` within one of the quotient, the tie is the middle of the two codes in question. Its product with the
    upper half of a divisor's digits has 20 digits, and so has the product with the lower half. The first difference is
    exact if it is close to 0, so the sign of the second one is right.
    """
    below = jnp.floor(magnitudes * reciprocals)
    tie = below + 0.5
    upper = lax.bitcast_convert_type(bits_of(divisors) & UPPER, jnp.float32)
    beyond = (magnitudes - tie * upper) - tie * (divisors - upper)
    code = below.astype(jnp.int32)
    return code + ((beyond > 0) | ((beyond == 0) & (code & 1 == 1) & (divisors > 0)))


Integers = Int32[Array, "rows groups group"]


def minifloat(
    blocks: Blocks, exponents: Integers, steps: Integers, to: Minifloat
) -> Shaped[Array, "rows groups group"]:
    """Make codes of signs, exponents and steps of 2^(exponent - mantissa bits); see `Minifloat.encode`."""
    # A normal number has 2^mantissa_bits steps to begin with, which count as one in its exponent; so does a carry.
    codes = (exponents - (1 - to.bias) << to.mantissa_bits) + steps
    last = int(to.encode(np.array([to.largest]))[0])
    sign = lax.shift_right_logical(bits_of(blocks), jnp.int32(31))
    return (jnp.minimum(codes, last) | sign << to.bits - 1).astype(jnp.uint8)


def exponent_to(x: Blocks, to: Minifloat) -> Int32[Array, "rows groups group"]:
    """Give the exponents that `x` has in a format; subnormal numbers and 0 share the smallest one."""
    return jnp.clip(exponent_of(x), 1 - to.bias, int(np.log2(to.largest)))


def bits_of(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)


def exponent_of(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Compute floor(log2(x)) of positive numbers that are not subnormal; of 0, -127."""
    return ((bits_of(x) & EXPONENT) >> FRACTION) - BIAS


def power_of_two(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(exponent + BIAS << FRACTION, jnp.float32)
