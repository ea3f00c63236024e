r"""A matrix times many vectors: y = x W^T, a linear layer for the tokens of a prompt.

    y_ir = sum_k x_ik W_rk

Both operands have k along a row, which is how the tensor cores (wgmma) read them from shared memory. A thread block
makes a tile of y: two warpgroups hold 64 rows each in registers, as float32, and a third keeps a ring of tiles of x and
W filled. Its first copies of W start before the previous kernel ends. Blocks with the same rows of W are neighbors in
the grid, so that W is read from memory once; x comes from the L2 cache.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.parts.compat import MAX_SHARED_MEMORY, PROCESSORS, Target, current_target
from pallas_kernels.parts.wgmma import matrices
from pallas_kernels.unsupported import Unsupported

WORKERS = 2  # warpgroups that compute
HEIGHT = 64  # rows of y that one has
DEPTH = 64  # columns of x and W in a step: 128 bytes
WIDTH = 64  # columns of y that are written at once


class GemmTile(NamedTuple):
    """Size of a thread block's part of the work."""

    rows: int  # rows of W in a thread block: 64, 128 or 256
    stages: int  # stages of the ring, 2 or more


def gemm(
    x: Float[Array, "seq cols"],
    w: Float[Array, "rows cols"],
    *,
    out: Any = None,
    tile: GemmTile | None = None,
) -> Float[Array, "seq rows"]:
    """Multiply x by the transpose of W in float32, and round once to `out`: bfloat16 by default, or float32.

    Raises ValueError for shapes that do not fit together, and Unsupported for x or W in another dtype than bfloat16 and
    for `rows` or `cols` that are no multiples of 64.

    Takes 2 seq rows cols operations; reads W once, and x and y once where they stay in the cache. A sequence that is no
    multiple of 8 is copied to one that is.
    """
    out = np.dtype(out or x.dtype)
    check_gemm(x, w, out=out)
    seq = len(x)
    tile = tile or tile_of(seq, len(w), out)
    check_tile(tile, len(w), out=out)
    x = jnp.pad(x, ((0, -seq % 8), (0, 0)))  # as the copy engine wants its arrays
    return _gemm(x, w, out=out, tile=tile, target=current_target())[:seq]


