"""What the compiler may make of a product: the figures of its design, and for several vectors what follows from them.

The design was measured for one vector, before any kernel ran (registers a thread, instructions a weight): bfloat16 in
tiles of 8, 16 and 32 rows 54 and 6.0, 94 and 4.3, 151 and 3.5; float32 50 and 3.9; with a norm 96 and 5.0, in pairs of
rows too. Since two bfloat16 of a word are widened by two instructions, not three, and nothing else, it is less. Where
a limit here is another, it says why. That for codes is counted, below: the tensor cores multiply them, where the
design did so one by one, and needed 4.3 or, of four bits, 3.4.

A turn takes an instruction more, which is added to each limit of floats: the design did not wait for its reads before
it asked for a slot of the ring again, and has to. A step of several chunks is one turn: `TURN` instructions fewer for
each chunk but one (with a norm it is 39), and some registers more, as numbers of a chunk are loaded while those before
are multiplied.

Of n vectors each takes of a weight that is a float 1 + c / (R V) instructions, beside what a turn of the loop takes
once: its multiplication and addition, and its part of what a thread's R rows share, c to load V columns of a vector and
widen them. A thread has R V sums, V numbers, R that are added in the end and some addresses more in registers for each
vector.
"""

from math import ceil

from benchmarks.kernel_cases.case import FLOAT32, Limits
from pallas_kernels.parts.compat import LANES, THREADS, WARPS
from pallas_kernels.parts.integer_mma import QUARTER, SIDE, SIDES
from pallas_kernels.parts.quantized_product import QuantizedProduct
from pallas_kernels.parts.row_product import PIECES, TOGETHER, RowProduct

MOST_REGISTERS = 255
FENCE = 1  # instruction: reads have come
TURN = 25  # instructions of a turn of the loop that it does not repeat for another chunk

# By dtype and rows of a tile. What a turn takes beside its products is the same for half the rows: of float32, 43
# instructions of 8 or 16 weights. Of float32 eight registers more than the design had: before the loop a residual and a
# bias are read, two numbers of each, with where they are; of bfloat16 in 8 rows two more, as both halves of a word are
# widened together, and two in 40, since threads meet only where they must. Two to four blocks share a processor, which
# has room for 128 registers each or more; of 40 rows two could.
PLAIN = {
    ("float32", 8): Limits(58, 8.4),
    ("float32", 16): Limits(58, 3.9),
    ("bfloat16", 8): Limits(56, 5.3),
    ("bfloat16", 16): Limits(94, 3.7),
    ("bfloat16", 40): Limits(194, 2.8),
}
# The design multiplied by the norm in the loop; now x is staged so, in float32, and need not be widened. It had a block
# for each tile: where a block has several, it looks where the next one is, and a pair of rows is a copy more for each
# turn of the loop, which in float32 is half as many weights, 16; and where the ring begins again, three more, where its
# length was a power of two. Four registers more: a position, cosines and sines are read before the loop; and one in
# bfloat16, whose threads stage 32 numbers at once: the sum of their squares. A tile of 32 rows has that register, too,
# and a block of its own; it takes no more than 40 rows do, whose vector is widened.
NORMED = {"float32": Limits(96, 4.7), "bfloat16": Limits(96, 3.9)}
NORMED_WIDE = Limits(152, 2.8)
PAIRED = {"float32": Limits(100, 6.2), "bfloat16": Limits(101, 4.6)}
STAGING = 12  # registers of a thread while a vector is staged, beside what it has read
LOADED = 6  # registers for what is loaded of another chunk


def product_limits(product: RowProduct | QuantizedProduct, *, normed: bool) -> Limits:
    """For a thread block that multiplies so."""
    if isinstance(product, QuantizedProduct):
        return _of_codes(product)
    return _of_floats(product, normed=normed)


