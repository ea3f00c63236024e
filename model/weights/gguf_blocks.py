"""Unpacks quantized matrices of GGUF files on the device: the file's bytes become codes and scales there.

The host copies bytes and does no arithmetic, so loading takes as long as reading the file. The codes and scales are the
same, bit for bit, as the ones that `Codes.parts` yields, which NumPy unpacks on the host. The modules ggml_blocks,
ggml_codebooks and ggml_superblocks of `reference.quantizers` explain the layouts in the table below.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int8, UInt8

from llamaspec.model.checkpoints.checkpoint import Blocks, Codes, Tensor
from llamaspec.model.checkpoints.codes import WITH_MINIMA
from llamaspec.model.checkpoints.gguf.blocks import FLOAT16_AT, FORMS
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.quantizing import no_parts, stored_on_device
from llamaspec.reference.quantizers.ggml import READABLE

AT_ONCE = 1 << 24  # number of weights in a slab


class Field(NamedTuple):
    """Consecutive bytes of a block that hold numbers of `bits` bits.

    Byte m of a run of `stride` bytes has the numbers m, m + stride, m + 2 stride, ..., from its lowest bit on.
    """

    start: int
    stop: int
    bits: int
    stride: int

    def of(self, blocks: UInt8[Array, "*batch bytes"]) -> UInt8[Array, "*batch numbers"]:
        """Unpack the numbers of this field from all blocks."""
        *batch, _ = blocks.shape
        runs = blocks[..., self.start : self.stop].reshape(*batch, -1, 1, self.stride)
        shifts = jnp.arange(0, 8, self.bits, dtype=jnp.uint8)[:, None]
        return (runs >> shifts & (1 << self.bits) - 1).reshape(*batch, -1)


Multiples = tuple[Int8[Array, "*batch groups"], ...]  # of scales, and of minima if the type has minima


class BlockLayout(NamedTuple):
    """The layout of a type's codes, and of its multiples.

    Multiples are integers for each group: one multiplies the block's unit of scales (d), and if the type has minima,
    another one multiplies the unit of minima. A code is the number in the first field, plus 2^bits times the number in
    the second field, plus `lowest`.
    """

    fields: tuple[Field, ...]
    lowest: int = 0
    multiples: Callable[[Any], Multiples] | None = None  # None: d is the scale, and the second float16 the minimum


def _two_nibbles(blocks: Any) -> Multiples:
    """Unpack Q2_K's multiples.

    Each group has a byte: the low half multiplies the unit of scales, and the high half multiplies the unit of minima.
    """
    return _signed(blocks[..., :16] & 15), _signed(blocks[..., :16] >> 4)


def _six_bits_from_minus_32(blocks: Any) -> Multiples:
    """Unpack Q3_K's multiples of six bits. One field has the lower four bits, and another the upper two bits."""
    return (_signed(Field(96, 104, 4, 8).of(blocks) | Field(104, 108, 2, 4).of(blocks) << 4) - 32,)


def _six_bits(blocks: Any) -> Multiples:
    """Unpack the multiples of Q4_K and Q5_K.

    The last four groups store the upper two bits of their multiples in the bytes of the first four groups.
    """
    scales, minima, low = (blocks[..., at : at + 4] for at in (4, 8, 12))

    def joined(first: Any, last: Any) -> Any:
        return _signed(jnp.concatenate([first & 63, last | first >> 6 << 4], axis=-1))

    return joined(scales, low & 15), joined(minima, low >> 4)


def _bytes(blocks: Any) -> Multiples:
    """Unpack Q6_K's multiples: signed bytes."""
    return (_signed(blocks[..., 192:208]),)


def _signed(numbers: Any) -> Int8[Array, "*shape"]:
    return lax.bitcast_convert_type(numbers, jnp.int8)


