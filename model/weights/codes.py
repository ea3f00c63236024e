"""Quantized matrices as pytrees: codes that are decoded where they are multiplied, so that a product reads few bytes.

Each form of codes is a class in `model.weights.forms`, which knows their layout in memory, the float32 level of each
code, and how the device encodes weights. `model.ops` multiplies by any of them as by a plain array.
`reference.quantizers.schemes` defines the codes of given weights.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from llamaspec.model.checkpoints.checkpoint import Codes, Form, Part, Shifted
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.weights.groups import LANES, PAIR, ROW, group_of
from llamaspec.reference.quantizers.affine import Affine

# From blocks [rows, groups, group], the largest magnitude of each group, and `QuantizedMatrix.largest`, to codes and
# scales.
Encoder = Callable[[Any, Any, Any], tuple[Any, Any]]


class _Arrays(NamedTuple):
    codes: Array  # [rows, bytes]
    scales: Array  # [rows, groups]
    zeros: Array | None  # int8 [rows, groups]: zero points that are subtracted from levels, if integers have them
    minima: Array | None = None  # [rows, groups]: added to levels times scales, if the form has minima
    low_bits: Array | None = None  # the lowest bits of codes, if a GPU has them apart (`model.weights.gpu_codes`)


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
    largest: ClassVar[float] = 0.0  # what the largest weight of a group becomes, if a scheme has these codes
    encode: ClassVar[Encoder | None] = None  # quantizes weights on the device, if a scheme has these codes
    compiler_bytes: ClassVar[int] = 1_000_000  # memory that code to decode takes for each layer while XLA compiles
    program_bytes: ClassVar[int] = 3_500_000  # and afterwards

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
    def check(cls, part: Part, name: str, path: str) -> None:
        """Check codes, scales and minima of a tensor's rows. Raises CheckpointError if a number is not finite."""
        check_finite(f"{name}'s scales", part.scales, path=path)
        if isinstance(part, Shifted):
            check_finite(f"{name}'s minima", part.minima, path=path)

    @classmethod
    def shapes(cls, rows: int, cols: int, codes: Codes) -> "QuantizedMatrix":
        """Give the shapes of the arrays for a matrix [rows, cols] of `codes`."""
        group, _ = group_of(codes, cols)
        multiple = max(group, PAIR) if group else ROW
        padded = -(-cols // multiple) * multiple
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
