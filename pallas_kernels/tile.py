"""Tile sizes are data: `tuning/DEVICE.json`, measured; where a shape is not in it, a rule.

`tuning/h200.json` is empty as yet: of the tiles that were tried on an H200 none was faster beyond the noise than the
rule's (benchmarks/LOG.md), and quantised weights have not been tuned. `llamaspec bench --suite kernels --tune FILE`
fills it.
"""

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np


class Tile(NamedTuple):
    """How a matrix is read."""

    rows: int  # of the matrix, in a thread block: a multiple of 8
    stages: int  # of the ring in shared memory: tiles on their way at once


@cache
def _table(device: str) -> dict[str, list[int]]:
    return json.loads(files(__package__).joinpath("tuning", f"{device}.json").read_text())


def tile_for(op: str, rows: int, cols: int, dtype: np.dtype, *, device: str = "h200") -> Tile:
    """The tile for a matrix of this shape: as measured, or 16 rows (8 where 16 do not divide) and 4 stages."""
    if measured := _table(device).get(f"{op} {rows}x{cols} {np.dtype(dtype).name}"):
        return Tile(*measured)
    return Tile(rows=16 if rows % 16 == 0 else 8, stages=4)
