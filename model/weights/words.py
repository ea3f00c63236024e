"""`Words`, a quantized matrix in the layout of the GPU's kernels: each int32 word holds eight codes.

`model.weights.gpu_codes` converts matrices to this layout.
"""

from collections.abc import Iterator
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from llamaspec.model.checkpoints.codes import LEVELS
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.groups import LANES
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.levels import Levels


class Words(QuantizedMatrix):
    """A matrix of 4-bit codes, eight per word in the order of `pallas_kernels.parts.int4`: int32 [rows, cols / 8].

    For codes of 5 and 6 bits, these words hold the upper four bits of each code. `low_bits` holds the remaining bit of
    codes of 5 bits, int32 [rows, cols / 32], or the remaining two bits of codes of 6 bits, int32 [rows, cols / 16].
    """

    __slots__ = ()
    # The levels as sums of bytes, since the tensor cores multiply bytes; None: the codes are the levels.
    kernel_levels: ClassVar[Levels | None] = None

    @property
    def cols(self) -> int:
        return self.codes.shape[1] * int4.WORD

    @property
    def order(self) -> int4.Order:
        return int4.order_of(self.group, levels=self.kernel_levels is not None)

    @property
    def unsigned(self) -> Int32[Array, "rows cols"]:
        """The codes as unsigned integers, one per column."""
        return int4.unpacked(self.codes, self.order, self.low_bits)

    def levels(self) -> Float[Array, "rows cols"]:
        """Return the level of each code."""
        raise NotImplementedError

    def pieces(self, block: int, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        levels = self.levels().reshape(len(self.codes), -1, block)
        for column in range(start, stop, LANES):
            yield column, levels[:, :, column : column + LANES]

    def weights(self) -> Float[Array, "rows cols"]:
        levels = self.levels().reshape(*self.scales.shape, -1) * self.scales[..., None]  # [rows, groups, group]
        if self.minima is not None:
            levels = levels + self.minima[..., None]
        return levels.reshape(len(self.codes), -1)


class LevelWords(Words):
    """A matrix of 4-bit codes that are indices into the form's table of levels."""

    __slots__ = ()

    def levels(self) -> Float[Array, "rows cols"]:
        return jnp.asarray(LEVELS[self.form], jnp.float32)[self.unsigned]
