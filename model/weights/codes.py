"""`QuantizedMatrix`, a quantized matrix on the device: a pytree of codes and scales.

A product decodes the codes while it multiplies, so it reads few bytes. Each form of codes has a class in
`model.weights.forms`, which knows the layout of the codes in memory, the float32 level of each code, and how the device
quantizes weights to these codes. Functions in `model.ops` accept such a matrix instead of an array of floats.
`reference.quantizers.schemes` defines the codes that a scheme gives to weights.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from llamaspec.model.checkpoints.checkpoint import Codes, CodesWithMinima, Form, Part
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.weights.groups import LANES, PAIR, ROW, group_of
from llamaspec.reference.quantizers.affine import Affine

# An encoder takes weights in blocks [rows, groups, group], the largest magnitude of each group, and
# `QuantizedMatrix.largest`. It returns codes and scales.
Encoder = Callable[[Any, Any, Any], tuple[Any, Any]]


class _Arrays(NamedTuple):
    codes: Array  # [rows, bytes]
    scales: Array  # [rows, groups]
    zeros: Array | None  # int8 [rows, groups]: zero points, which we subtract from levels
    minima: Array | None = None  # [rows, groups]: we add these to levels times scales
    low_bits: Array | None = None  # on a GPU: the low bits of codes of 5 and 6 bits (`model.weights.gpu_codes`)


class QuantizedMatrix(_Arrays):
    """A quantized matrix [rows, cols]. A weight is the level of its code times the group's scale.

    If the form has minima, we also add the group's minimum. A row may end with padding, so that its last group is
    complete. Padding has code 0, and may decode to any finite weight.
    """

    __slots__ = ()
    form: ClassVar[Form]
    packed: ClassVar[bool] = True  # whether a byte holds two codes of 4 bits; else it holds one code
    integers: ClassVar[bool] = False  # whether a level is its code minus a constant
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)  # dtype of the array of codes
    scale_dtype: ClassVar[np.dtype] = np.dtype(np.float32)
    unit: ClassVar[float] = 1.0  # power of 2; `decode` returns levels divided by `unit`
    middle: ClassVar[int] = 0  # number that we add to signed codes of 4 bits, or subtract from unsigned codes of 8 bits
    shifted: ClassVar[bool] = False  # whether the form has minima
    largest: ClassVar[float] = 0.0  # level of a group's largest weight; 0: no quantization scheme uses this form
    encode: ClassVar[Encoder | None] = None  # quantizes on the device; None: no quantization scheme uses this form
    compiler_bytes: ClassVar[int] = 1_000_000  # memory to compile the decoding of one layer
    program_bytes: ClassVar[int] = 3_500_000  # memory for the compiled decoding of one layer

    @property
    def cols(self) -> int:
        return self.codes.shape[1] * (1 + self.packed)

    @property
    def group(self) -> int:
        return self.cols // self.scales.shape[1]

    @property
    def slices(self) -> int:
        """The largest number of `pieces` that one loop multiplies. XLA is slow with more than 64 pieces.

        A loop multiplies at least one whole group, even if a group has more pieces.
        """
        return 64

    @staticmethod
    def real_scales(scales: Array) -> Float[Array, "*shape"]:
        """Convert stored scales to their float32 values."""
        return scales

    @staticmethod
    def decode(codes: Array) -> Float[Array, "*shape"]:
        """Convert codes, one in each byte, to levels divided by `unit`. The caller multiplies by `unit`."""
        raise NotImplementedError

    @classmethod
    def decode_pairs(cls, codes: Array) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        """Decode bytes with two codes each: return what `decode` gives for the low halves and for the high halves."""
        return cls.decode(codes & 15), cls.decode(codes >> 4)

    def pieces(self, block: int, start: int, stop: int) -> Iterator[tuple[int, Float[Array, "rows blocks lanes"]]]:
        """Split rows into blocks of `block` columns, and yield the levels of columns `start` to `stop` of all blocks.

        Yields pairs: the number of a column within a block, and the levels of the 16 columns from this column on. The
        levels are divided by `unit`, as `decode` returns them. `block`, `start` and `stop` are multiples of 16.
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
        """Decode the whole matrix to float32, including the padded columns."""
        rows = len(self.codes)
        return jnp.stack([part.reshape(rows, -1, LANES) for part in self.parts()], axis=2).reshape(rows, -1)

    def parts(self) -> list[Float[Array, "rows some"]]:
        """Decode the whole matrix to float32, as one part for the low halves of bytes and one for the high halves.

        If codes are not packed, the matrix is one part. `split` selects the columns of each part from a vector. We do
        not put the columns in order, because this would take XLA on a CPU ten times as long.
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
        """Split vectors by columns, in the same way as `parts` splits the matrix."""
        if not self.packed:
            return [x]
        pairs = x.reshape(*x.shape[:-1], -1, 2, LANES)
        return [pairs[..., half, :].reshape(*x.shape[:-1], -1) for half in range(2)]

    @classmethod
    def check(cls, part: Part, name: str, path: str) -> None:
        """Raise CheckpointError if the scales or minima of some rows of the tensor `name` are not finite.

        Subclasses for forms that have a code for NaN also check the codes.
        """
        check_finite(f"{name}'s scales", part.scales, path=path)
        if isinstance(part, CodesWithMinima):
            check_finite(f"{name}'s minima", part.minima, path=path)

    @classmethod
    def shapes(cls, rows: int, cols: int, codes: Codes) -> "QuantizedMatrix":
        """Return the shapes of the arrays that store a matrix [rows, cols] of `codes`."""
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
        """Convert `part` (some rows of a file's `codes`) to NumPy arrays in the layout of `shapes`."""
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
        minima = spread(part.minima) if isinstance(part, CodesWithMinima) else None
        if isinstance(part, Affine) and not cls.packed:
            bits = bits ^ np.uint8(cls.middle)  # subtracts 128, in two's complement
        bits = np.pad(bits.view(np.uint8), [(0, 0), (0, padded - cols)])
        if cls.packed:
            pairs = bits.reshape(rows, -1, 2, LANES)
            bits = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)
        arrays: Any = (bits.view(cls.dtype), spread(part.scales).astype(cls.scale_dtype), zeros, minima)
        return cls(*arrays)
