"""Tile sizes are data: `tuning/DEVICE.json`, measured; where a shape is not in it, a rule.

`tuning/h200.json` has the products that another tile multiplied faster than the rule's, beyond the noise of both:
narrow tiles, where weights are quantised and so few that with wider ones processors would be idle. `llamaspec bench
--suite kernels --tune FILE` finds them.
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
    """The tile for a matrix of this shape: as measured, or 16 rows (8 where 16 do not divide) and 4 stages."""
    if measured := _table(device).get(f"{op} {rows}x{cols} {np.dtype(dtype).name}"):
        return Tile(*measured)
    return Tile(rows=16 if rows % 16 == 0 else 8, stages=4)
