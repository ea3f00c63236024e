"""Tile sizes are data: `tuning/DEVICE.json`, measured; where a shape is not in it, a rule.

`tuning/h200.json` has what was faster than the rule (docs/performance-gpu.md): tiles of fewer rows, where processors
would be idle else; wider ones, where all blocks then run at once and have as much to do, and of heads of a gigabyte, in
as many blocks as tiles; other rings, other numbers of blocks, and steps of several chunks. TinyLlama's were found in
whole models, in groups of 64 where there are codes, and so was down of 8B and 13B timed in them; the others in kernels
alone. `llamaspec bench --suite kernels --tune FILE` times rows and stages of a matrix by itself.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

MOST_ROWS = 16  # of several vectors: more sums than a thread has registers for


class Tile(NamedTuple):
    """How a matrix is read."""

    rows: int  # of the matrix, in a thread block: a multiple of 8
    stages: int | None = None  # of the ring in shared memory: steps on their way at once; None: by `row_tiles`
    blocks: int | None = None  # thread blocks that share the tiles; None: by `row_tiles`
    chunks: int | None = None  # of columns in a step, of a matrix of floats; None: one


@cache
def _table(device: str) -> dict[str, list[Any]]:
    return json.loads(files("pallas_kernels").joinpath("tuning", f"{device}.json").read_text())


def tile_for(op: str, rows: int, cols: int, dtype: np.dtype, *, vectors: int = 1, device: str = "h200") -> Tile:
    """The tile for a matrix of this shape: as measured for one vector, or 16 rows, 8 where 16 do not divide.

    Several vectors leave less room for a ring, so that their steps are the rule's; and so are their rows, where those
    measured are too many.

    >>> tile_for("gemv", 4096, 512, np.float32)
    Tile(rows=16, stages=None, blocks=None, chunks=None)
    >>> import jax.numpy as jnp
    >>> [tuple(tile_for("gemv", 2048, 8192, jnp.bfloat16, vectors=vectors)) for vectors in (1, 2)]
    [(8, 10, None, 2), (8, None, None, None)]
    >>> [tile_for("gemv", 5120, 13824, jnp.bfloat16, vectors=vectors).rows for vectors in (1, 2)]
    [40, 16]
    """
    measured = _table(device).get(f"{op} {rows}x{cols} {np.dtype(dtype).name}")
    if not measured or (vectors > 1 and measured[0] > MOST_ROWS):
        return Tile(rows=16 if rows % 16 == 0 else 8)
    tile = Tile(*measured)
    return tile if vectors == 1 else Tile(tile.rows, blocks=tile.blocks)
