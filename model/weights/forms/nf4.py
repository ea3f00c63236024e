"""The forms nf4 and fp4 (bitsandbytes' FP4): each code is an index into a table of sixteen levels."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.rounding import Blocks, Encoded, Tops
from llamaspec.model.weights.words import LevelWords
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.reference.quantizers.nf4 import FP4, NF4


def encode(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Quantize to NF4, with the same codes and scales as `reference.quantizers.nf4.Codebook.quantize`.

    Both functions compute in float32.
    """
    reciprocals = (largest / jnp.where(tops == 0, 1, tops).astype(jnp.float64)).astype(jnp.float32)
    scaled = blocks * reciprocals[..., None]
    ordered = NF4.levels[NF4.order]
    assert np.array_equal(NF4.order, np.arange(len(ordered)))
    places = jnp.zeros(blocks.shape, jnp.uint8)
    for between in (ordered[1:] + ordered[:-1]) / 2:
        places = places + (scaled > between).astype(jnp.uint8)
    return places, tops


def _select_levels(codes: Array, levels: Float[np.ndarray, " levels"]) -> Any:
    """Select the level of each code from `levels`. Each bit of a code selects one half of the remaining levels."""
    if len(levels) == 1:
        return levels[0]
    lower, upper = np.split(levels, 2)
    return jnp.where((codes & len(lower)) != 0, _select_levels(codes, upper), _select_levels(codes, lower))


class _CodebookCodes(QuantizedMatrix):
    """A matrix of codes with sixteen levels. We decode a code by 15 selections, which is faster than a table lookup."""

    __slots__ = ()
    compiler_bytes = 3_000_000
    program_bytes = 6_000_000

    @property
    def slices(self) -> int:
        """The largest number of `pieces` that one loop multiplies; it depends on the size of the matrix.

        With 64 pieces, XLA needs a minute and 5 GB to compile 24 layers, and the loop is slower. With fewer pieces,
        there are more partial sums, which should stay in a CPU cache. 16 pieces are fastest for a matrix of 28,672 x
        4,096, and 4 pieces for a small model.
        """
        weights = 2 * self.codes.size
        return 4 if weights <= 1 << 22 else 8 if weights <= 1 << 25 else 16


class NF4Codes(_CodebookCodes):
    """A matrix of NF4 codes."""

    __slots__ = ()
    form = "nf4"
    largest = 1.0
    encode = staticmethod(encode)
    decode = staticmethod(partial(_select_levels, levels=NF4.levels))


class FP4Codes(_CodebookCodes):
    """A matrix of FP4 codes, in the variant of bitsandbytes."""

    __slots__ = ()
    form = "fp4"
    decode = staticmethod(partial(_select_levels, levels=FP4.levels))


class NF4Words(LevelWords):
    """A matrix of NF4 codes in the layout of the kernels. The kernels round each level by at most 2^-23."""

    __slots__ = ()
    form = "nf4"
    kernel_levels = Levels.of(NF4.levels.astype(np.float64), unit=2.0**-22, group=64)


class FP4Words(LevelWords):
    """A matrix of FP4 codes in the layout of the kernels. The kernels round each level by at most 2^-23."""

    __slots__ = ()
    form = "fp4"
    kernel_levels = Levels.of(FP4.levels.astype(np.float64), unit=2.0**-22, group=64)
