"""Quantized matrices as pytrees: codes that are decoded where they are multiplied, so that a product reads few bytes.

Each form of codes is a class, which knows their layout in memory and the float32 level of each code. `model.ops`
multiplies by any of them as by a plain array. `reference.quantizers.schemes` defines the codes of given weights.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from llamaspec.model.checkpoints.checkpoint import Codes, Form, Part, Shifted
from llamaspec.model.weights.groups import LANES, PAIR, ROW, group_of
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS
from llamaspec.reference.quantizers.nf4 import FP4, NF4


class _Arrays(NamedTuple):
    codes: Array  # [rows, bytes]
    scales: Array  # [rows, groups]
    zeros: Array | None  # int8 [rows, groups]: zero points that are subtracted from levels, where integers have them
    minima: Array | None = None  # [rows, groups]: added to levels times scales, where the form has minima
    rest: Array | None = None  # the lowest bits of codes, where a GPU has them apart (`model.weights.gpu_codes`)


class QuantizedMatrix(_Arrays):
    """A matrix [rows, cols] of levels times scales, plus minima, padded with code 0 to whole groups of columns.

    A padded column may stand for any finite weight.
    """

    __slots__ = ()
    form: ClassVar[Form]
    packed: ClassVar[bool] = True  # a byte has two codes of 4 bits; otherwise one
    integers: ClassVar[bool] = False  # whether a level is its code less a number
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)  # dtype of the bytes
    scale_dtype: ClassVar[np.dtype] = np.dtype(np.float32)
    unit: ClassVar[float] = 1.0  # power of 2 that all levels of `decode` must still be multiplied by
    middle: ClassVar[int] = 0  # offset between stored integers and their values
    shifted: ClassVar[bool] = False  # whether the form has minima

    @property
    def cols(self) -> int:
        return self.codes.shape[1] * (1 + self.packed)

    @property
    def group(self) -> int:
        return self.cols // self.scales.shape[1]

    @property
    def slices(self) -> int:
        """Most of `pieces` to multiply in one loop, unless a group has more; beyond 64, loops are slow."""
        return 64

    @staticmethod
    def real_scales(scales: Array) -> Float[Array, "*shape"]:
        """Give the values of scales as they are stored."""
        return scales

    @staticmethod
    def decode(codes: Array) -> Float[Array, "*shape"]:
        """Give the levels of codes as they are stored, one code of 4 bits to a byte; without `unit`."""
        raise NotImplementedError

    @classmethod
    def decode_pairs(cls, codes: Array) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        """Give the levels of the low and of the high halves of bytes that hold two codes."""
        return cls.decode(codes & 15), cls.decode(codes >> 4)

    def pieces(self, block: int, start: int, stop: int) -> Iterator[tuple[int, Float[Array, "rows blocks lanes"]]]:
        """Yield levels, 16 columns at a time, from column `start` to `stop` of each block of `block` columns.

        Each comes after the number of its first column. All numbers are multiples of 16. `unit` is left out.
        """
        codes = self.codes.reshape(len(self.codes), -1, block // (1 + self.packed))
        step = LANES * (1 + self.packed)
        for column in range(start // step * step, stop, step):
            at = column // (1 + self.packed)
            piece = codes[:, :, at : at + LANES]
            levels = self.decode_pairs(piece) if self.packed else (self.decode(piece),)
            for first, part in zip(range(column, column + step, LANES), levels, strict=True):
                if start <= first < stop:
                    yield first, part

    def weights(self) -> Float[Array, "rows cols"]:
        """Decode the whole matrix to float32, each weight rounded once, with its padded columns."""
        rows = len(self.codes)
        return jnp.stack([part.reshape(rows, -1, LANES) for part in self.parts()], axis=2).reshape(rows, -1)

    def parts(self) -> list[Float[Array, "rows some"]]:
        """Decode the whole matrix as `weights` does, but keep the low and the high halves of bytes apart.

        A part has the columns that `split` gives. To put columns in order takes XLA on a CPU ten times as long.
        """
        rows, groups = self.scales.shape
        halves = 2 if self.packed and self.group == LANES else 1  # groups in 16 bytes

        def of_groups(a: Array, part: int) -> Array:
            return a.reshape(rows, -1, halves)[:, :, part % halves, None]

        decoded = []
        for part, levels in enumerate(self.decode_pairs(self.codes) if self.packed else [self.decode(self.codes)]):
            levels = levels.reshape(rows, groups // halves, -1)
            if self.zeros is not None:
                levels = levels - of_groups(self.zeros, part).astype(jnp.float32)
            levels = levels * self.unit * of_groups(self.real_scales(self.scales), part)
            if self.minima is not None:
                levels = levels + of_groups(self.minima, part)
            decoded.append(levels.reshape(rows, -1))
        return decoded

    def split(self, x: Float[Array, "*batch cols"]) -> list[Float[Array, "*batch some"]]:
        """Take the columns of each of `parts` out of vectors."""
        if not self.packed:
            return [x]
        pairs = x.reshape(*x.shape[:-1], -1, 2, LANES)
        return [pairs[..., half, :].reshape(*x.shape[:-1], -1) for half in range(2)]

    @classmethod
    def shapes(cls, rows: int, cols: int, codes: Codes) -> "QuantizedMatrix":
        """Give the shapes of the arrays for a matrix [rows, cols] of `codes`."""
        group, _ = group_of(codes, cols)
        whole = max(group, PAIR) if group else ROW
        padded = -(-cols // whole) * whole
        grid = (rows, padded // group if group else 1)
        stored: list[Any] = [
            jax.ShapeDtypeStruct((rows, padded // (1 + cls.packed)), cls.dtype),
            jax.ShapeDtypeStruct(grid, cls.scale_dtype),
            jax.ShapeDtypeStruct(grid, np.int8) if codes.zeros else None,
            jax.ShapeDtypeStruct(grid, np.float32) if cls.shifted else None,
        ]
        return cls(*stored)

    @classmethod
    def stored(cls, part: Part, codes: Codes) -> "QuantizedMatrix":
        """Store a part of `codes` as NumPy arrays of `shapes`."""
        rows, cols = part.codes.shape
        shapes, (_, copies) = cls.shapes(rows, cols, codes), group_of(codes, cols)
        padded, groups = shapes.cols, shapes.scales.shape[1]
        zeros = None

        def spread(a: np.ndarray) -> np.ndarray:
            spread = np.repeat(a, copies, axis=1)[:, :groups]
            return np.pad(spread, [(0, 0), (0, groups - spread.shape[1])])

        bits = part.codes
        if isinstance(part, Affine):
            zeros = (spread(part.zeros).astype(np.int16) - cls.middle).astype(np.int8)
        elif cls.middle and cls.packed:
            bits = bits + np.int8(cls.middle)
        minima = spread(part.minima) if isinstance(part, Shifted) else None
        if isinstance(part, Affine) and not cls.packed:
            bits = bits ^ np.uint8(cls.middle)  # subtracts 128, in two's complement
        bits = np.pad(bits.view(np.uint8), [(0, 0), (0, padded - cols)])
        if cls.packed:
            pairs = bits.reshape(rows, -1, 2, LANES)
            bits = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)
        arrays: Any = (bits.view(cls.dtype), spread(part.scales).astype(cls.scale_dtype), zeros, minima)
        return cls(*arrays)


class Int8(QuantizedMatrix):
    """Integers from -128 to 127."""

    __slots__ = ()
    form = "int8"
    packed = False
    integers = True
    dtype = np.dtype(np.int8)
    middle = 128

    @staticmethod
    def decode(codes: Array) -> Array:
        return codes.astype(jnp.float32)


class Int6(Int8):
    """Integers from -32 to 31."""

    __slots__ = ()
    form = "int6"


class Int5(Int8):
    """Integers from -16 to 15."""

    __slots__ = ()
    form = "int5"


def _counted(codes: UInt8[Array, "*shape"], steps: int, *, less: int) -> Float[Array, "*shape"]:
    """Compute codes / steps - less exactly, for a power of two `steps`.

    The last bit of the mantissa of 2^23 / steps counts 1 / steps. A code that is put there is a float without a
    conversion, and the code of a high half needs no shift.
    """
    start = np.float32(2**23 / steps)
    return lax.bitcast_convert_type(codes.astype(jnp.uint32) | start.view(np.uint32), jnp.float32) - (start + less)


class _Integers4(QuantizedMatrix):
    """Integers of 4 bits, stored with `middle` added."""

    __slots__ = ()
    integers = True

    @classmethod
    def decode_pairs(cls, codes: Array) -> tuple[Array, Array]:
        return _counted(codes & 15, 1, less=cls.middle), _counted(codes & 240, 16, less=cls.middle)


class Int4(_Integers4):
    """Integers from -8 to 7."""

    __slots__ = ()
    form = "int4"
    middle = 8


class Int8Min(QuantizedMatrix):
    """Integers from -128 to 127, with minima."""

    __slots__ = ()
    form = "int8_min"
    packed = False
    integers = True
    dtype = np.dtype(np.int8)
    shifted = True
    decode = staticmethod(Int8.decode)


class Int5Min(Int8Min):
    """Integers from 0 to 31, with minima."""

    __slots__ = ()
    form = "int5_min"


class Int4Min(_Integers4):
    """Integers from 0 to 15, with minima."""

    __slots__ = ()
    form = "int4_min"
    shifted = True


def _chosen(codes: Array, levels: Float[np.ndarray, " levels"]) -> Any:
    """Choose a level for each code, by its bits."""
    if len(levels) == 1:
        return levels[0]
    lower, upper = np.split(levels, 2)
    return jnp.where((codes & len(lower)) != 0, _chosen(codes, upper), _chosen(codes, lower))


class _CodebookCodes(QuantizedMatrix):
    """Sixteen levels, chosen by bits: 15 selections are faster than a table in memory."""

    __slots__ = ()

    @property
    def slices(self) -> int:
        """Most of `pieces` to multiply in one loop, which depends on the size of the matrix.

        With 64, XLA needs a minute and 5 GB to compile 24 layers, and the loop is slower. Fewer leave more partial
        sums, which should stay in a cache: 16 are fastest for 28,672 x 4,096, and 4 for a small model.
        """
        weights = 2 * self.codes.size
        return 4 if weights <= 1 << 22 else 8 if weights <= 1 << 25 else 16


class NF4Codes(_CodebookCodes):
    """The levels of NF4."""

    __slots__ = ()
    form = "nf4"
    decode = staticmethod(partial(_chosen, levels=NF4.levels))


class FP4Codes(_CodebookCodes):
    """The levels of bitsandbytes' FP4."""

    __slots__ = ()
    form = "fp4"
    decode = staticmethod(partial(_chosen, levels=FP4.levels))


