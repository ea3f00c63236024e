"""Finds the fastest tile of each product: `llamaspec bench --suite kernels --tune FILE`.

`pallas_kernels.parts.tile` has a rule for tiles, and a table of shapes for which a different tile is faster. This
module makes the table.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llamaspec.benchmarks.common.kernel_cases.case import Case
from llamaspec.benchmarks.common.report import Row, skipped
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.kernels import CaseTimer
from llamaspec.benchmarks.suites.gpu.scale import Scale
from llamaspec.pallas_kernels.parts.matrix import key_of
from llamaspec.pallas_kernels.parts.tile import Tile, tile_for
from llamaspec.pallas_kernels.unsupported import Unsupported

STAGES = (2, 3, 4, 6)


def tune(scale: Scale, clock: Deadline) -> Iterator[Row]:
    """Find the fastest tile of each product with one vector, and time the tile that is in use now."""
    for case in scale.timed:
        if not (product := product_of(case)):
            continue
        if clock.over:
            yield skipped(case.name)
            continue
        now = tile_for(*product)
        tiles = {Tile(rows, stages) for rows in scale.tiles for stages in (None, *STAGES)} | {now}
        timing, timed = CaseTimer(case, scale), {}
        for tile in sorted(tiles, key=str):
            try:
                with scale.running():
                    timed[tile] = timing.seconds(partial(case.function, tile=tile))
            except Unsupported:  # the tile does not divide the matrix, or does not fit
                if tile == now:
                    raise
        best = min(timed, key=lambda tile: timed[tile].median)
        op, rows, cols, dtype = product
        yield {
            "case": case.name,
            "key": f"{op} {rows}x{cols} {dtype.name}",
            "tile": listed(best),
            "median": timed[best].median,
            "now": listed(now),
            "now_median": timed[now].median,
            # A smaller gain is within the noise.
            "faster": timed[best].most < timed[now].least,
        }


def listed(tile: Tile) -> list[int | None]:
    """Convert a tile to a list for the table, without None at its end. For a field that is None, the rule chooses.

    >>> listed(Tile(16)), listed(Tile(16, blocks=264))
    ([16], [16, None, 264])
    """
    known = max(i for i, value in enumerate(tile) if value is not None)
    return list(tile[: known + 1])


def product_of(case: Case) -> tuple[str, int, int, np.dtype] | None:
    """Return the arguments of `tile_for` if the case multiplies one vector by a matrix that is stored in a single form.

    Returns None for any other case, because the table of tiles has no entry for it.
    """
    op = case.op.split()[0]
    if op not in ("gemv", "norm_gate_up", "norm_qkv"):
        return None
    w, x, *_ = case.arrays
    if isinstance(w, tuple):  # matrices of several forms take the tile of the first
        return None
    return (key_of(op, w), *w.shape, np.dtype(case.dtype)) if len(x.shape) == 2 and x.shape[0] == 1 else None
