r"""The loop inside every matrix-vector kernel, for weights that are floats: y = W x for one to eight vectors.

W is read once, which is all that decoding is: 2 or 4 bytes a weight, one multiplication and one addition. A thread
block walks along a few rows of W at once (`row_tiles.py`). Of a step each warp has every fourth row, each lane at most
16 bytes of it, so nothing is summed across threads before the end of the row.

RMSNorm costs no pass of its own: the sum of squares is taken while x is staged, and 1/rms, which is one number,
multiplies the finished dot product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.compat import LANES, THREADS, WARPS, Target, tiled_layout
from pallas_kernels.row_tiles import RowTiles

PIECES = 4  # 16-byte loads that a thread has under way at once while x is staged


@dataclass(frozen=True)
class RowProduct:
    """Some runs of rows of W at once times all vectors, in one thread block."""

    tiles: int  # in W
    blocks: int  # that share them
    rows: int  # of W in a run
    runs: int  # in a tile
    cols: int
    batch: int
    stages: int
    dtype: np.dtype

    @property
    def vector(self) -> int:
        """Elements that a thread loads at once: 16 bytes, or fewer for many vectors, of which each wants a sum for
        each of them."""
        return min(16 // self.dtype.itemsize, 8 if self.batch <= 4 else 4)

    @property
    def chunk(self) -> int:
        """Columns of a step."""
        return LANES * self.vector

    @property
    def steps(self) -> int:
        return self.cols // self.chunk

    @property
    def layout(self) -> Any:
        """[rows, chunk] in registers: rows over the warps, columns over the lanes, `vector` of them a thread."""
        return tiled_layout(((WARPS, self.chunk), (1, self.vector)), warps=-4, lanes=-3)

    @property
    def ring_stages(self) -> int:
        """As many bytes, however few a step takes; of one tile no more than it has."""
        stages = self.stages * (16 // self.dtype.itemsize) // self.vector
        return stages if self.blocks < self.tiles else min(stages, self.steps)

    def scratch_bytes(self, *, normed: bool) -> int:
        """Shared memory that `scratch` takes."""
        ring = self.ring_stages * self.runs * self.rows * self.chunk
        return (ring + (self.batch + normed) * self.cols) * self.dtype.itemsize

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Shared memory and barriers that `run` works in, with a norm or without."""
        return {
            "ring": plgpu.SMEM((self.ring_stages, self.runs, self.rows, self.chunk), self.dtype),
            "filled": plgpu.Barrier(num_arrivals=self.runs, num_barriers=self.ring_stages),
            "x": [plgpu.SMEM((self.cols,), self.dtype) for _ in range(self.batch)],
            "norm": [plgpu.SMEM((self.cols,), self.dtype)] if normed else [],
        }

    def operands(self, w: Any) -> list[Array]:
        """What the kernel is called with for W."""
        return [w]

    def view(self, x: Array) -> Array:
        """Vectors [..., cols], or the norm's one, as `run` takes them."""
        return x

    def run(
        self,
        block: Any,
        weight: Sequence[Any],
        starts: Callable[[Any], Sequence[Any]],
        x_ref,
        norm_ref,
        staged: dict[str, Any],
        target: Target,
        *,
        eps: float,
        finish: Callable[[Any, list[list[Array]]], None],
    ) -> None:
        """All tiles of a thread block: `finish(tile, dots)` has for each vector, for each run, the float32 products
        [rows] of the rows from `starts(tile)` on.

        `weight` is the ref of `operands`. Waits for the kernel before this one where x is first read, and not earlier.
        """
        (w_ref,) = weight
        squares: list[Any] = []

        def fetch(tile, step, slot):
            columns = pl.ds(step * self.chunk, self.chunk)
            for run, start in enumerate(starts(tile)):
                rows = w_ref.at[pl.ds(start, self.rows), columns]
                plgpu.copy_gmem_to_smem(rows, staged["ring"].at[slot, run], staged["filled"].at[slot])

        def prepare():
            if norm_ref is not None:
                self._stage(norm_ref, staged["norm"][0])
            target.wait_for_previous()
            squares.extend(self._stage(x_ref.at[b], x, squares=norm_ref is not None) for b, x in enumerate(staged["x"]))

        def begin():
            zero = plgpu.layout_cast(jnp.zeros((self.rows, self.chunk), jnp.float32), self.layout)
            return [[zero] * self.runs for _ in range(self.batch)]

        def step(i, slot, sums):
            plgpu.barrier_wait(staged["filled"].at[slot])
            columns = pl.ds(i * self.chunk, self.chunk)
            vectors = [self._load_columns(x.at[columns]) for x in staged["x"]]
            if norm_ref is not None:
                g = self._load_columns(staged["norm"][0].at[columns])
                vectors = [x * g for x in vectors]
            tiles = [self._load_tile(staged["ring"].at[slot, run]) for run in range(self.runs)]
            return [
                [total + tile * self._over_rows(x) for total, tile in zip(totals, tiles, strict=True)]
                for totals, x in zip(sums, vectors, strict=True)
            ]

        def end(tile, sums):
            dots = [[jnp.sum(total, axis=1) for total in totals] for totals in sums]
            if norm_ref is not None:
                scales = [lax.rsqrt(square * (1.0 / self.cols) + eps) for square in squares]
                dots = [[y * scale for y in ys] for ys, scale in zip(dots, scales, strict=True)]
            finish(tile, dots)

        tiles = RowTiles(self.tiles, self.blocks, self.steps, self.ring_stages)
        tiles.walk(block, fetch=fetch, prepare=prepare, begin=begin, step=step, finish=end, target=target)

    def load_rows(self, ref) -> Array:
        """One float32 number for each row of a run, laid out as the products are."""
        return plgpu.load(ref, layout=self.layout.reduce(1), optimized=False).astype(jnp.float32)

    def _stage(self, ref, smem, *, squares: bool = False) -> Any:
        """Copy a vector of `cols` to shared memory, through registers; the sum of its squares, if asked for.

        In few, wide pieces: no load moves across the barriers around a store, so each piece costs a trip to the cache.
        """
        vector = next(v for v in (8, 4, 2, 1) if self.cols % (THREADS * v) == 0 and v * self.dtype.itemsize <= 16)
        unit = THREADS * vector
        total = 0.0
        for start in range(0, self.cols, PIECES * unit):
            size = min(PIECES * unit, self.cols - start)
            layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
            values = plgpu.load(ref.at[pl.ds(start, size)], layout=layout)
            smem[pl.ds(start, size)] = values
            if squares:
                wide = values.astype(jnp.float32)
                total = total + jnp.sum(wide * wide)
        return total

    def _load_columns(self, ref) -> Array:
        return plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(jnp.float32)

    def _load_tile(self, ref) -> Array:
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

    def _over_rows(self, x: Array) -> Array:
        return lax.broadcast_in_dim(x, (self.rows, self.chunk), (1,))
