r"""The loop of matrix-vector kernels for integer codes, with a scale for each row or each group of columns.

    y = sum_g (s_g sum_(k in g) q_k x_k + m_g sum_(k in g) x_k)

Some kinds of codes have minima m, which may also express zero points.

The tensor cores multiply codes as integers (`integer_mma.py`). The sums are then exact. This takes at most a third of
the instructions that are necessary to decode codes to floats and to multiply the floats one by one. The vectors, times
the norm if any, must be integers too, so they are stored in shared memory in fixed point (`fixed_point.py`). Each group
of columns with a common scale has one exponent. If a row has one scale, each 128 columns have one exponent. With
minima, the sum of x over each group is stored next to its exponent.

On cards without TMA there is no ring: threads load codes and scales to registers. If the steps do not divide a row,
the last step ends with the row, and overlaps the step before. For this step, the last columns of a vector are stored a
second time, with 2^e = 0 in the groups that the step before has multiplied.
"""

from abc import ABC, abstractmethod
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

from llamaspec.pallas_kernels.parts import int4, integer_mma, low_bits
from llamaspec.pallas_kernels.parts.compat import THREADS, WARPS, Target, tiled_layout
from llamaspec.pallas_kernels.parts.fixed_point import DIGITS, VECTOR, fixed_point
from llamaspec.pallas_kernels.parts.inline import stream
from llamaspec.pallas_kernels.parts.integer_mma import CHUNK, DOTS, StepMemory, unit_of
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.pallas_kernels.parts.row_tiles import RowTiles
from llamaspec.pallas_kernels.parts.staging import Store, store_all

GROUPS = (16, 32, 64, 128)  # possible group sizes
PASSES = 4  # passes over a vector and its norm, read at once into 4 or 8 registers each
PASSES_ALONE = 8  # passes over a vector without a norm, read at once
PASS = THREADS * VECTOR  # columns of a pass
FEW_STEPS = 4  # with up to this many steps, wait for all at once: a loop iteration takes longer than the multiplication


