"""The rest of codes of 5 and 6 bits in shared memory: the lowest bit or two of each, in words of `int4.packed_apart`.

A tile is 8 rows of 256 columns, row after row: 32 or 64 bytes of each, of which pieces of 16 bytes are swizzled. A lane
of a quad has the same columns of its row as of the upper four bits. Of 128 columns that is a word for one bit, or two
words for two bits, which the lanes of a load in the tensor cores' order of rows never find in the same banks.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.inline import int32, load, times, total, word

OCTET = 8  # rows
WORD = 32  # bits
BLOCKS = int4.WHOLE // int4.BLOCK


def words(columns: int, bits: int) -> int:
    """Count the words of so many columns of codes of so many bits."""
    return columns * (bits - 4) // WORD


def tile_bytes(bits: int) -> int:
    return 4 * OCTET * words(int4.WHOLE, bits)


def ring(*shape: int, columns: int, bits: int) -> Any:
    """Name the shared memory for the rest of codes [*shape, columns]."""
    return plgpu.SMEM((*shape, words(columns, bits)), jnp.int32, transforms=transforms(bits))


def transforms(bits: int) -> tuple[Any, ...]:
    size = words(int4.WHOLE, bits)
    return plgpu.TilingTransform((OCTET, size)), plgpu.SwizzleTransform(4 * size)  # pyright: ignore[reportAbstractUsage]


def of_block(ref: Any, tile: Any, row: Any, place: Any, block: int, bits: int) -> list[Any]:
    """Load the words that a lane of a quad has of one of the two blocks of a tile, which begins at byte `tile`."""
    few = bits - 4
    swizzle = arith.andi(times(row, 4 * few), word(0x70))  # of a row of 32 few bytes, the place in 128 bytes of banks
    within = arith.xori(arith.xori(times(place, 4 * few), swizzle), word(16 * few * block))
    return load(ref, total(tile, times(row, 32 * few), within), int32(), few)
