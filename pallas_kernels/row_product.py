r"""The loop inside every matrix-vector kernel, for weights that are floats: y = W x for one to eight vectors.

W is read once, which is all that decoding is: 2 or 4 bytes a weight, one multiplication and one addition. A thread
block walks along a few rows of W at once (`row_tiles.py`). Of a step each warp has every fourth row, each lane at most
16 bytes of it, so nothing is summed across threads before the end of the row.

RMSNorm costs no pass of its own: x is staged times the norm's weights, in float32, and the sum of squares is taken on
the way; 1/rms, which is one number, multiplies the finished dot product.
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
        ring = self.ring_stages * self.runs * self.rows * self.chunk * self.dtype.itemsize
        return ring + self.batch * self.cols * self._staged_dtype(normed).itemsize

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Shared memory and barriers that `run` works in, with a norm or without."""
        return {
            "ring": plgpu.SMEM((self.ring_stages, self.runs, self.rows, self.chunk), self.dtype),
            "filled": plgpu.Barrier(num_arrivals=self.runs, num_barriers=self.ring_stages),
            "x": [plgpu.SMEM((self.cols,), self._staged_dtype(normed)) for _ in range(self.batch)],
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
            early = None if norm_ref is None else self._read(norm_ref, self._pieces[0])  # from memory
            target.wait_for_previous()
            squares.extend(self._stage(x_ref.at[b], norm_ref, early, x) for b, x in enumerate(staged["x"]))

        def begin():
            zero = plgpu.layout_cast(jnp.zeros((self.rows, self.chunk), jnp.float32), self.layout)
            return [[zero] * self.runs for _ in range(self.batch)]

        def step(i, slot, sums):
            plgpu.barrier_wait(staged["filled"].at[slot])
            columns = pl.ds(i * self.chunk, self.chunk)
            vectors = [self._load(x.at[columns], self.layout.reduce(0)) for x in staged["x"]]
            tiles = [self._load(staged["ring"].at[slot, run], self.layout) for run in range(self.runs)]
            return [
                [
                    total + tile * lax.broadcast_in_dim(x, tile.shape, (1,))
                    for total, tile in zip(totals, tiles, strict=True)
                ]
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
        return self._load(ref, self.layout.reduce(1))

    def _staged_dtype(self, normed: bool) -> np.dtype:
        """What holds a vector exactly, or its product with a norm to float32's rounding."""
        return np.dtype(jnp.float32) if normed else self.dtype

    @property
    def _pieces(self) -> list[slice]:
        """What of a vector the threads read at once. They are few and wide: no load moves across the barriers around a
        store, so each piece costs a trip to the cache."""
        size = PIECES * THREADS * self._wide
        return [slice(start, min(start + size, self.cols)) for start in range(0, self.cols, size)]

    @property
    def _wide(self) -> int:
        """Numbers of a vector that a thread reads with one load: 16 bytes, where all threads have as many."""
        return next(v for v in (8, 4, 2, 1) if self.cols % (THREADS * v) == 0 and v * self.dtype.itemsize <= 16)

    def _read(self, ref, piece: slice) -> Array:
        size = piece.stop - piece.start
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=self._wide)
        return plgpu.load(ref.at[pl.ds(piece.start, size)], layout=layout)

    def _stage(self, x_ref, norm_ref, early: Array | None, x_smem) -> Any:
        """Copy a vector to shared memory, through registers, times a norm if there is one, of which the first piece is
        `early`; and then the sum of its squares."""
        total = 0.0
        for piece in self._pieces:
            x = self._read(x_ref, piece)
            if early is not None:
                norm = self._read(norm_ref, piece) if piece.start else early
                x = x.astype(jnp.float32)
                total = total + jnp.sum(x * x)
                x = x * norm.astype(jnp.float32)
            x_smem[pl.ds(piece.start, piece.stop - piece.start)] = x
        return total

    def _load(self, ref, layout: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