@partial(jax.jit, static_argnames=("out", "tile", "target"))
def _gemm(x, w, *, out: np.dtype, tile: GemmTile, target: Target):
    (seq, cols), rows = x.shape, len(w)
    steps = cols // DEPTH
    stages = min(tile.stages, steps)
    height = WORKERS * HEIGHT
    blocks = pl.cdiv(seq, height)

    def gemm(x_ref, w_ref, y_ref, x_smem, w_smem, y_smem, filled, read):
        block = lax.axis_index("blocks")
        first_row = lax.rem(block, blocks) * height
        first_column = lax.div(block, blocks) * tile.rows
        worker = lax.axis_index("worker")

        def copy_x(step, slot):
            part = x_ref.at[pl.ds(first_row, height), pl.ds(step * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(part, x_smem.at[slot], filled.at[slot])

        def copy_w(step, slot):
            part = w_ref.at[pl.ds(first_column, tile.rows), pl.ds(step * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(part, w_smem.at[slot], filled.at[slot])

        @pl.when(worker == WORKERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            for slot in range(stages):
                copy_w(slot, slot)
            target.wait_for_previous()
            for slot in range(stages):
                copy_x(slot, slot)

            @pl.loop(stages, steps)
            def _(step):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(read.at[slot])
                copy_w(step, slot)
                copy_x(step, slot)

            for slot in range(stages):  # the end waits until the last tiles are read, too
                plgpu.barrier_wait(read.at[slot])

        @pl.when(worker < WORKERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(worker * HEIGHT, HEIGHT)

            def accumulate(sums):
                @pl.loop(0, steps)
                def _(step):
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(filled.at[slot])
                    plgpu.wgmma(sums, x_smem.at[slot, mine], w_smem.at[slot].T)
                    plgpu.wgmma_wait(1)  # all but this one have been read
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(read.at[lax.rem(step - 1, stages)]))

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(read.at[(steps - 1) % stages])
                return sums[...]

            y = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((HEIGHT, tile.rows), jnp.float32)).astype(out)
            target.let_next_start()
            for at in range(0, tile.rows, WIDTH):
                slot = y_smem.at[worker, at // WIDTH % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                slot[...] = lax.slice(y, (0, at), (HEIGHT, at + WIDTH))
                plgpu.commit_smem()
                part = y_ref.at[pl.ds(first_row + worker * HEIGHT, HEIGHT), pl.ds(first_column + at, WIDTH)]
                plgpu.copy_smem_to_gmem(slot, part)
            plgpu.wait_smem_to_gmem(0)

    kernel = target.kernel(
        gemm,
        out_type=jax.ShapeDtypeStruct((seq, rows), out),
        grid=(blocks * pl.cdiv(rows, tile.rows),),
        grid_names=("blocks",),
        num_threads=WORKERS + 1,
        thread_name="worker",
        scratch_types={
            "x_smem": matrices(stages, height, DEPTH),
            "w_smem": matrices(stages, tile.rows, DEPTH),
            "y_smem": matrices(WORKERS, 2, HEIGHT, WIDTH, dtype=out),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "read": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages),
        },
    )
    return kernel(x, w)


def tile_of(seq: int, rows: int, out: np.dtype) -> GemmTile:
    """Choose wide tiles, which read less, unless narrow ones share the work more evenly among the processors.

    >>> tile_of(4096, 28672, np.dtype(jnp.bfloat16)), tile_of(512, 4096, np.dtype(jnp.bfloat16))
    (GemmTile(rows=256, stages=4), GemmTile(rows=128, stages=5))
    """
    blocks = pl.cdiv(seq, WORKERS * HEIGHT)
    wide, narrow = (pl.cdiv(blocks * pl.cdiv(rows, width), PROCESSORS) * width for width in (256, 128))
    if rows % 256 == 0 and wide <= 1.1 * narrow:
        return GemmTile(256, 4 if out.itemsize == 2 else 3)
    return GemmTile(128 if rows % 128 == 0 else 64, 5)


def check_gemm(x: Array, w: Array, *, out: np.dtype) -> None:
    """Raise ValueError for shapes that do not fit together, Unsupported for what the kernel is not made for."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or 0 in x.shape + w.shape:
        raise ValueError(f"gemm takes x [seq, cols] and W [rows, cols], got {x.shape} and {w.shape}")
    bfloat16 = np.dtype(jnp.bfloat16)
    if x.dtype != bfloat16 or w.dtype != bfloat16:
        raise Unsupported(f"gemm takes x and W in bfloat16, got {x.dtype} and {w.dtype}")
    if out not in (bfloat16, np.dtype(np.float32)):
        raise Unsupported(f"gemm gives bfloat16 or float32, not {out}")
    for name, size in (("rows", len(w)), ("columns", w.shape[1])):
        if size % 64:
            raise Unsupported(f"gemm takes {name} of W in multiples of 64, got {size}")


def check_tile(tile: GemmTile, rows: int, *, out: np.dtype) -> None:
    """Raise Unsupported for a tile that does not divide the matrix, or that shared memory has no room for."""
    if tile.rows not in (64, 128, 256) or rows % tile.rows:
        raise Unsupported(f"gemm takes tiles of 64, 128 or 256 rows that divide those of W, got {tile.rows} for {rows}")
    if tile.stages < 2:  # a tile is given back when the next one is multiplied
        raise Unsupported(f"gemm takes 2 stages or more, got {tile.stages}")
    ring = tile.stages * (WORKERS * HEIGHT + tile.rows) * DEPTH * 2
    if (needed := ring + 2 * WORKERS * HEIGHT * WIDTH * out.itemsize) > MAX_SHARED_MEMORY - 2048:
        raise Unsupported(f"gemm would need {needed} bytes of shared memory for {tile}")
