"""Quantised matrices as the kernels of a GPU read them: rearranged once, on the device, when they are loaded."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from model.quantised import LANES, Int4, Quantised
from pallas_kernels import int4


class Int4Words(Quantised):
    """Integers from -8 to 7, eight to a word in the order of `pallas_kernels.int4`: int32 [rows, cols / 8]."""

    __slots__ = ()
    form = "int4"

    @property
    def cols(self) -> int:
        return self.codes.shape[1] * int4.PIECES

    def pieces(self, block: int, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        levels = unpacked(self.codes).astype(jnp.float32).reshape(len(self.codes), -1, block)
        for column in range(start, stop, LANES):
            yield column, levels[:, :, column : column + LANES]

    def weights(self) -> Float[Array, "rows cols"]:
        levels = unpacked(self.codes).reshape(*self.scales.shape, -1)  # [rows, groups, group]
        return (levels * self.scales[..., None]).reshape(len(self.codes), -1)


def has_kernels() -> bool:
    """Whether the default device is one that the kernels are made for: of compute capability 9.0."""
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def as_read_here(weight: Any) -> Any:
    """`arranged`, on a device that has the kernels: of an array or a quantised matrix, or the shapes of one."""
    if not isinstance(weight, Int4) or not has_kernels():
        return weight
    abstract = isinstance(weight.codes, jax.ShapeDtypeStruct)
    return jax.eval_shape(arranged, weight) if abstract else arranged(weight)


def arranged(weights: Any) -> Any:
    """A tree of weights with int4 as the kernels read it; traceable. Other matrices they read as they are, or never."""
    return jax.tree.map(_arranged, weights, is_leaf=lambda leaf: isinstance(leaf, Quantised))


def _arranged(leaf: Any) -> Any:
    if not isinstance(leaf, Int4) or leaf.zeros is not None:
        return leaf
    return Int4Words(packed(leaf.codes), leaf.scales, None)


@jax.jit
def packed(codes: UInt8[Array, "rows bytes"]) -> Int32[Array, "rows words"]:
    """The codes of an `Int4` as `int4.pack` would have them."""
    rows, count = codes.shape
    pairs = codes.reshape(rows, count // LANES, LANES).astype(jnp.uint32)
    unsigned = jnp.concatenate([pairs & 15, pairs >> 4], axis=-1)  # [rows, blocks, 32]: a column each
    pieces = unsigned.reshape(rows, -1, int4.PIECES, int4.BLOCK // int4.PIECES)
    words = sum(_rotated(pieces[:, :, piece], shift) for piece, shift in enumerate(int4.SHIFTS))
    return lax.bitcast_convert_type(jnp.asarray(words), jnp.int32).reshape(rows, count // 4)


def unpacked(words: Int32[Array, "rows words"]) -> Int32[Array, "rows cols"]:
    """The integers of `int4.pack`: `int4.unpack`, on the device."""
    rows, count = words.shape
    blocks = lax.bitcast_convert_type(words, jnp.uint32).reshape(rows, count // 4, 4)
    pieces = [_rotated(blocks, -shift % 32) & 15 for shift in int4.SHIFTS]
    return jnp.stack(pieces, axis=2).reshape(rows, count * int4.PIECES).astype(jnp.int32) - int4.ZERO


def _rotated(words: Array, left: int) -> Array:
    """32 bits rotated to the left by 1 to 31; none of int4's shifts is 0."""
    return words << left | words >> (32 - left)
