"""Tile sizes are data: `tuning/DEVICE.json`, measured; where a shape is not in it, a rule.

`tuning/h200.json` has the products that another tile multiplied faster than the rule's, beyond the noise of both:
narrow tiles, where weights are so few that with wider ones processors would be idle, and gate and up in as many blocks
as run at once. `llamaspec bench --suite kernels --tune FILE` times rows and stages alone; blocks were found by whole
models (benchmarks/LOG.md).
"""

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np


class Tile(NamedTuple):
    """How a matrix is read."""

    rows: int  # of the matrix, in a thread block: a multiple of 8
    stages: int  # of the ring in shared memory: steps on their way at once
    blocks: int | None = None  # thread blocks that share the tiles; None: as many as `row_tiles` makes of them


@cache
def _table(device: str) -> dict[str, list[int]]:
    return json.loads(files(__package__).joinpath("tuning", f"{device}.json").read_text())


def tile_for(op: str, rows: int, cols: int, dtype: np.dtype, *, device: str = "h200") -> Tile:
    """The tile for a matrix of this shape: as measured, or 16 rows (8 where 16 do not divide) and 4 stages.

    Of codes 2: their steps are longer, and with smaller rings more blocks run at once.

    >>> tile_for("gemv", 4096, 512, np.float32), tile_for("gemv int8", 4096, 2048, np.float32)
    (Tile(rows=16, stages=4, blocks=None), Tile(rows=16, stages=2, blocks=None))
    """
    if measured := _table(device).get(f"{op} {rows}x{cols} {np.dtype(dtype).name}"):
        return Tile(*measured)
    return Tile(rows=16 if rows % 16 == 0 else 8, stages=2 if op.endswith(("int8", "int4")) else 4)
