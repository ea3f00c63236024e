"""Matrices for products with vectors, as floats or as codes with scales, and the loop for each kind of matrix."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.card import Card
from llamaspec.pallas_kernels.parts.compat import LANES, current_target
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.quantized_product import CHUNK, GROUPS, Int4Product, Int8Product, QuantizedProduct
from llamaspec.pallas_kernels.parts.row_product import RowProduct
from llamaspec.pallas_kernels.parts.row_tiles import MOST_STAGES, all_fit, blocks_for, even_share
from llamaspec.pallas_kernels.parts.tile import MOST_ROWS, Tile, tile_for
from llamaspec.pallas_kernels.unsupported import Unsupported

MAX_BATCH = 8
AT_ONCE = 4  # vectors per kernel for codes: shared memory has room for 4 vectors of 14,336 numbers
DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
REGISTER_ROWS = 8  # rows of a run, if weights are loaded to registers
BESIDE = 4096  # maximum bytes of shared memory for sums over threads and barriers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledCodes:
    """A quantized matrix: each weight is its code times the scale of its row, or of its group in the row.

    With minima, the weight is this product plus the minimum of its group, and codes in words are unsigned. With levels,
    a code selects a level, and the level takes the place of the code in the product.
    """

    codes: Any  # int8 [rows, cols], or int32 words [rows, cols / 8] in the layout of `int4.packed`
    scales: Any  # float32 [rows, groups] for groups of 16 to 128 columns, or [rows] for codes of eight bits
    minima: Any = None  # float32 [rows, groups]
    levels: Levels | None = field(default=None, metadata={"static": True})  # for four-bit codes
    low_bits: Any = (
        None  # int32 [rows, cols / 32 or cols / 16] for 5- or 6-bit codes, in the layout of `int4.packed_apart`
    )

    @property
    def arrays(self) -> list[Any]:
        return [array for array in (self.codes, self.scales, self.minima, self.low_bits) if array is not None]

    @property
    def in_words(self) -> bool:
        return self.codes.dtype == jnp.int32

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return int4.bits_of(self.codes, self.low_bits) if self.in_words else 8

    @property
    def order(self) -> int4.Order:
        """The order of codes in words."""
        return int4.order_of(self.group or 0, levels=self.levels is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns of the dequantized matrix."""
        rows, packed = self.codes.shape
        return rows, packed * (int4.WORD if self.in_words else 1)

    @property
    def group(self) -> int | None:
        """The number of columns with a common scale: None for a whole row, and 0 if the matrix has no scales."""
        if self.scales.ndim == 1:
            return None
        groups = self.scales.shape[1]
        return self.shape[1] // groups if groups else 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledE4M3:
    """A matrix of e4m3 floats, times a scale for each row. `codes` has the bits of the floats. None of them is NaN."""

    codes: Any  # int8 [rows, cols]
    scales: Any  # float32 [rows]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        rows, cols = self.codes.shape
        return rows, cols


MatrixOperand = Float[Array, "rows cols"] | ScaledCodes | ScaledE4M3
Shaped = Array | jax.ShapeDtypeStruct  # shapes are enough to choose a loop
AnyMatrix = Shaped | ScaledCodes | ScaledE4M3
ProductOf = RowProduct | QuantizedProduct


