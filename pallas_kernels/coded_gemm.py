r"""A matrix of codes times 3 to 64 vectors: Y = X W^T, on the tensor cores.

    y_rb = sum_g (s_rg sum_(k in g) q_rk x_bk + m_rg sum_(k in g) x_bk)

q_rk are the codes of row r of W. s_rg and m_rg are the scale and the minimum (if any) of row r and group g of columns.
A thread block multiplies 64 or 128 rows of W by all vectors. It converts codes exactly to bfloat16 in registers
(`parts/decoded_codes.py`), and the tensor cores multiply them by bfloat16 vectors. The sum of a group is multiplied by
its scale in float32. XLA computes the sums of x over each group beforehand, and the kernel multiplies them by the
minima. So each code is read once for any number of vectors. Steps of W and x pass through a ring in shared memory
(`parts/row_tiles.py`). A matrix with few rows is also cut along its columns, and the partial sums are added in a fixed
order.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from llamaspec.pallas_kernels.parts import decoded_codes, int4, low_bits
from llamaspec.pallas_kernels.parts.card import H200
from llamaspec.pallas_kernels.parts.compat import Target, current_target
from llamaspec.pallas_kernels.parts.decoded_codes import (
    LINE,
    ROWS,
    RUN,
    StagedCodes,
    decoded,
    in_order,
    row_scales,
    scales_of,
    store_turned,
    sums_of,
)
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, check_low_bits
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.row_tiles import MOST_STAGES, RowTiles, even_share
from llamaspec.pallas_kernels.parts.staging import own_meetings
from llamaspec.pallas_kernels.parts.wgmma import across, down, filled
from llamaspec.pallas_kernels.unsupported import Unsupported

MOST_VECTORS = 64
GROUPS = (16, 32, 64, 128)  # group sizes; four-bit codes do not support 16
WIDTHS = (8, 16, 32, 64)  # numbers of vectors in one product of the tensor cores
PIECE = 64  # columns of a vector per line of shared memory


@dataclass(frozen=True)
class BlockGrid:
    """Division of a product among thread blocks."""

    blocks: int = 1  # blocks of 64 rows in a tile
    parts: int = 1  # parts of the columns
    stages: int | None = None  # stages of the ring; None: as many as fit into an even share of shared memory
    turn: int = 128  # columns to multiply between two waits for sums


@dataclass(frozen=True)
class Geometry:
    """Sizes of a product in one thread block."""

    rows: int
    cols: int
    width: int  # vectors, padded
    bits: int
    group: int | None
    minima: bool
    cut: BlockGrid

    @property
    def columns(self) -> int:
        return step_columns(self.group)

    @property
    def steps(self) -> int:
        """The number of steps of a tile. The last step may be partial; copies pad it with zeros."""
        return -(-self.cols // (self.columns * self.cut.parts))

    @property
    def tile_rows(self) -> int:
        return ROWS * self.cut.blocks

    @property
    def tiles(self) -> int:
        return self.rows // self.tile_rows * self.cut.parts

    @property
    def groups(self) -> int:
        """The number of scales of a row in a step."""
        return self.columns // self.group if self.group else 0

    @property
    def apart(self) -> bool:
        """Tell whether codes have 5 or 6 bits. The lowest bits of such codes are in separate words."""
        return 4 < self.bits < 8

    @property
    def piece(self) -> int:
        """The number of columns that are multiplied at once: a group of W or a line of x, whichever is smaller."""
        return min(PIECE, self.group or PIECE)

    @property
    def run(self) -> int:
        """The number of columns in a run, which `decoded_codes.in_order` reorders."""
        return min(RUN, self.piece)

    @property
    def step_bytes(self) -> int:
        of_rows = self.columns * self.bits // 8 + 4 * (1 + self.minima) * self.groups
        return self.tile_rows * of_rows + self.width * (2 * self.columns + 4 * self.minima * self.groups)

    @property
    def stages(self) -> int:
        fit = max(2, even_share(self.tiles, H200) // self.step_bytes)
        return min(self.cut.stages or fit, self.steps, MOST_STAGES)

    def scratch(self, target: Target) -> dict[str, Any]:
        """Declare the shared memory and barriers of a thread block, by name."""
        swizzle = 2 * self.piece
        lines = plgpu.TilingTransform((8, self.piece)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
        staged = {
            "codes": decoded_codes.ring(self.stages, self.tile_rows, columns=self.columns, bits=self.bits),
            "x": plgpu.SMEM((self.stages, self.width, self.columns), jnp.bfloat16, transforms=lines),
            "filled": plgpu.Barrier(
                num_arrivals=2 + bool(self.group) + 2 * self.minima + self.apart, num_barriers=self.stages
            ),
            "decoded": plgpu.SMEM((ROWS, self.columns), jnp.bfloat16, transforms=lines) if target.interpret else None,
        }
        if self.group:
            staged["scales"] = plgpu.SMEM((self.stages, self.tile_rows, self.groups), jnp.float32)
        if self.minima:
            staged["minima"] = plgpu.SMEM((self.stages, self.tile_rows, self.groups), jnp.float32)
            staged["sums"] = plgpu.SMEM((self.stages, self.width, self.groups), jnp.float32)
        if self.apart:
            staged["packed_low_bits"] = low_bits.ring(self.stages, self.tile_rows, columns=self.columns, bits=self.bits)
        return staged


def coded_gemm(
    w: ScaledCodes, x: Float[Array, "batch cols"], *, cut: BlockGrid | None = None
) -> Float32[Array, "batch rows"]:
    """Compute x W^T for up to 64 vectors x. Only the float32 sums are rounded.

    W has float32 scales, with or without minima. The columns of a group have a common scale. Codes of 8 bits may have
    groups of 16, 32, 64 or 128 columns, or one scale for each row. Codes of 6 or 5 bits may have groups of 16 or 32
    columns, and codes of 4 bits groups of 32, 64 or 128 columns. The number of vectors is padded to 8, 16, 32 or 64.
    For the same padded number, the result of a vector does not depend on the other vectors.

    Raises ValueError for shapes that do not fit together. Raises Unsupported for other codes and groups, for levels,
    for vectors that are not bfloat16, for more than 64 vectors, and unless `rows` is a multiple of 64 and `cols` a
    multiple of 128 (256 for codes of fewer than eight bits).

    Reads rows x cols codes once, and 4 bytes per scale.
    """
    geometry = geometry_of(w, x, cut)
    padded = in_order(jnp.pad(x, ((0, geometry.width - len(x)), (0, 0))), geometry.run)
    sums = (
        None if w.minima is None else jnp.sum(padded.astype(jnp.float32).reshape(geometry.width, -1, w.group), axis=2)
    )
    y = _coded_gemm(w.codes, w.scales, padded, w.minima, sums, w.low_bits, geometry=geometry, target=current_target())
    return (y[0] if len(y) == 1 else jnp.sum(y, axis=0))[: len(x)]


def geometry_of(w: ScaledCodes, x: Any, cut: BlockGrid | None = None) -> Geometry:
    """Choose the sizes of a product, or raise the errors of `coded_gemm`."""
    op = "coded_gemm"
    current_target().require_wgmma(op)
    if w.codes.ndim != 2 or x.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{op} takes codes [rows, cols] and x [batch, cols], got {w.codes.shape} and {x.shape}")
    rows, cols = w.shape
    if w.levels is not None:
        raise Unsupported(f"{op} does not support codes with levels, such as nf4")
    if w.codes.dtype not in (jnp.int8, jnp.int32) or x.dtype != jnp.bfloat16:
        raise Unsupported(f"{op} takes codes in int8 or packed int32 and x in bfloat16, got {w.codes.dtype}, {x.dtype}")
    if w.group not in (GROUPS[1:] if w.bits == 4 else GROUPS if w.in_words else (*GROUPS, None)):
        raise Unsupported(
            f"{op} takes a scale per group of {', '.join(map(str, GROUPS))} columns, "
            f"got scales {w.scales.shape} for {cols} columns"
        )
    check_operand(op, "scales", w.scales, (rows, cols // w.group) if w.group else (rows,), jnp.float32)
    check_operand(op, "minima", w.minima, w.scales.shape, jnp.float32)
    if w.minima is not None and not w.group:
        raise Unsupported(f"{op} takes minima only with scales per group, got scales per row")
    check_low_bits(op, w)
    if not 1 <= len(x) <= MOST_VECTORS:
        raise Unsupported(f"{op} takes 1 to {MOST_VECTORS} vectors, got {len(x)}")
    multiple = max(2 * LINE if w.in_words else LINE, 4 * (w.group or 1))
    if rows % ROWS or cols % multiple or not rows or not cols:
        raise Unsupported(
            f"{op} takes rows in multiples of {ROWS} and columns in multiples of {multiple}, got {w.shape}"
        )
    width = next(width for width in WIDTHS if len(x) <= width)
    cut = cut or cut_for(rows, cols, width=width, bits=w.bits, group=w.group)
    geometry = Geometry(rows, cols, width, w.bits, w.group, w.minima is not None, cut)
    parts_of_steps = cut.parts > 1 and cols % (geometry.columns * cut.parts)
    if rows % geometry.tile_rows or parts_of_steps or cut.turn % (w.group or PIECE) or geometry.columns % cut.turn:
        raise Unsupported(f"{op} cannot cut a matrix {w.shape} by {cut}")
    return geometry


def step_columns(group: int | None) -> int:
    """Choose the number of columns of a step, so that a row has whole lines of codes, and 16 bytes of scales."""
    return max(256, 4 * (group or 1))


def cut_for(rows: int, cols: int, *, width: int, bits: int, group: int | None) -> BlockGrid:
    """Choose how to divide a matrix: its columns into parts until there are 192 tiles, and its rows into tiles.

    A tile has 64 rows. For 32 vectors, a tile has 128 rows if each SM would get more than three tiles and at
    most four.

    On an H100, we timed the product of 32 vectors with gate and up of an 8B model in q8. It takes 60 us with 448 tiles
    of 64 rows, and 53 us with 224 tiles of 128 rows. All other divisions that we tried for the matrices of this model
    are slower, or faster by less than the difference between two runs (benchmarks/results/several-vectors-h100.md).
    """
    columns, parts = step_columns(group), 1
    while rows // ROWS * parts < 192 and cols % (columns * 2 * parts) == 0 and cols // (columns * 2 * parts) >= 4:
        parts *= 2
    tiles, wide = rows // ROWS * parts, rows % (2 * ROWS) == 0 and (group or PIECE) == PIECE
    if width == 32 and wide and 3 * H200.processors < tiles <= 4 * H200.processors:
        return BlockGrid(2, parts, turn=64)
    turn = 128 >> ((width == 64) + (group == 16))  # each group needs separate sums, and registers are limited
    return BlockGrid(1, parts, turn=max(turn, group or 0))


@partial(jax.jit, static_argnames=("geometry", "target"))
def _coded_gemm(codes, scales, x, minima, sums, low_codes, *, geometry: Geometry, target: Target):
    cut, group = geometry.cut, geometry.group
    optional = [array for array in (minima, sums, low_codes) if array is not None]

    def coded_gemm(codes_ref, scales_ref, x_ref, *refs, staged):
        *refs, y_ref = refs
        minima_ref, sums_ref = refs[:2] if geometry.minima else (None, None)
        low_bits_ref = refs[-1] if geometry.apart else None
        started: list[bool] = []  # whether x is ready

        def place(tile) -> tuple[Any, Any]:
            """Return the first row of a tile, and the index of the tile's part of the columns."""
            row, part = (tile, tile * 0) if cut.parts == 1 else (lax.div(tile, cut.parts), lax.rem(tile, cut.parts))
            return pl.multiple_of(row * geometry.tile_rows, ROWS), part

        def step_of(tile, step):
            return place(tile)[1] * geometry.steps + step  # not a constant: JAX would refuse one beyond the end

        def groups_of(tile, step):
            return pl.ds(lax.div(step_of(tile, step) * geometry.columns, group or geometry.columns), geometry.groups)

        def fetch_x(tile, step, slot):
            columns, filled_ = step_of(tile, step) * geometry.columns, staged["filled"].at[slot]
            plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(columns, geometry.columns)], staged["x"].at[slot], filled_)
            if sums_ref is not None:
                plgpu.copy_gmem_to_smem(sums_ref.at[:, groups_of(tile, step)], staged["sums"].at[slot], filled_)

        def fetch(tile, step, slot):
            (row, _), step_, filled_ = place(tile), step_of(tile, step), staged["filled"].at[slot]
            rows, words = pl.ds(row, geometry.tile_rows), geometry.columns // (1 if geometry.bits == 8 else int4.WORD)
            plgpu.copy_gmem_to_smem(codes_ref.at[rows, pl.ds(step_ * words, words)], staged["codes"].at[slot], filled_)
            for name, ref in (("scales", scales_ref if group else None), ("minima", minima_ref)):
                if ref is not None:
                    plgpu.copy_gmem_to_smem(ref.at[rows, groups_of(tile, step)], staged[name].at[slot], filled_)
            if low_bits_ref is not None:
                words = low_bits.words(geometry.columns, geometry.bits)
                plgpu.copy_gmem_to_smem(
                    low_bits_ref.at[rows, pl.ds(step_ * words, words)], staged["packed_low_bits"].at[slot], filled_
                )
            if started:
                fetch_x(tile, step, slot)

        def prepare():
            target.wait_for_previous()
            started.append(True)
            for slot in range(geometry.stages):
                fetch_x(block, slot, slot)

        def begin():
            return [filled(0.0, ROWS, geometry.width) for _ in range(cut.blocks)]

        def step(i, slot, sums):
            del i
            sums = list(sums)
            for which in range(cut.blocks):
                own_rows = pl.ds(which * ROWS, ROWS)
                refs = [staged[name].at[slot, own_rows] for name in ("codes", "packed_low_bits") if name in staged]
                unsigned = geometry.bits < 8 and geometry.minima
                loaded = StagedCodes(geometry.bits, unsigned, geometry.columns, geometry.run, *refs)
                for first in range(0, geometry.columns, cut.turn):
                    a = decoded(loaded, first, cut.turn, geometry.piece, staged["decoded"], target)
                    places = range(first, first + cut.turn, geometry.piece)
                    b = [staged["x"].at[slot, :, pl.ds(at, geometry.piece)].T for at in places]
                    products = _products(a, b, geometry)
                    if not group:
                        sums[which] = sums[which] + products[0]
                        continue
                    some = first // group, len(products)
                    scales = scales_of(staged["scales"].at[slot, own_rows], *some, target)
                    for partial_product, scale in zip(products, scales, strict=True):
                        sums[which] = sums[which] + partial_product * across(scale, geometry.width)
                    if geometry.minima:
                        lowest = scales_of(staged["minima"].at[slot, own_rows], *some, target)
                        of_x = sums_of(staged["sums"].at[slot], *some, target)
                        for minimum, group_sum in zip(lowest, of_x, strict=True):
                            sums[which] = sums[which] + across(minimum, geometry.width) * down(group_sum, ROWS)
            return sums

        def ahead(tile):
            if group:
                return []
            row, _ = place(tile)
            return [row_scales(scales_ref.at[pl.ds(row + which * ROWS, ROWS)], target) for which in range(cut.blocks)]

        def finish(tile, sums, read):
            row, part = place(tile)
            for which, y in enumerate(sums):
                y = y * across(read[which], geometry.width) if read else y
                store_turned(y_ref.at[part, :, pl.ds(row + which * ROWS, ROWS)], y, geometry.rows, target)

        block = lax.axis_index("block")
        tiles = RowTiles(geometry.tiles, geometry.tiles, geometry.steps, geometry.stages)
        tiles.walk(
            block,
            fetch=fetch,
            prepare=prepare,
            begin=begin,
            ahead=ahead,
            wait=lambda slot: plgpu.barrier_wait(staged["filled"].at[slot]),
            step=step,
            finish=finish,
            target=target,
        )

    kernel = target.kernel(
        coded_gemm,
        out_type=jax.ShapeDtypeStruct((cut.parts, geometry.width, geometry.rows), jnp.float32),
        grid=(geometry.tiles,),
        grid_names=("block",),
        compiler_params=own_meetings(),
        scratch_types={"staged": geometry.scratch(target)},
    )
    return kernel(codes, scales, x, *optional)


def _products(a, b, geometry: Geometry):
    """Multiply pieces of A and B, and add the products up per group, or all together if a row has one scale."""
    together = (geometry.group or geometry.cut.turn) // geometry.piece

    def run(*accumulators):
        for i, (a_entry, right) in enumerate(zip(a, b, strict=True)):
            plgpu.wgmma(accumulators[i // together], a_entry, right)
        plgpu.wgmma_wait(0)
        return [accumulator[...] for accumulator in accumulators]

    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, geometry.width), jnp.float32)
    return pl.run_scoped(run, *[accumulator] * (len(a) // together))
