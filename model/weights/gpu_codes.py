"""Quantized matrices in the layout of the GPU's kernels: rearranged once, on the device, when they are loaded."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from model.running.device import default_device
from model.weights.codes import LANES, Int4, QuantizedMatrix
from pallas_kernels.parts import int4


class Int4Words(QuantizedMatrix):
    """Integers from -8 to 7, eight to a word in the order of `pallas_kernels.parts.int4`: int32 [rows, cols / 8]."""

    __slots__ = ()
    form = "int4"

    @property
    def cols(self) -> int:
        return self.codes.shape[1] * int4.WORD

    def pieces(self, block: int, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        levels = unpacked(self.codes).astype(jnp.float32).reshape(len(self.codes), -1, block)
        for column in range(start, stop, LANES):
            yield column, levels[:, :, column : column + LANES]

    def weights(self) -> Float[Array, "rows cols"]:
        levels = unpacked(self.codes).reshape(*self.scales.shape, -1)  # [rows, groups, group]
        return (levels * self.scales[..., None]).reshape(len(self.codes), -1)


def as_read_here(weight: Any) -> Any:
    """Arrange an array, a quantized matrix, or the shapes of one, if the default device has kernels."""
    if not isinstance(weight, Int4) or not default_device().has_kernels:
        return weight
    abstract = isinstance(weight.codes, jax.ShapeDtypeStruct)
    return jax.eval_shape(arranged, weight) if abstract else arranged(weight)


def arranged(weights: Any) -> Any:
    """Put the int4 matrices of a tree of weights into the layout of the kernels; traceable. Others stay as they are."""
    return jax.tree.map(_arranged, weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))


def _arranged(leaf: Any) -> Any:
    if not isinstance(leaf, Int4) or leaf.zeros is not None or leaf.cols % int4.BLOCK:
        return leaf
    return Int4Words(packed(leaf.codes), leaf.scales, None)


@jax.jit
def packed(codes: UInt8[Array, "rows bytes"]) -> Int32[Array, "rows words"]:
    """Rearrange the codes of an `Int4` as `int4.pack` does."""
    rows, count = codes.shape
    pairs = codes.reshape(rows, count // LANES, LANES)
    unsigned = jnp.concatenate([pairs & 15, pairs >> 4], axis=-1) ^ 8  # in two's complement, one to a column, in order
    halves = unsigned.reshape(rows, -1, int4.RUNS, 4, 2, 4)
    joined = (halves[..., 0, :] | halves[..., 1, :] << 4).swapaxes(2, 3)
    return lax.bitcast_convert_type(joined, jnp.int32).reshape(rows, count // 4)


def unpacked(words: Int32[Array, "rows words"]) -> Int32[Array, "rows cols"]:
    """Give the integers of `int4.pack`, as `int4.unpack` does, on the device."""
    rows, count = words.shape
    both = lax.bitcast_convert_type(words, jnp.int8).reshape(rows, -1, 4, int4.RUNS, 4).swapaxes(2, 3)
    codes = jnp.stack([both << 4 >> 4, both >> 4], axis=-2)
    return codes.reshape(rows, count * int4.WORD).astype(jnp.int32)
