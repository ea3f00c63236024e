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

PARTS = 2  # of a step: half as many turns of the loop, of which each waits for memory and asks for more
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
        """Columns of a part of a step."""
        return LANES * self.vector

    @property
    def parts(self) -> int:
        """Of a step."""
        return PARTS if self.cols % (PARTS * self.chunk) == 0 else 1

    @property
    def steps(self) -> int:
        return self.cols // (self.parts * self.chunk)

    @property
    def layout(self) -> Any:
        """[rows, chunk] in registers: rows over the warps, columns over the lanes, `vector` of them a thread."""
        return tiled_layout(((WARPS, self.chunk), (1, self.vector)), warps=-4, lanes=-3)

    @property
    def ring_stages(self) -> int:
        """As many bytes, however few or many a step takes; of one tile no more than it has."""
        stages = max(1, self.stages * (16 // self.dtype.itemsize) // (self.vector * self.parts))
        return stages if self.blocks < self.tiles else min(stages, self.steps)

    def scratch_bytes(self, *, normed: bool) -> int:
        """Shared memory that `scratch` takes."""
        ring = self.ring_stages * self.runs * self.rows * self.parts * self.chunk * self.dtype.itemsize
        if normed and self.batch == 1:
            return ring + self.cols * 4
        return ring + (self.batch + normed) * self.cols * self.dtype.itemsize

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Shared memory and barriers that `run` works in, with a norm or without."""
        multiplied = normed and self.batch == 1
        x = plgpu.SMEM((self.cols,), jnp.float32 if multiplied else self.dtype)
        return {
            "ring": plgpu.SMEM((self.ring_stages, self.runs, self.rows, self.parts, self.chunk), self.dtype),
            "filled": plgpu.Barrier(num_arrivals=self.runs, num_barriers=self.ring_stages),
            "x": [x] * self.batch,
            "norm": [plgpu.SMEM((self.cols,), self.dtype)] if normed and not multiplied else [],
        }

    def operands(self, w: Any) -> list[Array]:
        """What the kernel is called with for W. Nothing is moved."""
        return [w.reshape(len(w), -1, self.chunk)]

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
            parts = pl.ds(step * self.parts, self.parts)
            for run, start in enumerate(starts(tile)):
                rows = w_ref.at[pl.ds(start, self.rows), parts]
                plgpu.copy_gmem_to_smem(rows, staged["ring"].at[slot, run], staged["filled"].at[slot])

        def prepare():
            multiplied = norm_ref is not None and not staged["norm"]
            if norm_ref is not None:  # from memory, so before the wait
                self._stage(norm_ref, staged["x" if multiplied else "norm"][0])
            target.wait_for_previous()
            for b, x in enumerate(staged["x"]):
                squares.append(self._stage(x_ref.at[b], x, times=multiplied, squares=norm_ref is not None))

        def begin():
            zero = plgpu.layout_cast(jnp.zeros((self.rows, self.chunk), jnp.float32), self.layout)
            return [[zero] * self.runs for _ in range(self.batch)]

        def step(i, slot, sums):
            plgpu.barrier_wait(staged["filled"].at[slot])
            for part in range(self.parts):
                columns = pl.ds((i * self.parts + part) * self.chunk, self.chunk)
                vectors = [self._load_columns(x.at[columns]) for x in staged["x"]]
                for norm in staged["norm"]:
                    g = self._load_columns(norm.at[columns])
                    vectors = [x * g for x in vectors]
                tiles = [self._load_tile(staged["ring"].at[slot, run, :, part]) for run in range(self.runs)]
                sums = [
                    [total + tile * self._over_rows(x) for total, tile in zip(totals, tiles, strict=True)]
                    for totals, x in zip(sums, vectors, strict=True)
                ]
            return sums

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

    def _stage(self, ref, smem, *, times: bool = False, squares: bool = False) -> Any:
        """Copy a vector of `cols` to shared memory, through registers, multiplied by what is there if asked for; the sum
        of its squares, if that is asked for.

        In few, wide pieces: no load moves across the barriers around a store, so each piece costs a trip to the cache.
        """
        vector = next(v for v in (8, 4, 2, 1) if self.cols % (THREADS * v) == 0 and v * self.dtype.itemsize <= 16)
        unit = THREADS * vector
        total = 0.0
        for start in range(0, self.cols, PIECES * unit):
            size = min(PIECES * unit, self.cols - start)
            layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
            piece = pl.ds(start, size)
            values = plgpu.load(ref.at[piece], layout=layout)
            staged = values.astype(smem.dtype)
            smem[piece] = staged * plgpu.load(smem.at[piece], layout=layout) if times else staged
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
