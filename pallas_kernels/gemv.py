r"""A matrix times one to eight vectors: y = W x, with a norm of x before and a residual after, where asked for.

    x_b <- x_b g / rms(x_b)          (with a norm g)
    y_b = W x_b (+ bias) (+ r_b)

W is read once, which is all that decoding is: 2 or 4 bytes a weight, one multiplication and one addition. A thread
block owns a few rows of W and walks along them through a ring in shared memory, which the copy engine (TMA) keeps
filled; the first copies are under way before the kernel before this one has ended. Of a step's tile each warp has
every fourth row, each lane 16 bytes of it, so nothing is summed across threads before the end of the row.

RMSNorm costs no pass of its own: the sum of squares is taken while x is staged, and 1/rms, which is one number,
multiplies the finished dot product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.compat import LANES, MAX_SHARED_MEMORY, THREADS, WARPS, Target, current_target, tiled_layout
from pallas_kernels.tile import Tile, tile_for

MAX_BATCH = 8
PIECES = 4  # 16-byte loads that a thread has under way at once while x is staged
DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))


def gemv(
    w: Float[Array, "rows cols"],
    x: Float[Array, "batch cols"],
    *,
    norm: Float[Array, " cols"] | None = None,
    eps: float = 1e-5,
    bias: Float[Array, " rows"] | None = None,
    residual: Float[Array, "batch rows"] | None = None,
    out: Any = None,
    tile: Tile | None = None,
) -> Float[Array, "batch rows"]:
    """W x for each of up to 8 vectors, in the dtype `out` (that of x, unless given), summed in float32.

    W, x, norm, bias and residual are all float32 or all bfloat16. Raises ValueError where `rows` is no multiple of 8
    or `cols` none of 128 (float32) or 256 (bfloat16), and for more vectors than shared memory holds.

    Reads rows x cols weights once; writes batch x rows numbers.
    """
    tile = tile or tile_for("gemv", w.shape[0], w.shape[-1], w.dtype)
    out = np.dtype(out or x.dtype)
    check_product("gemv", w, x, tile=tile)
    rows, cols = w.shape
    for name, array, shape in (
        ("norm", norm, (cols,)),
        ("bias", bias, (rows,)),
        ("residual", residual, (len(x), rows)),
    ):
        check_operand("gemv", name, array, shape, w.dtype)
    return _gemv(w, x, norm, bias, residual, eps=eps, out=out, tile=tile, target=current_target())


@partial(jax.jit, static_argnames=("eps", "out", "tile", "target"))
def _gemv(w, x, norm, bias, residual, *, eps: float, out: np.dtype, tile: Tile, target: Target):
    rows, cols = w.shape
    batch = len(x)
    product = RowProduct(rows=tile.rows, runs=1, cols=cols, batch=batch, stages=tile.stages, dtype=w.dtype)
    optional = [a for a in (norm, bias, residual) if a is not None]

    def gemv(w_ref, x_ref, *refs, staged, y_smem):
        refs = list(refs)
        norm_ref, bias_ref, residual_ref = (refs.pop(0) if a is not None else None for a in (norm, bias, residual))
        (y_ref,) = refs
        start = pl.multiple_of(lax.axis_index("rows") * tile.rows, 8)
        dots = product.run(w_ref, [start], x_ref, norm_ref, staged, target, eps=eps)
        target.let_next_start()
        mine = pl.ds(start, tile.rows)
        for b, (y,) in enumerate(dots):
            if bias_ref is not None:
                y = y + product.load_rows(bias_ref.at[mine])
            if residual_ref is not None:
                y = y + product.load_rows(residual_ref.at[b, mine])
            y_smem[b][...] = y.astype(out)
        plgpu.commit_smem()
        for b in range(batch):
            plgpu.copy_smem_to_gmem(y_smem[b], y_ref.at[b, mine])
        plgpu.wait_smem_to_gmem(0)

    kernel = target.kernel(
        gemv,
        out_type=jax.ShapeDtypeStruct((batch, rows), out),
        grid=(rows // tile.rows,),
        grid_names=("rows",),
        scratch_types={
            "staged": product.scratch(normed=norm is not None),
            "y_smem": [plgpu.SMEM((tile.rows,), out) for _ in range(batch)],
        },
    )
    return kernel(w, x, *optional)


@dataclass(frozen=True)
class RowProduct:
    """The loop inside every matrix-vector kernel: some runs of rows of W times all vectors, in one thread block."""

    rows: int  # of W in a run
    runs: int
    cols: int
    batch: int
    stages: int
    dtype: np.dtype

    @property
    def vector(self) -> int:
        """Elements that a thread loads at once: 16 bytes."""
        return 16 // self.dtype.itemsize

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

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Shared memory and barriers that `run` works in."""
        return {
            "ring": plgpu.SMEM((self.ring_stages, self.runs, self.rows, self.chunk), self.dtype),
            "filled": plgpu.Barrier(num_arrivals=self.runs, num_barriers=self.ring_stages),
            "x": [plgpu.SMEM((self.cols,), self.dtype) for _ in range(self.batch)],
            "norm": [plgpu.SMEM((self.cols,), self.dtype)] if normed else [],
        }

    @property
    def ring_stages(self) -> int:
        return min(self.stages, self.steps)

    def run(
        self, w_ref, starts: Sequence[Any], x_ref, norm_ref, staged: dict[str, Any], target: Target, *, eps: float
    ) -> list[list[Array]]:
        """For each vector, for each run that begins at a row of `starts`: the float32 products [rows].

        Waits for the kernel before this one where x is first read, and not earlier.
        """

        def fetch(step, slot):
            columns = pl.ds(step * self.chunk, self.chunk)
            for run, start in enumerate(starts):
                tile = w_ref.at[pl.ds(start, self.rows), columns]
                plgpu.copy_gmem_to_smem(tile, staged["ring"].at[slot, run], staged["filled"].at[slot])

        for slot in range(self.ring_stages):
            fetch(slot, slot)
        if norm_ref is not None:
            self._stage(norm_ref, staged["norm"][0])
        target.wait_for_previous()
        squares = [self._stage(x_ref.at[b], x, squares=norm_ref is not None) for b, x in enumerate(staged["x"])]

        def step(i, sums):
            slot = lax.rem(i, self.ring_stages)
            plgpu.barrier_wait(staged["filled"].at[slot])
            columns = pl.ds(i * self.chunk, self.chunk)
            vectors = [self._load_columns(x.at[columns]) for x in staged["x"]]
            if norm_ref is not None:
                g = self._load_columns(staged["norm"][0].at[columns])
                vectors = [x * g for x in vectors]
            tiles = [self._load_tile(staged["ring"].at[slot, run]) for run in range(self.runs)]
            sums = [
                [total + tile * self._over_rows(x) for total, tile in zip(totals, tiles, strict=True)]
                for totals, x in zip(sums, vectors, strict=True)
            ]

            @pl.when(i + self.ring_stages < self.steps)
            def _():
                target.before_refill()
                fetch(i + self.ring_stages, slot)

            return sums

        zero = plgpu.layout_cast(jnp.zeros((self.rows, self.chunk), jnp.float32), self.layout)
        sums = lax.fori_loop(0, self.steps, step, [[zero] * self.runs for _ in range(self.batch)])
        dots = [[jnp.sum(total, axis=1) for total in totals] for totals in sums]
        if norm_ref is None:
            return dots
        scales = [lax.rsqrt(square * (1.0 / self.cols) + eps) for square in squares]
        return [[y * scale for y in ys] for ys, scale in zip(dots, scales, strict=True)]

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


