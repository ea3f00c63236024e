"""What the compiler may make of a product: the figures of its design, and for several vectors what follows from them.

The design was measured for one vector, before any kernel ran (registers a thread, instructions a weight): bfloat16 in
tiles of 8, 16 and 32 rows 54 and 6.0, 94 and 4.3, 151 and 3.5; float32 50 and 3.9; with a norm 96 and 5.0, in pairs of
rows too; int8 with a scale a row 90 and 4.6, with groups 90 and 4.3; int4 119 and 3.4. Where a limit here is another,
it says why.

Of n vectors each takes of a weight, beside what decoding it and a turn of the loop take once,

    floats    1 + c / (R V)               c to load V columns of a vector and widen them
    codes     1 + 1 / (4 R) + 4 / s       a load for 4 columns; the four sums of a share of s columns become one

instructions: its multiplication and addition, and its part of what a thread's R rows share. A thread of floats has
R V sums, V numbers, R that are added in the end and some addresses more in registers for each vector.
"""

from math import ceil

from benchmarks.kernel_cases.case import FLOAT32, Limits
from pallas_kernels.compat import THREADS, WARPS
from pallas_kernels.quantised_product import QuantisedProduct
from pallas_kernels.row_product import PIECES, TOGETHER, RowProduct

MOST_REGISTERS = 255

# By dtype and rows of a tile. What a turn takes beside its products is the same for half the rows: of float32, 43
# instructions of 8 or 16 weights. Of float32 eight registers more than the design had: before the loop a residual and a
# bias are read, two numbers of each, with where they are. Two to four blocks share a processor, which has room for 128
# registers each or more.
PLAIN = {
    ("float32", 8): Limits(58, 8.4),
    ("float32", 16): Limits(58, 3.9),
    ("bfloat16", 8): Limits(54, 6.0),
    ("bfloat16", 16): Limits(94, 4.3),
    ("bfloat16", 32): Limits(151, 3.5),
}
# The design multiplied by the norm in the loop; now x is staged so, in float32, and need not be widened. It had a block
# for each tile: where a block has several, it looks where the next one is, and a pair of rows is a copy more for each
# turn of the loop, which in float32 is half as many weights, 16; and where the ring begins again, three more, where its
# length was a power of two. Four registers more: a position, cosines and sines are read before the loop.
NORMED = Limits(96, 4.7)
PAIRED = {"float32": Limits(100, 6.2), "bfloat16": Limits(100, 5.1)}
# Registers of a thread while a vector is staged, beside what it has read.
STAGING = 12


def product_limits(product: RowProduct | QuantisedProduct, *, normed: bool) -> Limits:
    """For a thread block that multiplies so."""
    if isinstance(product, QuantisedProduct):
        return _of_codes(product)
    return _of_floats(product, normed=normed)


def _of_floats(product: RowProduct, *, normed: bool) -> Limits:
    dtype, rows = product.dtype, product.rows * product.runs
    pair = product.runs > 1
    one = PAIRED[dtype.name] if pair else NORMED if normed else PLAIN.get((dtype.name, rows), Limits())
    if not normed:  # words of a vector that are read before any of it is stored
        read = min(product.cols * dtype.itemsize // (4 * THREADS), TOGETHER * PIECES * 4)
        one = one._replace(registers=max(one.registers, read + STAGING))
    more = product.batch - 1
    if not more or one.instructions is None:
        return one
    width, share = product.vector, rows // WARPS
    # A load and an address for float32, as which what has a norm is staged; for bfloat16 as much again for each two
    # columns, and one to widen each.
    loading = width / 2 if normed or dtype == FLOAT32 else width * 7 / 4
    each = 1 + loading / (share * width)
    # Where loads are half as wide, so is a turn, which else takes as long. Multiplying and widening do not.
    halved = 16 // dtype.itemsize // width
    flat = 1 if dtype == FLOAT32 else 2
    turn = share + 1 if pair else 0  # its position, cosines and sines
    registers = one.registers + more * (width * (share + 1) + share + turn + 4)
    return Limits(min(registers, MOST_REGISTERS), _up((one.instructions - flat) * halved + flat + more * each))


def _of_codes(product: QuantisedProduct) -> Limits:
    """Registers are traded for instructions: with 128 of them four blocks share a processor, and shared memory, where
    the vectors are float32, seldom has room for more; with 168, which int4 and two vectors may have, three. By more
    vectors two do, at most, which may have all registers.

    Of eight rows fewer share a load of x and the turn of the loop, which looks for the next tile where a block has
    several: a little more, in int8, than its design had.
    """
    share = product.rows * product.runs // WARPS
    narrow = share < 4
    if product.share == 32:
        one = Limits(168, 3.4)
    elif product.group is None:
        one = Limits(128, 4.6)
    else:
        one = Limits(128, 4.6 if narrow else 4.3)
    more = product.batch - 1
    if not more:
        return one
    assert one.instructions is not None
    each = 1 + 1 / (4 * share) + 4 / product.share
    return Limits(168 if more == 1 else MOST_REGISTERS, _up(one.instructions + more * each))


def _up(instructions: float) -> float:
    """To one decimal, as limits are stated."""
    return ceil(instructions * 10) / 10
