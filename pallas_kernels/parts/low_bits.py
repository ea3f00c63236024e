"""The low bits of 5- and 6-bit codes in shared memory: the lowest one or two bits, in words of `int4.packed_apart`.

A tile has 8 rows of 256 columns, row after row, with 32 or 64 bytes each. Pieces of 16 bytes are swizzled. A lane of a
quad has the upper four bits of some columns, and reads the low bits of the same columns. For 128 columns, it reads one
word (one low bit) or two words (two low bits). In the tensor cores' order of rows, the lanes of a load never use the
same banks.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.inline import int32, load, times, total, word

OCTET = 8  # rows
WORD = 32  # bits
BLOCKS = int4.WIDE_BLOCK // int4.BLOCK


def words(columns: int, bits: int) -> int:
    """Count the words for `columns` codes of `bits` bits."""
    return columns * (bits - 4) // WORD


def tile_bytes(bits: int) -> int:
    return 4 * OCTET * words(int4.WIDE_BLOCK, bits)


def ring(*shape: int, columns: int, bits: int) -> Any:
    """Declare the shared memory for the low bits of codes [*shape, columns]."""
    return plgpu.SMEM((*shape, words(columns, bits)), jnp.int32, transforms=transforms(bits))


def transforms(bits: int) -> tuple[Any, ...]:
    size = words(int4.WIDE_BLOCK, bits)
    return plgpu.TilingTransform((OCTET, size)), plgpu.SwizzleTransform(4 * size)  # pyright: ignore[reportAbstractUsage]


def of_block(ref: Any, tile: Any, row: Any, place: Any, block: int, bits: int) -> list[Any]:
    """Load a lane's words of low bits. The tile begins at byte `tile`. `block` is 0 or 1, the half of its columns."""
    few = bits - 4
    swizzle = arith.andi(times(row, 4 * few), word(0x70))  # position of a row in 128 bytes of banks
    within = arith.xori(arith.xori(times(place, 4 * few), swizzle), word(16 * few * block))
    return load(ref, total(tile, times(row, 32 * few), within), int32(), few)