def check_product(op: str, w: Array, x: Array, *, tile: Tile) -> None:
    """Raise ValueError, in the caller's words, for a matrix and vectors that `RowProduct` cannot multiply."""
    if w.ndim != 2 or x.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{op} takes W [rows, cols] and x [batch, cols], got {w.shape} and {x.shape}")
    if w.dtype not in DTYPES or x.dtype != w.dtype:
        raise ValueError(f"{op} takes W and x in float32 or both in bfloat16, got {w.dtype} and {x.dtype}")
    rows, cols = w.shape
    if tile.rows % 8 or rows % tile.rows or not rows:
        raise ValueError(f"{op} takes rows of W in multiples of {max(tile.rows, 8)}, got {rows}")
    chunk = LANES * 16 // w.dtype.itemsize
    if cols % chunk or not cols:
        raise ValueError(f"{op} takes columns of W in multiples of {chunk} in {w.dtype}, got {cols}")
    if not 1 <= len(x) <= MAX_BATCH:
        raise ValueError(f"{op} takes 1 to {MAX_BATCH} vectors, got {len(x)}")
    ring = min(tile.stages, cols // chunk) * tile.rows * chunk
    if (needed := (ring + (len(x) + 1) * cols) * w.dtype.itemsize) > MAX_SHARED_MEMORY - 4096:
        raise ValueError(f"{op} would need {needed} bytes of shared memory for {len(x)} vectors of {cols}")


def check_operand(op: str, name: str, array: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if array is not None and (array.shape != shape or array.dtype != dtype):
        raise ValueError(f"{op} takes {name} {list(shape)} in {dtype}, got {list(array.shape)} in {array.dtype}")