LAYOUTS = {
    "Q8_0": BlockLayout((Field(2, 34, 8, 1),)),
    "Q5_0": BlockLayout((Field(6, 22, 4, 16), Field(2, 6, 1, 1)), -16),
    "Q5_1": BlockLayout((Field(8, 24, 4, 16), Field(4, 8, 1, 1))),
    "Q4_0": BlockLayout((Field(2, 18, 4, 16),), -8),
    "Q4_1": BlockLayout((Field(4, 20, 4, 16),)),
    "IQ4_NL": BlockLayout((Field(2, 18, 4, 16),)),
    "MXFP4": BlockLayout((Field(1, 17, 4, 16),)),
    "Q6_K": BlockLayout((Field(0, 128, 4, 64), Field(128, 192, 2, 32)), -32, _bytes),
    "Q5_K": BlockLayout((Field(48, 176, 4, 32), Field(16, 48, 1, 32)), 0, _six_bits),
    "Q4_K": BlockLayout((Field(16, 144, 4, 32),), 0, _six_bits),
    "Q3_K": BlockLayout((Field(32, 96, 2, 32), Field(0, 32, 1, 32)), -4, _six_bits_from_minus_32),
    "Q2_K": BlockLayout((Field(16, 80, 2, 32),), 0, _two_nibbles),
}


def blocks_of(tensors: Sequence[Tensor]) -> list[Blocks] | None:
    """Return the blocks of tensors that one program can unpack together; None unless all have blocks of one type."""
    blocks = [tensor.codes.blocks for tensor in tensors if tensor.codes and tensor.codes.blocks]
    same = len(blocks) == len(tensors) and len({item.type for item in blocks}) == 1
    return blocks if same else None


@partial(jax.jit, static_argnames=("type", "for_kernels"))
def matrix_of_blocks(packed: UInt8[Array, "rows bytes"], *, type: str, for_kernels: bool) -> QuantizedMatrix:
    """Unpack rows of blocks of ggml's type `type`, into the layout of the kernels if `for_kernels` is set.

    Temporary arrays take several bytes for each weight, so we unpack a large matrix in slabs, one after the other.
    """
    form, group = FORMS[type]
    codes = Codes(form, group, zeros=False, bytes=0, parts=no_parts)

    def unpack(rows: UInt8[Array, "rows bytes"]) -> QuantizedMatrix:
        matrix = stored_on_device(*_unpacked(rows, type), codes)
        return arranged(matrix) if for_kernels else matrix

    rows, row_bytes = packed.shape
    slab = _slab(rows, row_bytes // READABLE[type].bytes * READABLE[type].weights)
    if slab == rows:
        return unpack(packed)
    slabs = lax.map(unpack, packed.reshape(-1, slab, row_bytes))
    return jax.tree.map(lambda array: array.reshape(rows, *array.shape[2:]), slabs)


def _slab(rows: int, cols: int) -> int:
    """Return the number of rows to unpack at once: all, or a divisor of `rows` for about `AT_ONCE` weights.

    >>> _slab(1024, 4096), _slab(128_256, 4096), _slab(100_003, 4096)
    (1024, 4008, 100003)
    """
    most = max(1, AT_ONCE // cols)
    divisor = next((rows // count for count in range(-(-rows // most), 16 * rows // most) if rows % count == 0), rows)
    return min(rows, divisor)


def _unpacked(
    packed: UInt8[Array, "rows bytes"], type: str
) -> tuple[Int8[Array, "rows cols"], Array, Float32[Array, "rows groups"] | None]:
    """Unpack codes, scales and minima, as `gguf.blocks` does on the host."""
    layout, rows = LAYOUTS[type], len(packed)
    blocks = packed.reshape(rows, -1, READABLE[type].bytes)
    low, *high = (field.of(blocks) for field in layout.fields)
    for bits in high:
        low = low | bits << layout.fields[0].bits
    codes = (_signed(low) + layout.lowest).reshape(rows, -1)
    if type == "MXFP4":
        return codes, blocks[..., 0], None
    scales, *minima = (_float16_at(blocks, at) for at in FLOAT16_AT[type])
    if layout.multiples:
        multiples = layout.multiples(blocks)
        units = [scales, *(-unit for unit in minima)]
        scales, *minima = (
            (unit[..., None] * numbers.astype(jnp.float32)).reshape(rows, -1)
            for unit, numbers in zip(units, multiples, strict=True)
        )
    return codes, scales, minima[0] if FORMS[type].form in WITH_MINIMA else None


def _float16_at(blocks: UInt8[Array, "*batch bytes"], at: int) -> Float32[Array, "*batch"]:
    bits = blocks[..., at].astype(jnp.uint16) | blocks[..., at + 1].astype(jnp.uint16) << 8
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
