r"""Codes for floating-point tensor cores: decoded exactly to bfloat16 in registers, 64 rows at once.

`wgmma` multiplies A [64, K] in registers by B [K, N] in shared memory. A is a part of W, and B are the vectors. A warp
has sixteen rows of A, and its 32 lanes form eight quads of four lanes. In a product with K = 16, a lane of quad i has
rows i and i + 8, and in each row two neighbors of the first eight columns and two of the last eight. The order of
columns is free as long as A and B agree. So a lane takes eight columns of each 32 that are adjacent in memory, and we
reorder the vectors beforehand (`in_order`):

    column  8 t + 4 u + 2 p + h  of 32   is place   16 u + 8 h + 2 t + p       lane t; u, p and h are 0 or 1
    column  4 t + 2 p + h        of 16   is place          8 h + 2 t + p       in groups of 16

Eight codes of eight bits are two words, u = 0 and 1. Eight codes of four bits are one word: the lower halves of its
bytes have u = 0 and the upper halves u = 1 (`int4.py`, order "bytes"). In groups of 16, the upper halves have the next
16 columns (order "halves"). In a word, bytes 0 and 2 are neighbors (h = 0), and so are bytes 1 and 3.

A bfloat16 has seven bits below its leading one. So the bfloat16 number 128 + c, for c from 0 to 127, has c in its
lowest bits. A code needs no conversion: we set the bits of 128 around c and subtract a constant, for two codes at once:

    four bits     (128 + c) - 136, with c the code with its upper bit flipped, or - 128 if codes are unsigned
    5, 6 bits     the same with 144 and 160, with c made of the upper four bits and the low bits
    eight bits    (128 + c) - 128 or - 256, with c the lower seven bits. The upper bit becomes a bit of the exponent,
                  which distinguishes the two cases

Among eight rows, row i belongs to quad j, and the three bits of j are the bits of i in reverse order. The codes are in
shared memory, in swizzled lines of 128 bytes. With this order of rows, the lanes of a load of 8 bytes per lane never
use the same banks. For 16 bytes per lane, two quads load at once, and they do not use the same banks either.
"""

from itertools import batched
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts import int4, low_bits
from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.inline import array, down, float32, int32, load, ptx, times, total, word
from llamaspec.pallas_kernels.parts.wgmma import WGMMA

ROWS = 64  # rows of A
OCTET = 8  # rows stored together
LINE = 128  # bytes of a row stored together
RUN = 32  # columns that are reordered together, or a smaller group
ROW_NUMBERS, VECTOR_NUMBERS = WGMMA.reduce(1), WGMMA.reduce(0)  # layouts with one number per row or column

LOP3 = "lop3.b32 $0, $1, $2, $3, {table};"
AND_OR, AND_XOR = 0xEA, 0x6A
ADD = "add.rn.bf16x2 $0, $1, $2;"


def pair(number: float) -> int:
    """Return the bits of two bfloat16 numbers with this value.

    >>> f"{pair(128.0):x}"
    '43004300'
    """
    return int(np.float32(number).view(np.uint32) >> 16) * 0x10001


