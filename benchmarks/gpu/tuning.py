"""Which tile each product is fastest with: `llamaspec bench --suite kernels --tune FILE`.

`pallas_kernels.tile` has a rule, and a table of the shapes for which another tile is faster; this makes the table.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.kernels import seconds
from benchmarks.gpu.scale import Scale
from benchmarks.kernel_cases.case import Case
from benchmarks.report import Row, skipped
from pallas_kernels.tile import Tile, tile_for

STAGES = (3, 4, 6, 8)
CODES_IN_A_WORD = 8


def tune(scale: Scale, clock: Clock) -> Iterator[Row]:
    """A row for each product of one vector: its fastest tile, beside what runs now."""
    for case in scale.timed:
        if not (product := product_of(case)):
            continue
        if clock.over:
            yield skipped(case.name)
            continue
        now = tile_for(*product)
        tiles = {Tile(rows, stages) for rows in scale.tiles for stages in STAGES} | {now}
        timed = {}
        for tile in sorted(tiles):
            try:
                with scale.running():
                    timed[tile] = seconds(partial(case.function, tile=tile), case, scale)
            except ValueError:  # it does not divide the matrix, or does not fit
                continue
        best = min(timed, key=lambda tile: timed[tile].median)
        op, rows, cols, dtype = product
        yield {
            "case": case.name,
            "key": f"{op} {rows}x{cols} {dtype.name}",
            "tile": list(best),
            "median": timed[best].median,
            "now": list(now),
            "now_median": timed[now].median,
            # Else it is within the noise.
            "faster": timed[best].median < timed[now].least,
        }


def product_of(case: Case) -> tuple[str, int, int, np.dtype] | None:
    """What `tile_for` is asked for a case; None without a tile, or for several vectors, which share that of one."""
    op = case.op.split()[0]
    if op not in ("gemv", "gemv_quantised", "norm_gate_up", "norm_qkv"):
        return None
    rows, cols = case.arrays[0].shape
    vectors = case.arrays[2 if op == "gemv_quantised" else 1].shape[0]
    if op == "gemv_quantised":
        packed = case.arrays[0].dtype == np.int32
        op, cols = f"{op} {'int4' if packed else 'int8'}", cols * CODES_IN_A_WORD if packed else cols
    return (op, rows, cols, np.dtype(case.dtype)) if vectors == 1 else None
