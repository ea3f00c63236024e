r"""The loop of `row_product.py` for weights that are integer codes, with a scale a row, or a scale a group of columns.

    y = sum_g s_g sum_(k in g) q_k x_k

Codes are decoded in registers and multiplied in float32; a scale is multiplied once a group and thread. A row is cut
into shares of 16 bytes, 16 columns of int8 or 32 of int4, which a thread loads at once and which never belong to two
groups, and a share into pieces of 4 columns. The vectors are staged in shared memory, times the norm where there is
one, since all rows use them again. Behind each share of theirs is room for one piece more, so that the lanes of a warp
read from different banks.

Codes become floats in place: an instruction that converts is eight times as slow on Hopper as one that adds, and would
be all that int8 waits for. With the exponent of a power of two, bits in a mantissa are a number too large by a
constant. A sum begins with what is too much times the x that go with it, which is staged in the room behind their
share. So large are the numbers that are rounded: it costs int8 two bits of float32's 24, and int4 five.

int8: a byte is moved, with its sign, and 2^15 q added to the bits of 384 makes 384 + q of them: with multiplication and
addition three instructions a weight.
int4: a rotated word holds codes where a float32 has its mantissa (`int4.py`), so that `and` and `or` make 16 + u or
256 + u of them, u = q + 8.
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

from pallas_kernels import int4
from pallas_kernels.compat import LANES, THREADS, WARPS, Target, tiled_layout
from pallas_kernels.row_tiles import RowTiles
from pallas_kernels.staging import Store, store_all

CHUNK = 1024  # columns of a step
GROUPS = (32, 64, 128)  # columns that may share a scale
PIECE = 4  # columns
PASSES = 4  # reads of a vector that are under way at once, each into 16 to 32 registers
EARLY = 2  # of them read a norm before the wait for the kernel before, or sum squares; for more, registers are too few


@dataclass(frozen=True)
class QuantisedProduct(ABC):
    """Some runs of rows of W at once times all vectors, in one thread block. `Int8Product` and `Int4Product` say how W
    lies."""

    tiles: int  # in W
    blocks: int  # that share them
    rows: int  # of W in a run
    runs: int  # in a tile
    cols: int
    batch: int
    stages: int
    dtype: np.dtype  # of the vectors
    group: int | None  # columns that share a scale; None: all of a row do

    fewest_stages: ClassVar[int] = 2
    at_once: ClassVar[int] = 4  # blocks of many tiles on a processor, as many as have registers
    share: ClassVar[int]  # columns that a thread loads at once: 16 bytes
    offsets: ClassVar[tuple[float, ...]]  # what is too much in the decoded codes of each piece

    @property
    def pieces(self) -> int:
        """Of a share."""
        return self.share // PIECE

    @property
    def unit(self) -> int:
        """Columns that a warp loads of a row at once."""
        return LANES * self.share

    @property
    def steps(self) -> int:
        """The last may be a part of one: copies fill up with zeros."""
        return -(-self.cols // CHUNK)

    @property
    def ring_stages(self) -> int:
        """Of one tile no more than it has steps."""
        return self.stages if self.blocks < self.tiles else min(self.stages, self.steps)

    @property
    def lanes(self) -> int:
        """Threads that share a scale; one, where all do."""
        return self.group // self.share if self.group else 1

    @property
    def warp(self) -> tuple[int, ...]:
        """How a warp's 32 shares are numbered: [groups, lanes], or [groups] where each lane has one to itself."""
        return (LANES // self.lanes, self.lanes) if self.lanes > 1 else (LANES,)

    @property
    def layout(self) -> Any:
        """[rows, *warp, piece] in registers."""
        return _layout((WARPS, *self.warp, PIECE), (1, *(1 for _ in self.warp), PIECE))

    @property
    def lane_layout(self) -> Any:
        """[rows, *warp] in registers."""
        return self.layout.reduce(len(self.warp) + 1)

    @property
    def step_scales(self) -> int:
        """Scales of a row that are copied with a step."""
        return CHUNK // self.group if self.group else 0

    @property
    def step_bytes(self) -> int:
        """Shared memory that a step is copied to."""
        return self.runs * self.rows * (CHUNK * 16 // self.share + 4 * self.step_scales)

    def scratch_bytes(self, *, normed: bool) -> int:
        """Shared memory that `scratch` takes."""
        del normed  # x is staged times the norm
        return self.ring_stages * self.step_bytes + int(np.prod(self._staged_shape)) * 4

    def scratch(self, *, normed: bool) -> dict[str, Any]:
        """Shared memory and barriers that `run` works in, with a norm or without."""
        del normed
        copies = self.runs * (2 if self.group else 1)
        staged = {
            "ring": self._ring(),
            "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=self.ring_stages),
            "x": plgpu.SMEM(self._staged_shape, jnp.float32),
        }
        if self.group:
            staged["scales"] = plgpu.SMEM((self.ring_stages, self.runs, self.rows, self.step_scales), jnp.float32)
        return staged

    @abstractmethod
    def operands(self, w: Any) -> list[Array]:
        """What the kernel is called with for W, codes and scales. Nothing is moved."""

    def view(self, x: Array) -> Array:
        """Vectors [..., cols], or the norm's one, as `run` takes them. Nothing is moved."""
        return x.reshape(*x.shape[:-1], *self._shares(self.cols, self.pieces))

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
        """All tiles of a thread block: `finish(tile, dots, read)` has for each vector, for each run, the float32
        products [rows] of the rows from `starts(tile)` on, and what `ahead(tile)` read before they were computed.

        `weight` are the refs of `operands`, x_ref and norm_ref those of a `view`. Waits for the kernel before this one
        where x is first read, and not earlier.
        """
        codes_ref, scales_ref, *constant_refs = weight
        # They come at run time: `and` with a mask and `or` with a register are one instruction, with two constants two.
        constants = [ref[i] for ref in constant_refs for i in range(ref.shape[0])]
        squares: list[Any] = []

        def fetch(tile, step, slot):
            filled = staged["filled"].at[slot]
            for run, start in enumerate(starts(tile)):
                rows = pl.ds(start, self.rows)
                step = step + start * 0  # what is beyond the end is refused where it is known to be
                plgpu.copy_gmem_to_smem(self._codes(codes_ref, rows, step), staged["ring"].at[slot, run], filled)
                if self.group:
                    # Not `step * self.step_scales`: where inference sees a multiple it makes tiles, which need not
                    # divide a row.
                    scales = scales_ref.at[rows, pl.ds(lax.div(step * CHUNK, self.group), self.step_scales)]
                    plgpu.copy_gmem_to_smem(scales, staged["scales"].at[slot, run], filled)

        def prepare():
            norms = self._first_norms(norm_ref)  # from memory, so before the wait
            target.wait_for_previous()
            squares.extend(self._stage(x_ref, b, norm_ref, norms, staged["x"], target) for b in range(self.batch))

        def begin():
            zeros = plgpu.layout_cast(jnp.zeros((self.rows, *self.warp), jnp.float32), self.lane_layout)
            return [[zeros] * self.runs for _ in range(self.batch)]

        def step(i, slot, sums):
            plgpu.barrier_wait(staged["filled"].at[slot])
            units = CHUNK // self.unit
            for unit in range(units):
                tiles = [self._load_tile(staged["ring"].at[slot, run], unit, target) for run in range(self.runs)]
                dots = self._multiply(tiles, i * units + unit, staged["x"], constants)
                if self.group:
                    scales = [self._load_scales(staged["scales"].at[slot, run], unit) for run in range(self.runs)]
                    dots = [[y * scale for y, scale in zip(ys, scales, strict=True)] for ys in dots]
                sums = [[a + b for a, b in zip(totals, ys, strict=True)] for totals, ys in zip(sums, dots, strict=True)]
            return sums

        def read_ahead(tile):
            rows = [] if self.group else [pl.ds(start, self.rows) for start in starts(tile)]
            return [self.load_rows(scales_ref.at[some]) for some in rows], ahead(tile)

        def end(tile, sums, read):
            scales, read = read
            dots = [[self._over_lanes(total) for total in totals] for totals in sums]
            if scales:
                dots = [[y * scale for y, scale in zip(ys, scales, strict=True)] for ys in dots]
            if norm_ref is not None:
                norms = [lax.rsqrt(square * (1.0 / self.cols) + eps) for square in squares]
                dots = [[y * norm for y in ys] for ys, norm in zip(dots, norms, strict=True)]
            finish(tile, dots, read)

        tiles = RowTiles(self.tiles, self.blocks, self.steps, self.ring_stages)
        turns: dict[str, Any] = {"fetch": fetch, "prepare": prepare, "begin": begin, "ahead": read_ahead, "step": step}
        tiles.walk(block, **turns, finish=end, target=target)

    @abstractmethod
    def _ring(self) -> Any:
        """Shared memory for the codes of `ring_stages` steps."""

    @abstractmethod
    def _codes(self, codes_ref, rows, step) -> Any:
        """What is copied of W for a step."""

    @abstractmethod
    def _load_tile(self, slot, unit: int, target: Target) -> Any:
        """One unit of a step's codes, in registers."""

    @abstractmethod
    def _decode(self, tile: Any, piece: int, constants) -> Array:
        """A piece of a tile as float32 [rows, *warp, piece], with `offsets` added."""

    def load_rows(self, ref) -> Array:
        """One float32 number for each row of a run, laid out as the products are."""
        layout = self.lane_layout
        for axis in range(len(self.warp), 0, -1):
            layout = layout.reduce(axis)
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def _multiply(self, tiles: Sequence[Any], index, x_smem, constants) -> list[list[Array]]:
        """The `index`-th unit of columns times all vectors: [rows, *warp] for each run, without the groups' scales."""
        groups = pl.ds(index * self.warp[0], self.warp[0])
        vectors = [x_smem.at[b] for b in range(self.batch)]
        sums = [[self._load_piece(x, groups, self.pieces)] * self.runs for x in vectors]
        for piece in range(self.pieces):
            decoded = [self._decode(tile, piece, constants) for tile in tiles]
            for b, vector in enumerate(vectors):
                x = self._load_piece(vector, groups, piece)
                sums[b] = [y + w * x for y, w in zip(sums[b], decoded, strict=True)]
        return [[jnp.sum(y, axis=-1) for y in ys] for ys in sums]

    def _load_piece(self, x_smem, groups, piece: int) -> Array:
        """What multiplies one piece of a unit, for all rows."""
        columns = pl.ds(PIECE * piece, PIECE)
        x_ref = x_smem.at[groups, :, columns] if self.lanes > 1 else x_smem.at[groups, columns]
        x = plgpu.load(x_ref, layout=self.layout.reduce(0), optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(x, (self.rows, *x.shape), tuple(range(1, x.ndim + 1)))

    def _load_scales(self, ref, unit: int) -> Array:
        """A unit's of those of a step, for each thread its own."""
        layout = self.lane_layout if self.lanes == 1 else self.lane_layout.reduce(2)
        mine = ref.at[:, pl.ds(unit * self.warp[0], self.warp[0])]
        scales = plgpu.load(mine, layout=layout, optimized=False)
        return scales if self.lanes == 1 else lax.broadcast_in_dim(scales, (self.rows, *self.warp), (0, 1))

    def _over_lanes(self, total: Array) -> Array:
        for _ in self.warp:
            total = jnp.sum(total, axis=-1)
        return total

    def _shares(self, cols: int, pieces: int) -> tuple[int, ...]:
        """The shape of vectors in shares, in which a group's are a dimension of their own."""
        return (cols // self.share // self.lanes, *self.warp[1:], pieces * PIECE)

    @property
    def _staged_shape(self) -> tuple[int, ...]:
        return (self.batch, *self._shares(self.steps * CHUNK, self.pieces + 1))

    @property
    def _at_once(self) -> int:
        """Shares of a pass over a vector that is staged: one for each thread, or for each of a half or a quarter."""
        return next(size for size in (THREADS, THREADS // 2, THREADS // 4) if size <= self.cols // self.share)

    @property
    def _passes(self) -> list[int]:
        """Where each pass begins, in groups of lanes; the last may repeat some of the one before."""
        groups, last = self._at_once // self.lanes, (self.cols // self.share - self._at_once) // self.lanes
        return [min(first, last) for first in range(0, last + groups, groups)]

    @property
    def _staging_layout(self) -> Any:
        groups, rest = self._at_once // self.lanes, self.warp[1:]
        return _layout(
            (groups, *rest, PIECE),
            (groups // WARPS, *rest, PIECE),
            (1, *(1 for _ in rest), PIECE),
            copies=THREADS // self._at_once,
        )

    def _load_shares(self, ref, first: int) -> Array:
        """A pass over a vector, from its group `first` on."""
        mine = pl.ds(first, self._at_once // self.lanes)
        return plgpu.load(ref.at[mine], layout=self._staging_layout, optimized=False)

    def _first_norms(self, norm_ref) -> list[Array]:
        """What the first passes over a vector are multiplied by, if by anything."""
        return [] if norm_ref is None else [self._load_shares(norm_ref, first) for first in self._passes[:EARLY]]

    def _stage(self, vectors_ref, b: int, norm_ref, norms: list[Array], x_smem, target: Target) -> Any:
        """Copy vector b to shared memory, a share a thread, and behind it what sums begin with. Where there is a norm
        it is multiplied by that, of which `norms` are the `_first_norms`.

        Gives the sum of the squares of a vector with a norm, where it can without the trip to the cache that `_squares`
        takes.
        """
        groups, passes, x_ref = self._at_once // self.lanes, self._passes, vectors_ref.at[b]

        def store(first, x):
            pieces = [
                lax.slice(x, (*(0 for _ in x.shape[:-1]), at), (*x.shape[:-1], at + PIECE))
                for at in range(0, self.share, PIECE)
            ]
            scaled = [piece * offset for piece, offset in zip(pieces, self.offsets, strict=True)]
            behind = -sum(scaled[1:], scaled[0])
            return Store(x_smem, (b, first), lax.concatenate([x, behind], x.ndim - 1), self._staging_layout)

        if self.cols < self.steps * CHUNK:
            shape = (groups, *self.warp[1:], self.share)
            zeros = plgpu.layout_cast(jnp.zeros(shape, x_smem.dtype), self._staging_layout)
            store_all([store(x_smem.shape[1] - groups, zeros)], target)  # the vector's end then comes over them
        # Not where some shares are in two passes, nor in more passes, for which registers are too few.
        together = (self.cols // self.share) % self._at_once == 0 and len(passes) <= EARLY
        squares: Any = 0.0
        for some in batched(passes, PASSES):
            loaded = [self._load_shares(x_ref, first) for first in some]
            factors: list[Any] = [None] * len(some)
            if norm_ref is not None:
                early = [] if some[0] else norms
                factors = early + [self._load_shares(norm_ref, first) for first in some[len(early) :]]
            stores = []
            for first, x, factor in zip(some, loaded, factors, strict=True):
                x = x.astype(x_smem.dtype)
                if together and factor is not None:
                    squares = squares + x * x
                stores.append(store(first, x if factor is None else x * factor.astype(x_smem.dtype)))
            store_all(stores, target)
        if norm_ref is None:
            return None
        if not together:
            return self._squares(x_ref)
        for _ in squares.shape:  # layout inference finds no way to sum over all at once
            squares = jnp.sum(squares, axis=-1)
        return squares

    def _squares(self, x_ref) -> Any:
        """The sum of the squares of a vector."""
        vector = next(v for v in (8, 4, 2, 1) if self.cols % (THREADS * v) == 0 and v * x_ref.dtype.itemsize <= 16)
        shape = self._shares(THREADS * vector, self.pieces)
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
        total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        for first in range(0, x_ref.shape[0], shape[0]):
            x = plgpu.load(x_ref.at[pl.ds(first, shape[0])], layout=layout).astype(jnp.float32)
            total = total + x * x
        return jnp.sum(total)


class Int8Product(QuantisedProduct):
    """Codes as they are: int8 [rows, cols]."""

    share = 16
    offsets = (384.0,) * 4

    def operands(self, w: Any) -> list[Array]:
        codes, scales = w
        codes = codes.reshape(len(codes), self.cols // 128, 128)  # 1024 were too many for one copy
        return [codes, scales]

    def _ring(self) -> Any:
        return plgpu.SMEM((self.ring_stages, self.runs, self.rows, CHUNK // 128, 128), jnp.int8)

    def _codes(self, codes_ref, rows, step) -> Any:
        return codes_ref.at[rows, pl.ds(step * (CHUNK // 128), CHUNK // 128)]

    def _load_tile(self, slot, unit: int, target: Target) -> list[Array]:
        # A load for each piece, of which the compiler makes one of 16 bytes.
        groups, *rest = self.warp
        shape = (self.rows, CHUNK // self.unit * groups, *rest, self.pieces, PIECE)
        every, mine = slice(None), slice(unit * groups, (unit + 1) * groups)
        return [
            _load(slot, shape, (every, mine, *(every for _ in rest), piece), self.layout, target)
            for piece in range(self.pieces)
        ]

    def _decode(self, tile: list[Array], piece: int, constants) -> Array:
        del constants
        bits = tile[piece].astype(jnp.int32) * 2**15 + np.array(self.offsets[piece], np.float32).view(np.int32)
        return lax.bitcast_convert_type(bits, jnp.float32)


class Int4Product(QuantisedProduct):
    """Codes packed by `int4.pack`: int32 [rows, cols / 8]."""

    share = int4.BLOCK
    offsets = tuple((16.0, 256.0)[piece % 2] + int4.ZERO for piece in range(int4.PIECES))

    def operands(self, w: Any) -> list[Array]:
        # 16 and 256 come at run time: `and` with a mask and `or` with a register are one instruction, with two
        # constants they are two.
        return [*w, jnp.asarray(np.array([16, 256], np.float32).view(np.int32))]

    def _ring(self) -> Any:
        return plgpu.SMEM((self.ring_stages, self.runs, self.rows, CHUNK // int4.PIECES), jnp.int32)

    def _codes(self, codes_ref, rows, step) -> Any:
        return codes_ref.at[rows, pl.ds(step * (CHUNK // int4.PIECES), CHUNK // int4.PIECES)]

    def _load_tile(self, slot, unit: int, target: Target) -> Array:
        del unit  # a step is one
        return _load(slot, (self.rows, *self.warp, PIECE), ..., self.layout, target)

    def _decode(self, tile: Array, piece: int, constants) -> Array:
        pair, odd = divmod(piece, 2)
        if pair:
            left, right = jnp.int32(8 * pair), jnp.int32(32 - 8 * pair)
            tile = lax.shift_left(tile, left) | lax.shift_right_logical(tile, right)
        return lax.bitcast_convert_type(tile & (15 << 15 if odd else 15 << 19) | constants[odd], jnp.float32)


def _layout(*tiles: tuple[int, ...], copies: int = 1) -> Any:
    """Tiles in tiles, the last being a thread's vector, the one before a warp's; the first is cut along its rows.

    With two, a warp has one row of the first. So many threads of a warp have copies of the same.
    """
    tiles = tiles if len(tiles) == 3 else (tiles[0], (1, *tiles[0][1:]), tiles[1])
    _, warp, vector = tiles
    rank = len(warp)
    lanes: list[Any] = [axis - 2 * rank for axis in range(rank) if warp[axis] > vector[axis]]
    if copies > 1:
        lanes.append(plgpu.Replicated(copies))
    return tiled_layout(tiles, warps=-3 * rank, lanes=tuple(lanes))


def _load(ref, shape: tuple[int, ...], index: Any, layout: Any, target: Target) -> Array:
    """`ref`, in another shape, at `index`. The interpreter has no such view: it reshapes what it has read."""
    if target.interpret:
        return plgpu.load(ref, layout=None).reshape(shape)[index]
    flat = (shape[0], int(np.prod(shape[1:])))
    return plgpu.load(ref.reshape(flat).reshape(shape).at[index], layout=layout, optimized=False)