def in_order(x: Float[Array, "batch cols"], run: int = RUN) -> Float[Array, "batch cols"]:
    """Reorder each run of 16 or 32 columns of vectors for the tensor cores, by this module's table.

    >>> in_order(jnp.arange(32.0)[None])[0, :16].astype(int).tolist()
    [0, 2, 8, 10, 16, 18, 24, 26, 1, 3, 9, 11, 17, 19, 25, 27]
    """
    rows, cols = x.shape
    runs = x.reshape(rows, cols // run, 4, run // 16, 2, 2)  # t, u, p, h
    return runs.transpose(0, 1, 3, 5, 2, 4).reshape(rows, cols)


class StagedCodes(NamedTuple):
    """Codes in shared memory, for 64 rows and the columns of a step."""

    bits: int
    unsigned: bool
    columns: int  # columns of a step
    run: int  # columns that are reordered together
    codes: Any  # int8 [64, columns], or words of `int4.packed`; in a `ring`
    low_bits: Any = None  # for codes of 5 or 6 bits; in a `low_bits.ring`

    @property
    def transforms(self) -> list[tuple[Any, ...]]:
        """Layouts of the codes, and of the low bits if any."""
        return [transforms(self.bits), *([] if self.low_bits is None else [low_bits.transforms(self.bits)])]


def ring(*shape: int, columns: int, bits: int) -> Any:
    """Declare the shared memory for codes [*shape, columns]."""
    dtype, size = (jnp.int8, columns) if bits == 8 else (jnp.int32, columns // int4.WORD)
    return plgpu.SMEM((*shape, size), dtype, transforms=transforms(bits))


def transforms(bits: int) -> tuple[Any, ...]:
    line = LINE if bits == 8 else LINE // 4
    return plgpu.TilingTransform((OCTET, line)), plgpu.SwizzleTransform(LINE)  # pyright: ignore[reportAbstractUsage]


class RowLane(NamedTuple):
    """The position of a thread in the rows of A and in its quad."""

    warp: Any
    row: Any  # of eight
    place: Any

    @classmethod
    def of_thread(cls) -> "RowLane":
        thread = utils.thread_idx()

        def bit(at: int, to: int) -> Any:
            """Take bit `at` of the thread's number, and return it as bit `to` of a word."""
            bits_at = arith.andi(arith.shrui(thread, word(at)), word(1))
            return arith.shli(bits_at, word(to)) if to else bits_at

        row = total(bit(2, 2), bit(3, 1), bit(4, 0))
        return cls(arith.shrui(thread, word(5)), row, arith.andi(thread, word(3)))


def decoded(codes: StagedCodes, first: int, count: int, piece: int, scratch: Any, target: Target) -> list[Any]:
    """Decode the columns `first` to `first + count - 1`, in pieces [64, piece] of A, in the order of `in_order`.

    The interpreter can only multiply from shared memory, so it puts the pieces in `scratch`.
    """
    shape = (ROWS, piece)
    if target.interpret:
        scratch[:, pl.ds(first, count)] = _interpreted(codes)[:, first : first + count]
        plgpu.commit_smem()
        return [scratch.at[:, pl.ds(first + at, piece)] for at in range(0, count, piece)]

    def run(_, refs):
        lane, own_codes = RowLane.of_thread(), codes._replace(**dict(zip(("codes", "low_bits"), refs, strict=False)))
        registers_of = [_columns(own_codes, lane, half, first, count) for half in range(2)]  # registers, in order
        registers = list(zip(*registers_of, strict=True))  # by eight columns, then upper and lower rows
        size = piece // 8
        return [
            array(([part] for rows in registers[at : at + size] for part in rows), shape, np.dtype(jnp.bfloat16), WGMMA)
            for at in range(0, count // 8, size)
        ]

    piece_shape = plgpu.ShapeDtypeStruct(shape, np.dtype(jnp.bfloat16), layout=WGMMA)
    refs = [codes.codes, *([] if codes.low_bits is None else [codes.low_bits])]
    types = [plgpu.RefType(transforms) for transforms in codes.transforms]
    inlined: Any = plgpu.inline_mgpu(arg_types=(types,), return_type=[piece_shape] * (count // piece))
    return list(inlined(run)(refs))


def _interpreted(codes: StagedCodes) -> Any:
    values = plgpu.load(codes.codes, layout=None)
    if codes.bits < 8:
        least = None if codes.low_bits is None else plgpu.load(codes.low_bits, layout=None)
        values = int4.unpacked(values, "bytes" if codes.run == RUN else "halves", least)
        values = values if codes.unsigned else int4.signed(values, codes.bits)
    return in_order(values.astype(jnp.bfloat16), codes.run)


def _columns(codes: StagedCodes, lane: RowLane, half: int, first: int, count: int) -> list[Any]:
    """Load and decode the part of a row that this lane holds. Each word of the result has two bfloat16 numbers."""
    size = codes.columns // (1 if codes.bits == 8 else 2)  # bytes of a row
    # Octets of rows follow each other: two per warp.
    start = total(times(lane.warp, 2 * OCTET * size), times(lane.row, LINE), word(half * OCTET * size))
    swizzle = times(lane.row, LINE // OCTET)
    decoded_words: list[Any] = []
    if codes.bits == 8:
        within = arith.xori(times(lane.place, codes.run // 4), swizzle)
        for column in range(first, first + count, codes.run):
            lines, offset = divmod(column, LINE)
            at = total(start, arith.xori(within, word(offset)), word(OCTET * LINE * lines))
            for code_word in load(codes.codes, at, int32(), codes.run // 16):
                decoded_words += _of_eight_bits(code_word)
        return decoded_words
    within = arith.xori(times(lane.place, 16), swizzle)
    for column in range(first - first % int4.BLOCK, first + count, int4.BLOCK):
        lines, offset = divmod(column // 2, LINE)
        at = total(start, arith.xori(within, word(offset)), word(OCTET * LINE * lines))
        least = _low_bits(codes, lane, half, column)
        for run, code_word in enumerate(load(codes.codes, at, int32(), 4)):  # of the block
            if first <= column + run * RUN < first + count:
                decoded_words += _of_word(code_word, *least[run], bits=codes.bits, unsigned=codes.unsigned)
    return decoded_words


def _low_bits(codes: StagedCodes, lane: RowLane, half: int, column: int) -> list[tuple[Any, int]]:
    """Load the low bits of a block of a lane's columns.

    Returns a word for each run, and the run's bit position in the word. Codes of four bits have no low bits.
    """
    if codes.low_bits is None:
        return [(None, 0)] * int4.RUNS
    size, few = low_bits.tile_bytes(codes.bits), codes.bits - 4
    tiles = codes.columns // int4.WIDE_BLOCK  # of an octet
    block, of_octet = column // int4.BLOCK % low_bits.BLOCKS, column // int4.WIDE_BLOCK * size
    tile = total(times(lane.warp, 2 * tiles * size), word(half * tiles * size + of_octet))
    words = low_bits.of_block(codes.low_bits, tile, lane.row, lane.place, block, codes.bits)
    return [(low_word, higher) for low_word in words for higher in range(0, 4, few)]


def _of_eight_bits(codes: Any) -> list[Any]:
    """Decode bytes 0 and 2 of a word, then bytes 1 and 3."""
    return [_signed_bytes(shifted) for shifted in (codes, arith.shrui(codes, word(8)))]


def _signed_bytes(codes: Any) -> Any:
    lower = _bits(codes, 0x007F007F, word(pair(128.0)), AND_OR)
    upper = _bits(codes, 0x00800080, word(pair(-128.0)), AND_OR)  # -256 if the code is negative
    return ptx(ADD, [lower, upper], results=1)[0]


def _of_word(codes: Any, least: Any, higher: int, *, bits: int, unsigned: bool) -> list[Any]:
    """Decode the lower halves of bytes 0 and 2 of a word, then of bytes 1 and 3, then the upper halves in this order.

    The low bits of the codes are in the same places of the word `least`, shifted up by `higher` bits.
    """
    few, middle = bits - 4, 0 if unsigned else 1 << bits - 1
    magic, less = word(pair(128.0) ^ middle * 0x10001), word(pair(-128.0 - middle))
    joined_words = []
    for place in (0, 8, 4, 12):
        joined = _bits(down(codes, place - few), (0xF << few) * 0x10001, magic, AND_XOR)
        if least is not None:
            joined = _bits(down(least, place + higher), ((1 << few) - 1) * 0x10001, joined, AND_OR)
        joined_words += ptx(ADD, [joined, less], results=1)
    return joined_words


def _bits(x: Any, mask: int, constant: Any, table: int) -> Any:
    return ptx(LOP3.format(table=hex(table)), [x, word(mask), constant], results=1)[0]


def scales_of(ref: Any, first: int, count: int, target: Target) -> list[Any]:
    """Load the scales (or minima) [64, groups] of the groups `first` to `first + count - 1`.

    Returns a float32 array of 64 rows for each of these groups.
    """
    if target.interpret:
        scales = plgpu.load(ref, layout=None)
        return [scales[:, group] for group in range(first, first + count)]
    groups = ref.shape[-1]

    def run(_, ref):
        lane = RowLane.of_thread()
        start = total(times(lane.warp, 2 * OCTET * 4 * groups), times(lane.row, 4 * groups), word(4 * first))
        halves = [load(ref, total(start, word(half * OCTET * 4 * groups)), float32(), count) for half in range(2)]
        return [
            array(([entry] for entry in halves_of_row), (ROWS,), np.dtype("float32"), ROW_NUMBERS)
            for halves_of_row in zip(*halves, strict=True)
        ]

    entry = plgpu.ShapeDtypeStruct((ROWS,), np.dtype("float32"), layout=ROW_NUMBERS)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[entry] * count)
    return list(inlined(run)(ref))


def sums_of(ref: Any, first: int, count: int, target: Target) -> list[Any]:
    """Load the sums [vectors, groups] of the groups `first` to `first + count - 1`.

    Returns a float32 array with a number per vector for each of these groups.
    """
    if target.interpret:
        sums = plgpu.load(ref, layout=None)
        return [sums[:, group] for group in range(first, first + count)]
    width, groups = ref.shape[-2:]

    def run(_, ref):
        lane, loaded_sums = RowLane.of_thread(), []
        start = times(lane.place, 2 * 4 * groups)
        for column in [8 * eight + which for eight in range(width // 8) for which in range(2)]:
            at = total(start, word(4 * (column * groups + first)))
            loaded_sums.append(load(ref, at, float32(), count))
        return [
            array(batched((entry[group] for entry in loaded_sums), 2), (width,), np.dtype("float32"), VECTOR_NUMBERS)
            for group in range(count)
        ]

    entry = plgpu.ShapeDtypeStruct((width,), np.dtype("float32"), layout=VECTOR_NUMBERS)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[entry] * count)
    return list(inlined(run)(ref))


def row_scales(ref: Any, target: Target) -> Any:
    """Load the scales of 64 rows from global memory, in the register layout of a product's rows."""
    if target.interpret:
        return plgpu.load(ref, layout=None)

    def run(_, ref):
        lane = RowLane.of_thread()
        start = total(times(lane.warp, 2 * OCTET), lane.row)
        row_values = []
        for half in range(2):
            address = utils.getelementptr(utils.memref_ptr(ref), [total(start, word(half * OCTET))], float32())
            row_values.append([llvm.load(float32(), address)])
        return array(row_values, (ROWS,), np.dtype("float32"), ROW_NUMBERS)

    value_shape = plgpu.ShapeDtypeStruct((ROWS,), np.dtype("float32"), layout=ROW_NUMBERS)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=value_shape)
    return inlined(run)(ref)


def store_turned(ref: Any, y: Any, stride: int, target: Target) -> None:
    """Store products [64, vectors] transposed in global memory [vectors, 64]; vectors are `stride` numbers apart."""
    if target.interpret:
        ref[...] = y.T
        return
    vectors = y.shape[1]

    def run(_, ref, y):
        lane = RowLane.of_thread()
        base = total(times(lane.warp, 2 * OCTET), lane.row, times(lane.place, 2 * stride))
        registers = iter(y.registers.flat)
        for eight in range(vectors // 8):
            for half in range(2):
                register = next(registers)
                for which in range(2):
                    at = total(base, word((8 * eight + which) * stride + half * OCTET))
                    address = utils.getelementptr(utils.memref_ptr(ref), [at], float32())
                    number = vector.extract(register, dynamic_position=[], static_position=[which])
                    llvm.store(number, address)

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    inlined(run)(ref, y)
