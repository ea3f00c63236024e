"""The forms with integer codes: 8, 6, 5 and 4 bits, with and without minima."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.rounding import symmetric
from llamaspec.model.weights.words import Words
from llamaspec.pallas_kernels.parts import int4


class Int8(QuantizedMatrix):
    """A matrix of 8-bit integer codes from -128 to 127."""

    __slots__ = ()
    form = "int8"
    packed = False
    integers = True
    dtype = np.dtype(np.int8)
    middle = 128
    largest = 127.0
    encode = staticmethod(symmetric)

    @staticmethod
    def decode(codes: Array) -> Array:
        return codes.astype(jnp.float32)


class Int6(Int8):
    """A matrix of 6-bit integer codes from -32 to 31, one per byte."""

    __slots__ = ()
    form = "int6"


class Int5(Int8):
    """A matrix of 5-bit integer codes from -16 to 15, one per byte."""

    __slots__ = ()
    form = "int5"


def _counted(codes: UInt8[Array, "*shape"], steps: int, *, less: int) -> Float[Array, "*shape"]:
    """Compute `codes` / `steps` - `less` exactly; `steps` is a power of two.

    The last mantissa bit of the float 2^23 / `steps` has the value 1 / `steps`. So writing a code into the mantissa
    adds `codes` / `steps`, without converting integers to floats. For codes in the high half of a byte, `steps` is 16,
    so we need no shift.
    """
    start = np.float32(2**23 / steps)
    return lax.bitcast_convert_type(codes.astype(jnp.uint32) | start.view(np.uint32), jnp.float32) - (start + less)


class _Integers4(QuantizedMatrix):
    """A matrix of 4-bit integer codes; the stored code is the integer plus `middle`."""

    __slots__ = ()
    integers = True

    @classmethod
    def decode_pairs(cls, codes: Array) -> tuple[Array, Array]:
        return _counted(codes & 15, 1, less=cls.middle), _counted(codes & 240, 16, less=cls.middle)


class Int4(_Integers4):
    """A matrix of 4-bit integer codes from -8 to 7, two per byte."""

    __slots__ = ()
    form = "int4"
    middle = 8
    largest = 7.0
    encode = staticmethod(symmetric)


class Int8Min(QuantizedMatrix):
    """A matrix of 8-bit integer codes from -128 to 127; each group has a minimum."""

    __slots__ = ()
    form = "int8_min"
    packed = False
    integers = True
    dtype = np.dtype(np.int8)
    shifted = True
    decode = staticmethod(Int8.decode)


class Int5Min(Int8Min):
    """A matrix of 5-bit integer codes from 0 to 31, one per byte; each group has a minimum."""

    __slots__ = ()
    form = "int5_min"


class Int4Min(_Integers4):
    """A matrix of 4-bit integer codes from 0 to 15, two per byte; each group has a minimum."""

    __slots__ = ()
    form = "int4_min"
    shifted = True


class Int4Words(Words):
    """A matrix of 4-bit integer codes from -8 to 7, in the layout of the GPU's kernels."""

    __slots__ = ()
    form = "int4"

    def levels(self) -> Float[Array, "rows cols"]:
        return int4.signed(self.unsigned, int4.bits_of(self.codes, self.low_bits)).astype(jnp.float32)


class Int4MinWords(Words):
    """A matrix of 4-bit integer codes from 0 to 15 with minima, in the layout of the GPU's kernels."""

    __slots__ = ()
    form = "int4_min"
    shifted = True

    def levels(self) -> Float[Array, "rows cols"]:
        return self.unsigned.astype(jnp.float32)


class Int6Words(Int4Words):
    """A matrix of 6-bit integer codes from -32 to 31, in the layout of the GPU's kernels."""

    __slots__ = ()
    form = "int6"


class Int5Words(Int4Words):
    """A matrix of 5-bit integer codes from -16 to 15, in the layout of the GPU's kernels."""

    __slots__ = ()
    form = "int5"


class Int5MinWords(Int4MinWords):
    """A matrix of 5-bit integer codes from 0 to 31 with minima, in the layout of the GPU's kernels."""

    __slots__ = ()
    form = "int5_min"