def _of_floats(product: RowProduct, *, normed: bool) -> Limits:
    dtype, rows = product.dtype, product.rows * product.runs
    pair, share = product.runs > 1, rows // WARPS
    widest = 16 // dtype.itemsize  # columns that a thread loads at once for one vector
    if pair:
        one = PAIRED[dtype.name]
    elif normed:
        one = NORMED_WIDE if (dtype.name, rows) == ("bfloat16", 32) else NORMED[dtype.name]
    else:
        one = PLAIN.get((dtype.name, rows), Limits())
    if one.instructions is not None:
        shared = TURN * (1 - 1 / product.chunks)
        one = one._replace(instructions=_up(one.instructions + (FENCE - shared) / (share * widest)))
    if product.chunks > 1:
        one = one._replace(registers=min(one.registers + LOADED, MOST_REGISTERS))
    if not normed:  # words of a vector that are read before any of it is stored
        read = min(product.cols * dtype.itemsize // (4 * THREADS), TOGETHER * PIECES * 4)
        one = one._replace(registers=max(one.registers, read + STAGING))
    more = product.batch - 1
    if not more or one.instructions is None:
        return one
    width = product.vector
    # A load and an address for 16 bytes, of float32 where there is a norm; of bfloat16 one more to widen each.
    wide = normed or dtype == FLOAT32
    loading = 2 * ceil(width * (4 if wide else 2) / 16) + (0 if wide else width)
    each = 1 + loading / (share * width)
    # Where loads are half as wide, so is a turn, which else takes as long. Multiplying and widening do not.
    halved = widest // width
    flat = 1 if dtype == FLOAT32 else 2
    turn = share + 1 if pair else 0  # its position, cosines and sines
    registers = one.registers + more * (width * (share + 1) + share + turn + 4)
    return Limits(min(registers, MOST_REGISTERS), _up((one.instructions - flat) * halved + flat + more * each))


def _of_codes(product: QuantizedProduct) -> Limits:
    """Counted, of what a warp does in a step, with 256 columns, four products of the tensor cores for each 8 rows:

        2 to 8 / 8 rows         to load codes, 16 bytes at a time, or 8 in groups of 32, and a load for four scales
        3 a word                to cut 8 codes of four bits apart
        4 a product             to move codes of eight bits in groups of 32, whose sides are not loaded together
        30                      a turn of the loop
        20 + 16 a copy          to ask for another step, unless the ring has room for all

    for each two vectors, by codes of four bits of sixteen rows,

        8 + 8                   to load digits, of a side each
        1 a product             to multiply
        6 / 8 rows              for each group: two sums become floats, with a scale each, and are added
        2                       to load what four groups' digits count

    and for each that is alone

        8 + 4 or 8              to load digits
        1 a product             to multiply
        3 or 4 / 8 rows         for each group: a sum, of both sides where they are one group's, becomes a float, with a
                                scale, and is added
        1                       to load what four groups' digits count

    Four blocks could share a processor with 128 registers; three with 168, which tiles of more than four octets may
    have, since as few blocks are enough for all of their matrix. More than two vectors may have all, which are enough
    for two blocks: their digits alone are 12 each. Steps that are written out are no loop, and neither limit is theirs.
    """
    octets, groups = product.rows * product.runs // 8, QUARTER // product.columns
    products, fours = QUARTER // (SIDES * SIDE), -(-groups // 4)
    four_bits, apart = product.bits == 4, product.columns == SIDE
    if four_bits:
        loads = 2 + 3 * QUARTER // 32
    else:
        loads = 8 + 4 * products if apart else 4
    codes = octets * (loads + (fours if product.group else 0))
    turn = 30
    if product.blocks < product.tiles or product.ring_stages < product.steps:
        turn += 20 + 16 * product.runs * (2 if product.group else 1)
    scaled = 2 + (product.group is not None)
    two = 8 + SIDES * products + octets * products + 2 * (fours + groups * octets * scaled)
    one = 8 + products * (1 if four_bits or apart else 2) + octets * products + fours
    one += groups * octets * (scaled + (not apart))
    pairs, alone = divmod(product.batch, 2) if four_bits and octets % 2 == 0 else (0, product.batch)
    total = codes + turn + pairs * two + alone * one
    registers = MOST_REGISTERS if product.batch > 2 else 168 if octets > 4 else 128
    return Limits(registers, _up(total * LANES / (8 * octets * QUARTER)))


def _up(instructions: float) -> float:
    """To one decimal, as limits are stated."""
    return ceil(instructions * 10) / 10