@dataclass(frozen=True)
class QuantizedProduct(ABC):
    """The loop of a thread block, which multiplies runs of adjacent rows of W by all vectors.

    Subclasses define W's layout.
    """

    tiles: int  # tiles of W
    blocks: int  # number of thread blocks
    rows: int  # rows of W in a run
    runs: int  # runs of a tile
    cols: int
    batch: int
    stages: int
    dtype: np.dtype  # dtype of the vectors
    bits: int  # of a code
    group: int | None  # columns with a common scale; None: a whole row
    minima: bool = False  # whether a group also has a minimum
    levels: Levels | None = None  # for codes that select levels
    ring: bool = True  # whether codes pass through a ring in shared memory; otherwise they are loaded to registers
    chunk: int = CHUNK  # columns of a step

    register_steps: ClassVar[int] = 1  # steps with codes on their way to registers, if there is no ring
    fewest_stages: ClassVar[int] = 2
    at_once: ClassVar[int] = 3  # blocks per SM if blocks have many tiles; each stages the vectors itself

    @property
    def steps(self) -> int:
        """Return the number of steps of a row. The last step may be partial: copies to the ring pad it with zeros."""
        return -(-self.cols // self.chunk)

    @property
    def beyond(self) -> int:
        """Return the number of columns that the steps have in addition to the row's columns."""
        return self.steps * self.chunk - self.cols

    @property
    def overlaps(self) -> bool:
        """Tell whether the last step overlaps the step before."""
        return not self.ring and self.beyond > 0

    @property
    def staged_columns(self) -> int:
        """Return the number of columns of a vector in shared memory."""
        return self.cols + PASS if self.overlaps else self.steps * self.chunk

    @property
    def ring_stages(self) -> int:
        """The number of stages of the ring. If a block has a single tile, at most the number of the tile's steps."""
        return self.stages if self.blocks < self.tiles else min(self.stages, self.steps)

    @property
    def columns(self) -> int:
        """Return the number of columns of a vector that share an exponent."""
        return self.group or max(GROUPS)

    @property
    def step_scales(self) -> int:
        """Return the number of scales of a row in a step."""
        return self.chunk // self.group if self.group else 0

    @property
    def apart(self) -> bool:
        """Tell whether codes have 5 or 6 bits. The lowest bits of such codes are in separate words."""
        return 4 < self.bits < 8

    @property
    def kinds(self) -> int:
        """Return how many numbers each group stores: 2 (a scale and a minimum) or 1 (a scale)."""
        return 1 + self.minima

    @property
    def step_bytes(self) -> int:
        """Return the bytes of a step in shared memory."""
        return self.runs * self.rows * (self.chunk * self.bits // 8 + 4 * self.kinds * self.step_scales)

    def scratch_bytes(self, *, normed: bool) -> int:
        """Count the bytes of shared memory that `scratch` takes."""
        del normed  # x is multiplied by the norm when staged
        columns = self.staged_columns
        vectors = self.batch * (DIGITS * columns + 4 * self.kinds * columns // self.columns)
        return self.ring * self.ring_stages * self.step_bytes + vectors

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Declare the shared memory and barriers for `run`, by name."""
        del normed
        copies = self.runs * (1 + (self.kinds if self.group else 0) + self.apart)
        shape = self._in_groups(self.staged_columns)
        staged: dict[str, Any] = {
            "digits": plgpu.SMEM((self.batch, *shape[:2], DIGITS, VECTOR), jnp.int8),
            "units": plgpu.SMEM((self.batch, self.kinds, shape[0]), jnp.float32),
        }
        if not self.ring:
            return staged
        staged["ring"] = integer_mma.ring(self.ring_stages, self.runs, self.rows, self.bits)
        staged["filled"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.ring_stages)
        if self.group:
            scales = (self.ring_stages, self.kinds, self.runs, self.rows, self.step_scales)
            staged["scales"] = plgpu.SMEM(scales, jnp.float32)
        if self.apart:
            staged["low_bits"] = low_bits.ring(self.ring_stages, self.runs, self.rows, columns=CHUNK, bits=self.bits)
        return staged

    def operands(self, w: Any) -> list[Array]:
        """List the arrays of W for the kernel: codes, scales, and minima and low bits, if any."""
        return w.arrays

    def view(self, x: Array) -> Array:
        """View vectors [..., cols], or the norm, in the shape for `run`. Nothing is copied."""
        return x.reshape(*x.shape[:-1], *self._in_groups(self.cols))

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
        `weight` are the refs of `operands`, and x_ref and norm_ref the refs of a `view`. Waits for the previous kernel
        before it first reads x.
        """
        codes_ref, scales_ref, *_ = weight
        squares: list[Any] = []

        def fetch(tile, step, slot):
            filled = staged["filled"].at[slot]
            for run, start in enumerate(starts(tile)):
                rows = pl.ds(start, self.rows)
                step = step + start * 0  # not a constant: JAX would refuse one beyond the end
                plgpu.copy_gmem_to_smem(self._codes(codes_ref, rows, step), staged["ring"].at[slot, run], filled)
                if self.group:
                    # We avoid `step * self.step_scales`: layout inference would see a multiple and make tiles, which
                    # may not divide a row.
                    groups = pl.ds(lax.div(step * CHUNK, self.group), self.step_scales)
                    for kind, ref in enumerate(weight[1 : 1 + self.kinds]):
                        plgpu.copy_gmem_to_smem(ref.at[rows, groups], staged["scales"].at[slot, kind, run], filled)
                if self.apart:
                    size = low_bits.words(CHUNK, self.bits)
                    own = weight[-1].at[rows, pl.ds(step * size, size)]
                    plgpu.copy_gmem_to_smem(own, staged["low_bits"].at[slot, run], filled)

        def load(tile, step):
            rows = [pl.ds(start, self.rows) for start in starts(tile)]

            def columns(ref, layout):
                """Load the part of `ref` that belongs to the step's columns, for each run."""
                size = ref.shape[1] * self.chunk // self.cols
                first = jnp.minimum(step * size, ref.shape[1] - size) if self.overlaps else step * size
                return [stream(ref.at[own_rows, pl.ds(first, size)], layout, target) for own_rows in rows]

            weights = {"codes": columns(codes_ref, integer_mma.codes_layout(self.bits, self.columns, self.chunk))}
            if self.group:
                layout = integer_mma.scales_layout(self.group, self.chunk)
                names = ("scales", "least")[: self.kinds]
                weights |= {name: columns(ref, layout) for name, ref in zip(names, weight[1:], strict=False)}
            if self.apart:
                weights["low_bits"] = columns(weight[-1], integer_mma.low_bits_layout(self.bits, self.chunk))
            return weights

        def prepare():
            norms = self._first_norms(norm_ref)  # weights, so read before the wait
            target.wait_for_previous()
            squares.extend(self._stage(x_ref, b, norm_ref, norms, staged, target) for b in range(self.batch))

        def begin():
            return integer_mma.zeros(self.batch, self.runs * self.rows)

        def wait(slot):
            plgpu.barrier_wait(staged["filled"].at[slot])

        def step(i, slot, sums):
            weights = {name: staged[name].at[slot] for name in ("scales", "low_bits") if name in staged}
            return multiply(i, {"codes": staged["ring"].at[slot], **weights}, sums)

        def multiply(i, weights, sums):
            first, count = i * (self.chunk // self.columns), self.chunk // self.columns
            if self.overlaps:
                first = jnp.where(i == self.steps - 1, self.staged_columns // self.columns - count, first)
            groups = pl.ds(first, count)
            staged_step = StepMemory(
                bits=self.bits,
                rows=self.runs * self.rows,
                group=self.columns,
                columns=self.staged_columns,
                digits=staged["digits"].at[:, groups],
                units=staged["units"].at[:, :, groups],
                minima=self.minima,
                levels=self.levels,
                chunk=self.chunk,
                in_registers=not self.ring,
                **{"scales": None, **weights},
            )
            return integer_mma.add(sums, staged_step, target)

        def read_ahead(tile):
            rows = [] if self.group else [pl.ds(start, self.rows) for start in starts(tile)]
            return [self.load_rows(scales_ref.at[some]) for some in rows], ahead(tile)

        def end(tile, sums, read):
            scales, read = read
            unit = unit_of(self.bits, self.levels)
            dots = integer_mma.finished(sums, self.runs, unit, target, minima=self.minima)
            if scales:
                dots = [[y * scale for y, scale in zip(ys, scales, strict=True)] for ys in dots]
            if norm_ref is not None:
                norms = [lax.rsqrt(square * (1.0 / self.cols) + eps) for square in squares]
                dots = [[y * norm for y in ys] for ys, norm in zip(dots, norms, strict=True)]
            finish(tile, dots, read)

        tiles = RowTiles(self.tiles, self.blocks, self.steps, self.ring_stages, FEW_STEPS)
        turns: dict[str, Any] = {"prepare": prepare, "begin": begin, "ahead": read_ahead, "finish": end}
        if self.ring:
            tiles.walk(block, fetch=fetch, wait=wait, step=step, **turns, target=target)
        else:
            tiles.walk_in_registers(block, load=load, step=multiply, **turns, target=target)

    @abstractmethod
    def _codes(self, codes_ref, rows, step) -> Any:
        """Return the view of `codes_ref` with these rows and the columns of a step."""

    def load_rows(self, ref) -> Array:
        """Load one number per row of a run, as float32 in the layout of the products."""
        return plgpu.load(ref, layout=DOTS, optimized=False).astype(jnp.float32)

    def _in_groups(self, cols: int) -> tuple[int, int, int]:
        """The shape of a vector of `cols` numbers as [groups, parts of a group, numbers in a part].

        Each thread loads one part.
        """
        return cols // self.columns, self.columns // VECTOR, VECTOR

    @property
    def _staging_layout(self) -> Any:
        """The register layout of a pass. In a pass, all threads load columns at once, `VECTOR` columns per thread."""
        groups, lanes, vector = self._in_groups(PASS)
        return tiled_layout(
            ((groups, lanes, vector), (groups // WARPS, lanes, vector), (1, 1, vector)), warps=-9, lanes=(-6, -5)
        )

    @property
    def _digits_layout(self) -> Any:
        """The register layout of the digits of a pass: a thread has the digits of the columns that it loaded."""
        groups, lanes, vector = self._in_groups(PASS)
        tiles = (
            (groups, lanes, DIGITS, vector),
            (groups // WARPS, lanes, DIGITS, vector),
            (1, 1, 1, vector),
        )
        return tiled_layout(tiles, warps=-12, lanes=(-8, -7))

    @property
    def _passes(self) -> list[int]:
        """Return the first group of each pass over a vector. The last pass may repeat groups of the previous pass."""
        groups, last = PASS // self.columns, (self.cols - PASS) // self.columns
        return [min(first, last) for first in range(0, last + groups, groups)]

    def _load_pass(self, ref, first: int) -> Array:
        """Load the columns of the pass that begins with group `first`."""
        own = pl.ds(first, PASS // self.columns)
        return plgpu.load(ref.at[own], layout=self._staging_layout, optimized=False)

    def _first_norms(self, norm_ref) -> list[Array]:
        """Load the norm's weights, if any, for the first `PASSES` passes over a vector."""
        return [] if norm_ref is None else [self._load_pass(norm_ref, first) for first in self._passes[:PASSES]]

    def _stage(self, vectors_ref, b: int, norm_ref, norms: list[Array], staged: dict[str, Any], target: Target) -> Any:
        """Stage vector b in shared memory, times the norm if any. `norms` is the result of `_first_norms`.

        With a norm, returns the sum of the vector's squares. To compute it, `_squares` may read the vector again.
        """
        x_ref, passes, layout = vectors_ref.at[b], self._passes, self._staging_layout
        units_layout = layout.reduce(2).reduce(1)
        if self.overlaps:
            self._stage_again(x_ref, b, norm_ref, staged, target)
        elif self.beyond:  # 0 times a number that is not finite would not be 0, so we set these to 0
            groups = PASS // self.columns
            none = plgpu.layout_cast(jnp.zeros((groups,), jnp.float32), units_layout)
            last = staged["units"].shape[2] - groups
            store_all([Store(staged["units"], (b, i, last), none, units_layout) for i in range(self.kinds)], target)
        # This holds unless columns are in two passes, or there are more passes than norms read before the wait.
        together = self.cols % PASS == 0 and len(passes) <= PASSES
        squares: Any = 0.0
        for some in batched(passes, PASSES if norm_ref is not None else PASSES_ALONE):
            loaded = [self._load_pass(x_ref, first) for first in some]
            factors: list[Any] = [None] * len(some)
            if norm_ref is not None:
                factors = [self._load_pass(norm_ref, first) for first in some] if some[0] else norms
            stores = []
            for first, x, factor in zip(some, loaded, factors, strict=True):
                x = x.astype(jnp.float32)
                if together and factor is not None:
                    squares = squares + x * x
                x = x if factor is None else x * factor.astype(jnp.float32)
                stores += self._stores(x, b, first, staged, target)
            store_all(stores, target)
        if norm_ref is None:
            return None
        if not together:
            return self._squares(x_ref)
        for _ in squares.shape:  # one axis after the other, because layout inference cannot sum over all at once
            squares = jnp.sum(squares, axis=-1)
        return squares

    def _stores(
        self, x: Array, b: int, first: int, staged: dict[str, Any], target: Target, *, zeros: int = 0
    ) -> list[Store]:
        """List the stores of the digits and units of a pass over vector b, to group `first` and the following groups.

        Units are 0 in the first `zeros` groups of the pass.
        """
        units_layout = self._staging_layout.reduce(2).reduce(1)
        digits, units = fixed_point(x, self._staging_layout, self._digits_layout, target)
        numbers = [units, jnp.sum(jnp.sum(x, axis=2), axis=1)] if self.minima else [units]
        if zeros:
            group = plgpu.broadcasted_iota(jnp.int32, units.shape, 0, layout=units_layout)
            numbers = [jnp.where(group < zeros, 0.0, number) for number in numbers]
        return [
            Store(staged["digits"], (b, first), digits, self._digits_layout),
            *(Store(staged["units"], (b, kind, first), number, units_layout) for kind, number in enumerate(numbers)),
        ]

    def _stage_again(self, x_ref, b: int, norm_ref, staged: dict[str, Any], target: Target) -> None:
        """Store the last pass over vector b again, behind vector b, for a step that overlaps the previous step."""
        first = self._passes[-1]
        x = self._load_pass(x_ref, first).astype(jnp.float32)
        if norm_ref is not None:
            x = x * self._load_pass(norm_ref, first).astype(jnp.float32)
        multiplied = (self.steps - 1) * self.chunk // self.columns
        stores = self._stores(x, b, self.cols // self.columns, staged, target, zeros=multiplied - first)
        store_all(stores, target)

    def _squares(self, x_ref) -> Any:
        """Add up the squares of a vector."""
        vector = next(v for v in (8, 4, 2, 1) if self.cols % (THREADS * v) == 0 and v * x_ref.dtype.itemsize <= 16)
        shape = self._in_groups(THREADS * vector)
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
        total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        for first in range(0, x_ref.shape[0], shape[0]):
            x = plgpu.load(x_ref.at[pl.ds(first, shape[0])], layout=layout).astype(jnp.float32)
            total = total + x * x
        return jnp.sum(total)


class Int8Product(QuantizedProduct):
    """Eight-bit codes: int8 [rows, cols]."""

    def _codes(self, codes_ref, rows, step) -> Any:
        return codes_ref.at[rows, pl.ds(step * CHUNK, CHUNK)]


class Int4Product(QuantizedProduct):
    """Codes of four to six bits: int32 words [rows, cols / 8] of four-bit codes.

    Codes of five and six bits keep their lowest one or two bits in separate words.
    """

    def _codes(self, codes_ref, rows, step) -> Any:
        return codes_ref.at[rows, pl.ds(step * (CHUNK // int4.WORD), CHUNK // int4.WORD)]