def shares(w: AnyMatrix, batch: int) -> list[slice]:
    """Split `batch` vectors into slices, one per launch of a kernel.

    For codes, a slice has at most `AT_ONCE` vectors. Each launch reads the codes again."""
    launches = -(-batch // AT_ONCE) if isinstance(w, ScaledCodes | ScaledE4M3) and 0 < batch <= MAX_BATCH else 1
    size = -(-batch // launches)
    return [slice(i * size, (i + 1) * size) for i in range(launches)]


def product_of(
    op: str,
    w: AnyMatrix,
    x: Shaped,
    *,
    normed: bool,
    tile: Tile | None = None,
    runs: int = 1,
    rows: int | None = None,
    beside: int = 0,
) -> ProductOf:
    """Choose the loop that multiplies W by vectors x [batch, cols], in a thread block with runs of `rows` rows.

    If `rows` is None, the rows of the tile are divided among the runs. `beside` is the number of thread blocks of the
    same kernel that multiply other matrices. They leave less room for the ring. Raises ValueError for shapes that do
    not fit together, and Unsupported if there is no loop for them.
    """
    if isinstance(w, ScaledCodes):
        _check_codes(op, w, x)
    elif isinstance(w, ScaledE4M3):
        _check_e4m3(op, w, x)
    else:
        _check_floats(op, w, x)
    if not 1 <= len(x) <= MAX_BATCH:
        raise Unsupported(f"{op} takes 1 to {MAX_BATCH} vectors, got {len(x)}")
    target = current_target()
    card, (all_rows, cols) = target.card, w.shape
    if tile is None and not card.copy_engine:
        tile = _register_tile(w, runs)
    measured, tile = tile, tile or tile_for(key_of(op, w), all_rows, cols, x.dtype, vectors=len(x), card=card)
    if measured is None and tile.rows > MOST_ROWS and isinstance(w, ScaledCodes) and w.levels is not None:
        tile = Tile(rows=MOST_ROWS)  # measured for integers; looking up levels takes registers
    of_run, rows = rows, rows or tile.rows // runs
    if rows % 8 or not rows or all_rows % (rows * runs) or not all_rows:
        raise Unsupported(f"{op} takes rows of W in multiples of {max(rows, 8) * runs}, got {all_rows}")
    _check_columns(op, w, x.dtype, tile)
    tiles = all_rows // (rows * runs)
    shape: dict[str, Any] = {"tiles": tiles, "blocks": tiles, "rows": rows, "runs": runs, "cols": cols}
    shape |= {"batch": len(x), "stages": 1, "dtype": x.dtype}
    if isinstance(w, ScaledCodes):
        form: dict[str, Any] = {"bits": w.bits, "group": w.group, "minima": w.minima is not None, "levels": w.levels}
        product = (Int4Product if w.in_words else Int8Product)(**shape, **form)
    else:
        product = RowProduct(**shape, chunks=tile.chunks or 1, e4m3=isinstance(w, ScaledE4M3))
    if not card.copy_engine:
        return _in_registers(op, product, tile, card, normed=normed)
    shared = replace(product, stages=product.fewest_stages).scratch_bytes(normed=normed)
    blocks = blocks_for(tiles, card, shared=shared, at_once=product.at_once, requested=tile.blocks)
    product = replace(product, blocks=blocks)
    blocks = product.blocks + beside
    room = even_share(blocks, card) - product.scratch_bytes(normed=normed) + product.step_bytes
    stages = min(max(product.fewest_stages, -(-room // product.step_bytes)), MOST_STAGES)
    product = replace(product, stages=tile.stages or stages)
    # With a long stage, a block may exceed its share so far that fewer blocks fit on an SM.
    fits = all_fit(blocks, product.scratch_bytes(normed=normed), card)
    if not tile.stages and stages > product.fewest_stages and not fits:
        product = replace(product, stages=stages - 1)
    if (needed := product.scratch_bytes(normed=normed)) > card.block_shared - BESIDE:
        if measured is None and tile.rows > MOST_ROWS:  # measured for codes without minima, and minima need more memory
            narrow = Tile(rows=MOST_ROWS)
            return product_of(op, w, x, normed=normed, tile=narrow, runs=runs, rows=of_run, beside=beside)
        raise Unsupported(f"{op} would need {needed} bytes of shared memory for {len(x)} vectors of {cols}")
    return product


def _register_tile(w: AnyMatrix, runs: int) -> Tile:
    """Choose the tile if weights are loaded to registers: 8 rows of floats for each run, or 16 rows of codes."""
    if isinstance(w, ScaledCodes):
        return Tile(rows=16 if w.shape[0] % 16 == 0 else 8)
    return Tile(rows=REGISTER_ROWS * runs)


def _register_columns(product: QuantizedProduct) -> int:
    """Choose the columns of a step if codes are loaded to registers: 1024 or 512.

    Short rows of eight-bit codes have steps of 512 columns, because the compiler unrolls a loop of four steps. Then a
    thread needs 205 registers. Steps that divide the row are preferred.
    """
    if (product.bits == 8 and product.cols < 8 * CHUNK) or product.cols % CHUNK:
        return CHUNK // 2
    return CHUNK


def _in_registers(op: str, product: ProductOf, tile: Tile, card: Card, *, normed: bool) -> ProductOf:
    """Finish `product` for a card without TMA: each block has one tile, and loads the tile's weights to registers."""
    product = replace(product, ring=False, stages=tile.stages or product.register_steps)
    if isinstance(product, QuantizedProduct):
        product = replace(product, chunk=_register_columns(product))
    if (needed := product.scratch_bytes(normed=normed)) > card.block_shared - BESIDE:
        raise Unsupported(
            f"{op} would need {needed} bytes of shared memory for {product.batch} vectors of {product.cols}"
        )
    return product


def products_beside(op: str, matrices: Sequence[AnyMatrix], x: Shaped, **how: Any) -> list[ProductOf]:
    """Choose a loop for each of several matrices that one kernel multiplies. Raises the errors of `product_of`."""
    separate = [product_of(op, w, x, **how) for w in matrices]
    blocks = sum(product.blocks for product in separate)
    return [
        product_of(op, w, x, beside=blocks - first.blocks, **how) for w, first in zip(matrices, separate, strict=True)
    ]


def key_of(op: str, w: AnyMatrix) -> str:
    """Make the key for `tile_for` from the op, the kind of the matrix's codes and their group size."""
    if isinstance(w, ScaledE4M3):
        return f"{op} e4m3"
    if not isinstance(w, ScaledCodes):
        return op
    return f"{op} int{w.bits}{f'/{w.group}' if w.group else ''}"


def _check_floats(op: str, w: Shaped, x: Shaped) -> None:
    if w.ndim != 2 or x.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{op} takes W [rows, cols] and x [batch, cols], got {w.shape} and {x.shape}")
    if w.dtype not in DTYPES or x.dtype != w.dtype:
        raise Unsupported(f"{op} takes W and x both in float32 or both in bfloat16, got {w.dtype} and {x.dtype}")


def _check_e4m3(op: str, w: ScaledE4M3, x: Shaped) -> None:
    rows, cols = w.shape
    if x.ndim != 2 or x.shape[1] != cols:
        raise ValueError(f"{op} takes x [batch, {cols}], got {x.shape}")
    if x.dtype not in DTYPES:
        raise Unsupported(f"{op} takes x [batch, {cols}] in float32 or bfloat16, got {x.dtype} {x.shape}")
    check_operand(op, "codes", w.codes, (rows, cols), jnp.int8)
    check_operand(op, "scales", w.scales, (rows,), jnp.float32)


def _check_codes(op: str, w: ScaledCodes, x: Shaped) -> None:
    if w.codes.ndim != 2:
        raise ValueError(f"{op} takes codes [rows, cols], got {w.codes.shape}")
    if w.codes.dtype not in (jnp.int8, jnp.int32):
        raise Unsupported(f"{op} takes codes int8 [rows, cols] or packed int32, got {w.codes.dtype} {w.codes.shape}")
    rows, cols = w.shape
    if x.ndim != 2 or x.shape[1] != cols:
        raise ValueError(f"{op} takes x [batch, {cols}], got {x.shape}")
    if x.dtype not in DTYPES:
        raise Unsupported(f"{op} takes x [batch, {cols}] in float32 or bfloat16, got {x.dtype} {x.shape}")
    if w.group not in GROUPS and (w.in_words or w.group is not None):
        group_names = f"{', '.join(map(str, GROUPS))} columns{'' if w.in_words else ' or each row'}"
        what = f"got scales {w.scales.shape} for {rows} rows of {cols} columns"
        raise Unsupported(f"{op} takes a scale for each {group_names}, {what}")
    check_operand(op, "scales", w.scales, (rows, cols // w.group) if w.group else (rows,), jnp.float32)
    check_operand(op, "minima", w.minima, w.scales.shape, jnp.float32)
    if w.minima is not None and not w.group:
        raise Unsupported(f"{op} takes minima only with scales per group, got scales per row")
    if w.levels is not None and (w.bits != 4 or w.minima is not None or w.group != w.levels.group):
        raise Unsupported(
            f"{op} takes these levels only for codes of 4 bits in groups of {w.levels.group} columns without minima, "
            f"got {w.bits} bits, groups of {w.group}{'' if w.minima is None else ' and minima'}"
        )
    check_low_bits(op, w)


def check_low_bits(op: str, w: ScaledCodes) -> None:
    """Raise ValueError or Unsupported for low bits with a wrong shape, dtype or group size."""
    if w.low_bits is None:
        return
    few, (rows, cols) = (1 if w.bits < 6 else 2), w.shape
    check_operand(op, "low bits", w.low_bits, (rows, few * cols // 32), jnp.int32)
    if not w.in_words or w.group not in GROUPS[:2]:
        raise Unsupported(f"{op} takes codes of 5 and 6 bits in words, in groups of 16 or 32 columns, got {w.group}")


def _check_columns(op: str, w: AnyMatrix, dtype: Any, tile: Tile) -> None:
    cols = w.shape[1]
    if not isinstance(w, ScaledCodes):
        step = LANES * 16 // dtype.itemsize * (tile.chunks or 1)
        if cols % step or not cols:
            raise Unsupported(f"{op} takes columns of W in multiples of {step} in {dtype}, got {cols}")
        return
    if tile.chunks:
        raise Unsupported(f"codes need a tile without chunks in {op}, got {tile.chunks} chunks")
    # Copies need complete 128-byte lines of codes, and 16-byte rows of scales.
    multiple = max(256 if w.in_words else 128, 4 * (w.group or 1))
    if cols < CHUNK or cols % multiple:
        raise Unsupported(f"{op} takes at least {CHUNK} columns of W, in multiples of {multiple}, got {cols}")
