"""The form mxfp4: codes are floats in e2m1, and the scale of a group is a power of two."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float64

from llamaspec.model.checkpoints.checkpoint import Part, refused
from llamaspec.model.checkpoints.codes import LEVELS
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.rounding import Blocks, Encoded, Tops, exponent_of, exponent_to, minifloat, power_of_two
from llamaspec.model.weights.words import LevelWords
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.reference.quantizers import mx
from llamaspec.reference.quantizers.minifloat import E2M1


def encode(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Quantize to MXFP4, with the same codes and scales as `reference.quantizers.mx.quantize`.

    Scales are powers of 2, so quotients are exact.
    """
    exponents = jnp.where(tops == 0, -mx.BIAS, exponent_of(tops) - exponent_of(largest.astype(jnp.float32)))
    scaled = jnp.minimum(jnp.abs(blocks) * power_of_two(-exponents)[..., None], E2M1.largest)
    own = exponent_to(scaled, E2M1)
    steps = jnp.rint(scaled * power_of_two(E2M1.mantissa_bits - own)).astype(jnp.int32)
    return minifloat(blocks, own, steps, E2M1), (exponents + mx.BIAS).astype(jnp.uint8)


class MXFP4(QuantizedMatrix):
    """A matrix of e2m1 codes. A scale is a power of 2; we store its exponent plus 127.

    If we shift a code's bits into a float16, the float16 is the code's value divided by 2^14.
    """

    __slots__ = ()
    form = "mxfp4"
    scale_dtype = np.dtype(np.uint8)
    unit = 2.0**14
    largest = E2M1.largest
    encode = staticmethod(encode)
    compiler_bytes = 5_000_000
    program_bytes = 5_000_000

    @classmethod
    def check(cls, part: Part, name: str, path: str) -> None:
        if (part.scales == 0xFF).any():
            raise refused(path, f"{name} has a scale that is NaN")

    @staticmethod
    def real_scales(scales: Array) -> Array:
        """Compute 2^(stored exponent - 127). A stored 0 gives 0, not the subnormal number 2^-127."""
        return lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)

    @staticmethod
    def decode(codes: Array) -> Array:
        bits = codes.astype(jnp.uint16)
        return lax.bitcast_convert_type((bits & 8) << 12 | (bits & 7) << 9, jnp.float16).astype(jnp.float32)


class MXFP4Words(LevelWords):
    """A matrix of MXFP4 codes in the layout of the kernels, with scales in float32."""

    __slots__ = ()
    form = "mxfp4"
    kernel_levels = Levels.of(LEVELS["mxfp4"], unit=0.5, group=32)