class IQ4NL(QuantizedMatrix):
    """The 16 levels of ggml's IQ4_NL, bytes of four words: two bits of a code choose the word, two the byte."""

    __slots__ = ()
    form = "iq4_nl"

    @staticmethod
    def decode(codes: Array) -> Array:
        words = IQ4_NL_LEVELS.astype(np.int8).view("<i4").astype(np.int32)
        codes = codes.astype(jnp.int32)
        lower, upper = (jnp.where((codes & 4) != 0, words[i + 1], words[i]) for i in (0, 2))
        word = jnp.where((codes & 8) != 0, upper, lower)
        above = 24 - 8 * (codes & 3)  # bits: the byte moves to the top, and down again with its sign
        return (word << above >> 24).astype(jnp.float32)


class FP8(QuantizedMatrix):
    """Floats in e4m3. Exponent and mantissa are those of a float16 that is 2^8 times smaller, subnormals included."""

    __slots__ = ()
    form = "fp8"
    packed = False
    dtype = np.dtype(np.int8)
    unit = 2.0**8

    @staticmethod
    def decode(codes: Array) -> Array:
        # A signed byte extends its sign to bit 15, where it belongs, and to bit 14, where it is cleared.
        bits = codes.astype(jnp.int16) << 7 & ~(1 << 14)
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


class MXFP4(QuantizedMatrix):
    """Floats in e2m1, each a float16 that is 2^14 times smaller; scales are powers of two, stored as exponents."""

    __slots__ = ()
    form = "mxfp4"
    scale_dtype = np.dtype(np.uint8)
    unit = 2.0**14

    @staticmethod
    def real_scales(scales: Array) -> Array:
        """Give 2^exponent. An exponent of 0 gives 0, as it does on hardware that flushes subnormal numbers to 0."""
        return lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)

    @staticmethod
    def decode(codes: Array) -> Array:
        bits = codes.astype(jnp.uint16)
        return lax.bitcast_convert_type((bits & 8) << 12 | (bits & 7) << 9, jnp.float16).astype(jnp.float32)


CLASS_OF_FORM: dict[Form, type[QuantizedMatrix]] = {
    each.form: each
    for each in (Int8, Int6, Int5, Int4, Int8Min, Int5Min, Int4Min, NF4Codes, FP4Codes, IQ4NL, FP8, MXFP4)
}
