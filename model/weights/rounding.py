"""Rounds weights to codes on the device, with the same bits as the reference (see `model.weights.quantizing`)."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Float64, Int32, Shaped

from llamaspec.reference.quantizers.minifloat import Minifloat

EXPONENT = 0x7F800000
FRACTION, BIAS = 23, 127  # bits of a float32's fraction, and the bias of its stored exponent
UPPER = -1 << 12  # mask that keeps the upper 12 of a float32's 24 significant bits

Encoded = tuple[Shaped[Array, "rows groups group"], Shaped[Array, "rows groups"]]
Blocks = Float32[Array, "rows groups group"]
Tops = Float32[Array, "rows groups"]


def symmetric(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Quantize to symmetric integers, with the same codes and scales as `reference.quantizers.symmetric.quantize`."""
    scales, reciprocals = scales_for(tops, largest)
    codes = nearest(jnp.abs(blocks), scales[..., None], reciprocals[..., None])
    codes = jnp.minimum(codes, largest.astype(jnp.int32))
    return jnp.where(blocks < 0, -codes, codes).astype(jnp.int8), scales


def scales_for(tops: Tops, largest: Float64[Array, ""]) -> tuple[Tops, Tops]:
    """Compute the scales `tops` / `largest`, rounded once, and their reciprocals; the reciprocal of 0 is 0 here.

    `tops` are the largest magnitudes of groups, and `largest` is the level for such a magnitude.
    """
    scales = (tops.astype(jnp.float64) / largest).astype(jnp.float32)
    reciprocals = jnp.where(scales == 0, 0, 1 / scales.astype(jnp.float64)).astype(jnp.float32)
    return scales, reciprocals


Spread = Float32[Array, "rows groups #group"]


def nearest(magnitudes: Blocks, divisors: Spread, reciprocals: Spread) -> Int32[Array, "rows groups group"]:
    """Round the exact quotients `magnitudes` / `divisors`, which are below 256, to the nearest integers, ties to even.

    In the code, `below` comes from an inexact quotient, so the right code is `below` or `below` + 1. `tie` is halfway
    between these two. `tie` has at most 9 bits, and each half of a divisor has 12 bits, so both products are exact in
    float32. The first difference is exact if it is close to 0, so the sign of the second difference is right.
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
    """Assemble codes of the format `to` from the signs of `blocks` and from magnitudes.

    The magnitudes are `steps` * 2^(exponents - mantissa bits). See `Minifloat.encode`.
    """
    # A normal number has at least 2^mantissa_bits steps. In the sum, these steps carry 1 into the exponent field.
    codes = (exponents - (1 - to.bias) << to.mantissa_bits) + steps
    last = int(to.encode(np.array([to.largest]))[0])
    sign = lax.shift_right_logical(bits_of(blocks), jnp.int32(31))
    return (jnp.minimum(codes, last) | sign << to.bits - 1).astype(jnp.uint8)


def exponent_to(x: Blocks, to: Minifloat) -> Int32[Array, "rows groups group"]:
    """Return the exponents of `x` in the format `to`; 0 and subnormal numbers of `to` get the smallest exponent."""
    return jnp.clip(exponent_of(x), 1 - to.bias, int(np.log2(to.largest)))


def bits_of(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)


def exponent_of(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Compute floor(log2(x)) for positive numbers that are not subnormal, and -127 for 0."""
    return ((bits_of(x) & EXPONENT) >> FRACTION) - BIAS


def power_of_two(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(exponent + BIAS << FRACTION, jnp.float32)
