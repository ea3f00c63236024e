"""The form fp8: codes are floats in e4m3."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float64

from llamaspec.model.checkpoints.checkpoint import Part, refused
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.rounding import (
    Blocks,
    Encoded,
    Tops,
    exponent_to,
    minifloat,
    nearest,
    power_of_two,
    scales_for,
)
from llamaspec.reference.quantizers.minifloat import E4M3


def encode(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Quantize to E4M3, with the same codes and scales as `reference.quantizers.minifloat.quantize`."""
    scales, reciprocals = scales_for(tops, largest)
    magnitudes, divisors = jnp.abs(blocks), jnp.broadcast_to(scales[..., None], blocks.shape)
    exponents = exponent_to(magnitudes * reciprocals[..., None], E4M3)
    units = power_of_two(exponents - E4M3.mantissa_bits)
    steps = nearest(magnitudes, divisors * units, reciprocals[..., None] / units)
    return minifloat(blocks, exponents, steps, E4M3), scales


class FP8(QuantizedMatrix):
    """A matrix of e4m3 codes. If we shift a code's bits into a float16, the float16 is the code's value divided by 2^8.

    This is also true for subnormal codes.
    """

    __slots__ = ()
    form = "fp8"
    packed = False
    dtype = np.dtype(np.int8)
    unit = 2.0**8
    largest = E4M3.largest
    encode = staticmethod(encode)

    @classmethod
    def check(cls, part: Part, name: str, path: str) -> None:
        if (part.codes & 0x7F == 0x7F).any():
            raise refused(path, f"{name} contains a code that is NaN")
        super().check(part, name, path)

    @staticmethod
    def decode(codes: Array) -> Array:
        # Converting a signed byte to int16 copies its sign into the upper bits. After the shift, bit 15 is the sign,
        # and we clear the copy in bit 14.
        bits = codes.astype(jnp.int16) << 7 & ~(1 << 14)
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
