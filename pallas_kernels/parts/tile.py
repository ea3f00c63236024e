"""Tile sizes: measured ones from `tuning/DEVICE.json`, and a rule for all other shapes.

`tuning/h200.json` has the tiles that were faster than the rule on an H200, in single kernels or in whole models.
docs/lessons-gpu.md has some of the gains. `llamaspec bench --suite kernels --tune FILE` times rows and stages again.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from llamaspec.pallas_kernels.parts.card import H200, Card

TUNED = {(9, 0): "h200"}  # measured tiles in `tuning`, by compute capability
MOST_ROWS = 16  # rows for several vectors; a thread has no registers for more sums


class Tile(NamedTuple):
    """The size of a matrix's tiles, and how a thread block reads them."""

    rows: int  # rows of the matrix in a thread block: a multiple of 8
    stages: int | None = None  # stages of the ring in shared memory, i.e. steps in flight; None: `row_tiles` decides
    blocks: int | None = None  # number of thread blocks; None: `row_tiles` decides
    chunks: int | None = None  # chunks of columns in a step, for a matrix of floats; None: one


@cache
def _table(device: str) -> dict[str, list[Any]]:
    return json.loads(files("llamaspec.pallas_kernels").joinpath("tuning", f"{device}.json").read_text())


def tile_for(op: str, rows: int, cols: int, dtype: np.dtype, *, vectors: int = 1, card: Card = H200) -> Tile:
    """Choose the tile for a matrix: the measured one for its shape, else 16 rows, or 8 if 16 does not divide `rows`.

    Tiles are measured for one vector. Several vectors leave less room for a ring. So for several vectors, the number of
    stages is computed from the memory, and a measured tile with too many rows is replaced by one of 16 or 8 rows.

    >>> tile_for("gemv", 4096, 512, np.dtype(np.float32))
    Tile(rows=16, stages=None, blocks=None, chunks=None)
    >>> import jax.numpy as jnp
    >>> [tuple(tile_for("gemv", 2048, 8192, np.dtype(jnp.bfloat16), vectors=vectors)) for vectors in (1, 2)]
    [(8, 10, None, 2), (8, None, None, None)]
    >>> [tile_for("gemv", 5120, 13824, np.dtype(jnp.bfloat16), vectors=vectors).rows for vectors in (1, 2)]
    [40, 16]
    """
    device = TUNED.get(card.capability)
    measured = _table(device).get(f"{op} {rows}x{cols} {np.dtype(dtype).name}") if device else None
    if not measured or (vectors > 1 and measured[0] > MOST_ROWS):
        return Tile(rows=16 if rows % 16 == 0 else 8)
    tile = Tile(*measured)
    return tile if vectors == 1 else Tile(tile.rows, blocks=tile.blocks)
