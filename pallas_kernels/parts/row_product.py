r"""The loop of the matrix-vector kernels for float weights: y = W x for one to eight vectors.

Decoding mostly means reading W once. A weight has 2 or 4 bytes, and needs one multiplication and one addition per
vector. A thread block processes a few rows of W, one chunk of columns after the other (`row_tiles.py`). In a chunk,
each warp has every fourth row, and each lane has at most 16 bytes of such a row. A lane adds up its own products, so
threads exchange sums only at the end of the row.

A step is one or more chunks. At the start of a step, all threads wait for its copies. At its end, they wait until all
have read it. In tiles of few rows and many columns, these waits take much of the time. With two chunks per step, and a
ring of ten stages, a matrix of 2048 x 8192 takes 5 to 6 % less time.

On cards without TMA there is no ring. Each thread loads weights to its registers, and multiplies them itself.

Weights may be e4m3, floats of eight bits with a scale per row. The loop converts them to float32 in registers, and
multiplies the finished dot product by the scale.

RMSNorm needs no separate pass over x. The loop stores x times the norm's weights in shared memory, in float32, and adds
up the squares of x at the same time. Each finished dot product is multiplied by 1 / rms, a single number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from llamaspec.pallas_kernels.parts.compat import LANES, THREADS, WARPS, Target, tiled_layout
from llamaspec.pallas_kernels.parts.inline import ONE_EACH, from_e4m3, stream, thread_sums, widened
from llamaspec.pallas_kernels.parts.row_tiles import RowTiles
from llamaspec.pallas_kernels.parts.staging import Store, store_all

IN_FLIGHT = 64  # bytes of weights on their way to a thread's registers, if there is no ring
PIECES = 4  # 16-byte loads of a piece of x per thread
TOGETHER = 4  # pieces to read before the first is stored; with a norm, each piece is stored before the next read
SQUARES = tiled_layout(((WARPS, THREADS), (1, THREADS // LANES)), warps=-4, lanes=-3).reduce(
    0
)  # layout of the threads' sums of squares: each warp has all of them


@dataclass(frozen=True)
class RowProduct:
    """The loop of a thread block, which multiplies runs of adjacent rows of W by all vectors."""

    tiles: int  # tiles of W
    blocks: int  # number of thread blocks
    rows: int  # rows of W in a run
    runs: int  # runs of a tile
    cols: int
    batch: int
    chunks: int  # chunks of columns in a step
    stages: int
    dtype: np.dtype  # of the vectors
    e4m3: bool = False  # whether weights are e4m3; otherwise they have the vectors' dtype
    ring: bool = True  # whether weights pass through a ring in shared memory; otherwise they are loaded to registers

    fewest_stages: ClassVar[int] = 4
    at_once: ClassVar[int] = 2  # blocks per SM if blocks have many tiles

    @property
    def vector(self) -> int:
        """Return the number of weights per load of a thread: 16 bytes, or fewer if many vectors need many registers."""
        return min(16 // self.dtype.itemsize, 8 if self.batch <= 4 else 4)

    @property
    def chunk(self) -> int:
        """Return the number of columns that the lanes of a warp load at once."""
        return LANES * self.vector

    @property
    def steps(self) -> int:
        return self.cols // (self.chunks * self.chunk)

    @property
    def step_bytes(self) -> int:
        """Return the bytes of a step in shared memory."""
        return self._copies * self.rows * self.chunk * self._stored.itemsize

    @property
    def layout(self) -> Any:
        """The layout of [rows, chunk] in registers: rows over warps, columns over lanes, `vector` per thread."""
        return tiled_layout(((WARPS, self.chunk), (1, self.vector)), warps=-4, lanes=-3)

    @property
    def register_steps(self) -> int:
        """The number of steps with weights on their way to registers, if there is no ring."""
        return max(1, IN_FLIGHT * THREADS // self.step_bytes)

    @property
    def ring_stages(self) -> int:
        """The number of stages of the ring. If a block has a single tile, at most the number of the tile's steps."""
        return self.stages if self.blocks < self.tiles else min(self.stages, self.steps)

    def scratch_bytes(self, *, normed: bool) -> int:
        """Count the bytes of shared memory that `scratch` takes."""
        vector = self.cols * self._staged_dtype(normed).itemsize + (4 * THREADS if normed else 0)
        return self.ring * self.ring_stages * self.step_bytes + self.batch * vector

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Declare the shared memory and barriers for `run`, by name."""
        staged: dict[str, Any] = {
            "x": [plgpu.SMEM((self.cols,), self._staged_dtype(normed)) for _ in range(self.batch)]
        }
        if self.ring:
            staged["ring"] = plgpu.SMEM((self.ring_stages, self._copies, self.rows, self.chunk), self._stored)
            staged["filled"] = plgpu.Barrier(num_arrivals=self._copies, num_barriers=self.ring_stages)
        if normed:
            staged["squares"] = [plgpu.SMEM((THREADS,), jnp.float32) for _ in range(self.batch)]
        return staged

    def operands(self, w: Any) -> list[Array]:
        """List the arrays of W for the kernel."""
        return [w.codes, w.scales] if self.e4m3 else [w]

    def view(self, x: Array) -> Array:
        """View vectors [..., cols], or the norm, in the shape for `run`."""
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
        ahead: Callable[[Any], Any],
        finish: Callable[[Any, list[list[Array]], Any], None],
    ) -> None:
        """Multiply all tiles of a thread block, and pass the products of each tile to `finish(tile, dots, read)`.

        `dots[vector][run]` is float32 [rows]: the products with the rows of a run. `starts(tile)` returns the first row
        of every run. `read` is what `ahead(tile)` returned; we call it before we multiply, so that its loads are early.
        `weight` are the refs of `operands`. Waits for the previous kernel before it first reads x.
        """
        w_ref, *scales_refs = weight
        squares = staged.get("squares", [None] * self.batch)

        def pieces(tile, step):
            """Yield the weights of a step in memory, run after run of each chunk."""
            runs = starts(tile)
            for nth in range(self.chunks):
                columns = self._columns(step, nth)
                yield from (w_ref.at[pl.ds(start, self.rows), columns] for start in runs)

        def fetch(tile, step, slot):
            for copy, piece in enumerate(pieces(tile, step)):
                plgpu.copy_gmem_to_smem(piece, staged["ring"].at[slot, copy], staged["filled"].at[slot])

        def load(tile, step):
            return [stream(piece, self.layout, target) for piece in pieces(tile, step)]

        def prepare():
            # No earlier kernel writes a norm, so we read its first piece before the wait.
            early = None if norm_ref is None else self._read(norm_ref, self._pieces[0])
            target.wait_for_previous()
            for b, (x, sums) in enumerate(zip(staged["x"], squares, strict=True)):
                self._stage(x_ref.at[b], norm_ref, early, x, sums, target)

        def begin():
            zero = plgpu.layout_cast(jnp.zeros((self.rows, self.chunk), jnp.float32), self.layout)
            return [[zero] * self.runs for _ in range(self.batch)]

        def wait(slot):
            plgpu.barrier_wait(staged["filled"].at[slot])

        def step(i, slot, sums):
            def weights_of(copy):
                return plgpu.load(staged["ring"].at[slot, copy], layout=self.layout, optimized=False)

            return multiply(i, weights_of, sums)

        def step_in_registers(i, weights, sums):
            return multiply(i, weights.__getitem__, sums)

        def multiply(i, weights_of, sums):
            """Add the products of step i. `weights_of(copy)` returns the weights of a chunk and a run."""
            for nth in range(self.chunks):
                columns = self._columns(i, nth)
                vectors = [self._load(x.at[columns], self.layout.reduce(0), target) for x in staged["x"]]
                tiles = [self._widened(weights_of(copy), target) for copy in self._copies_of(nth)]
                sums = [
                    [
                        total + tile * lax.broadcast_in_dim(x, tile.shape, (1,))
                        for total, tile in zip(totals, tiles, strict=True)
                    ]
                    for totals, x in zip(sums, vectors, strict=True)
                ]
            return sums

        def read_ahead(tile):
            rows = [pl.ds(start, self.rows) for start in starts(tile)]
            return [[self.load_rows(ref.at[some]) for some in rows] for ref in scales_refs], ahead(tile)

        def end(tile, sums, read):
            scales, read = read
            dots = [[jnp.sum(total, axis=1) for total in totals] for totals in sums]
            for scale_row in scales:
                dots = [[y * scale for y, scale in zip(ys, scale_row, strict=True)] for ys in dots]
            if norm_ref is not None:
                means = [
                    jnp.sum(plgpu.load(sums, layout=SQUARES, optimized=False)) * (1.0 / self.cols) for sums in squares
                ]
                scales = [lax.rsqrt(mean + eps) for mean in means]
                dots = [[y * scale for y in ys] for ys, scale in zip(dots, scales, strict=True)]
            finish(tile, dots, read)

        tiles = RowTiles(self.tiles, self.blocks, self.steps, self.ring_stages)
        turns: dict[str, Any] = {"prepare": prepare, "begin": begin, "ahead": read_ahead, "finish": end}
        if self.ring:
            tiles.walk(block, fetch=fetch, wait=wait, step=step, **turns, target=target)
        else:
            tiles.walk_in_registers(block, load=load, step=step_in_registers, **turns, target=target)

    def load_rows(self, ref) -> Array:
        """Load one number per row of a run, as float32 in the layout of the products."""
        return plgpu.load(ref, layout=self.layout.reduce(1), optimized=False).astype(jnp.float32)

    @property
    def _copies(self) -> int:
        """The number of copies for a slot of the ring."""
        return self.chunks * self.runs

    def _copies_of(self, nth: int) -> range:
        """Return the indices of the copies for the nth chunk of a step, one per run."""
        return range(nth * self.runs, (nth + 1) * self.runs)

    def _columns(self, step, nth: int) -> Any:
        """Return the slice of columns of the nth chunk of a step."""
        return pl.ds((step * self.chunks + nth) * self.chunk, self.chunk)

    @property
    def _stored(self) -> np.dtype:
        """Return the dtype of the weights in memory."""
        return np.dtype(np.int8) if self.e4m3 else self.dtype

    def _staged_dtype(self, normed: bool) -> np.dtype:
        """Return the dtype of staged vectors: the dtype of x, or float32 if they are multiplied by a norm."""
        return np.dtype(jnp.float32) if normed else self.dtype

    @property
    def _pieces(self) -> list[slice]:
        """The slices of a vector that the threads read at once."""
        size = PIECES * THREADS * self._wide
        return [slice(start, min(start + size, self.cols)) for start in range(0, self.cols, size)]

    @property
    def _wide(self) -> int:
        """Return how many numbers of a vector each thread loads at once: at most 16 bytes."""
        return next(v for v in (8, 4, 2, 1) if self.cols % (THREADS * v) == 0 and v * self.dtype.itemsize <= 16)

    def _piece_layout(self, piece: slice) -> Any:
        return plgpu.Layout.WG_STRIDED((piece.stop - piece.start,), vec_size=self._wide)

    def _read(self, ref, piece: slice) -> Array:
        piece_ref = ref.at[pl.ds(piece.start, piece.stop - piece.start)]
        return plgpu.load(piece_ref, layout=self._piece_layout(piece))

    def _stage(self, x_ref, norm_ref, early: Array | None, x_smem, squares, target: Target) -> None:
        """Copy a vector through registers to shared memory, multiplied by the weights of the norm, if there is one.

        `early` is the first piece of these weights. With a norm, each thread writes its sum of squares to `squares`,
        and `run` adds them up at the end.
        """
        total: Any = None
        for some in batched(self._pieces, TOGETHER if early is None else 1):
            stores = []
            for piece in some:
                x = self._read(x_ref, piece)
                if early is not None:
                    norm = self._read(norm_ref, piece) if piece.start else early
                    x = x.astype(jnp.float32)
                    squares_sum = thread_sums(x * x, self._wide, self._piece_layout(piece), target)
                    total = squares_sum if total is None else total + squares_sum
                    if piece.stop == self.cols:
                        stores.append(Store(squares, (0,), total, ONE_EACH))
                    x = x * norm.astype(jnp.float32)
                stores.append(Store(x_smem, (piece.start,), x, self._piece_layout(piece)))
            store_all(stores, target)

    def _widened(self, weights: Array, target: Target) -> Array:
        return (from_e4m3 if self.e4m3 else widened)(weights, self.layout, target)

    def _load(self, ref, layout: Any, target: Target) -> Array:
        return widened(plgpu.load(ref, layout=layout, optimized=False), layout, target)
