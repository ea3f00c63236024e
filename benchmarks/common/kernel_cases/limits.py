"""Limits on a compiled matrix-vector product: the figures of its design, extended to several vectors.

The design was measured for one vector before any kernel ran on a GPU. Registers are per thread, instructions per
weight:

                        rows of a tile    registers    instructions
    bfloat16            8                 54           6.0
                        16                94           4.3
                        32                151          3.5
    float32                               50           3.9
    with a norm, and in pairs of rows     96           5.0

Since then, two instructions instead of three widen the two bfloat16 numbers of a word, which lowers the counts.
Comments give the reasons for all other differences. Limits for codes are counted below: tensor cores multiply codes,
while the design multiplied them one by one, with 4.3 instructions per weight, or 3.4 for codes of four bits.

A turn is an iteration of the main loop. It takes one instruction more than in the design: it waits until a slot of the
ring has been read before it requests a new copy into this slot. Each limit for floats includes this instruction. A turn
may multiply several chunks of columns. It then saves `TURN` instructions (39 with a norm) for each chunk except the
first. It takes a few more registers, because it loads the numbers of one chunk while it multiplies the previous chunk.

With several vectors, a float weight takes 1 + c / (R V) instructions per vector: one multiplication and addition, and
its share of c others. These c instructions load V columns of a vector and widen them, for the R rows of a thread. The
rest of a turn does not depend on the number of vectors. Each vector adds to a thread's registers: R V sums, V numbers,
R numbers that are added at the end, and some addresses.
"""

from math import ceil

from llamaspec.benchmarks.common.kernel_cases.case import FLOAT32, KernelLimits
from llamaspec.pallas_kernels.parts.compat import LANES, THREADS, WARPS
from llamaspec.pallas_kernels.parts.integer_mma import QUARTER, SIDE, SIDES
from llamaspec.pallas_kernels.parts.quantized_product import QuantizedProduct
from llamaspec.pallas_kernels.parts.row_product import PIECES, TOGETHER, RowProduct

MOST_REGISTERS = 255
FENCE = 1  # instructions per turn that wait for reads
TURN = 25  # instructions that a turn executes once, for any number of chunks

# Limits by dtype and rows of a tile. Apart from its products, a turn takes the same number of instructions for half the
# rows: in float32, 43 instructions for 8 or 16 weights. float32 takes eight registers more than the design, because the
# kernel reads a residual and a bias before the loop, two numbers of each, with their addresses. bfloat16 takes two more
# in 8 rows, because both halves of a word are widened together, and two more in 40 rows, because there are fewer
# barriers. Two to four blocks share an SM, which leaves each thread 128 registers or more.
PLAIN = {
    ("float32", 8): KernelLimits(58, 8.4),
    ("float32", 16): KernelLimits(58, 3.9),
    ("bfloat16", 8): KernelLimits(56, 5.3),
    ("bfloat16", 16): KernelLimits(94, 3.7),
    ("bfloat16", 40): KernelLimits(194, 2.8),
}
# The design multiplied by the norm in the loop. Now x is staged times its norm in float32, so it is not widened. The
# design had a block for each tile. Now a block may have several tiles, and looks up the next one. A pair of rows copies
# once more per turn, and in float32 a turn covers half the number of weights, 16. If the length of a ring is not a
# power of two, returning to its start takes three more instructions. Four more registers hold a position, cosines and
# sines, which are read before the loop. In bfloat16 one more register holds a sum of squares, because threads stage 32
# numbers at once. A tile of 32 rows also has this register; it takes no more registers than a tile of 40 rows without a
# norm.
NORMED = {"float32": KernelLimits(96, 4.7), "bfloat16": KernelLimits(96, 3.9)}
NORMED_WIDE = KernelLimits(152, 2.8)
PAIRED = {"float32": KernelLimits(100, 6.2), "bfloat16": KernelLimits(101, 4.6)}
STAGING = 12  # registers of a thread that stages a vector, in addition to the numbers it has read
LOADED = 6  # registers for the numbers of another chunk
E4M3 = 1.5  # instructions that widen a weight of eight bits, in addition to the ones for bfloat16


def product_limits(product: RowProduct | QuantizedProduct, *, normed: bool) -> KernelLimits:
    """Return limits for the kernel of `product`."""
    if isinstance(product, QuantizedProduct):
        return _of_codes(product)
    return _of_floats(product, normed=normed)


def _of_floats(product: RowProduct, *, normed: bool) -> KernelLimits:
    dtype, rows = product.dtype, product.rows * product.runs
    pair, share = product.runs > 1, rows // WARPS
    widest = 16 // dtype.itemsize  # columns that a thread loads at once for one vector
    if pair:
        limits = PAIRED[dtype.name]
    elif normed:
        limits = NORMED_WIDE if (dtype.name, rows) == ("bfloat16", 32) else NORMED[dtype.name]
    else:
        limits = PLAIN.get((dtype.name, rows), KernelLimits())
    if limits.instructions is not None:
        shared = TURN * (1 - 1 / product.chunks)
        limits = limits._replace(instructions=_round_up(limits.instructions + (FENCE - shared) / (share * widest)))
    if product.chunks > 1:
        limits = limits._replace(registers=min(limits.registers + LOADED, MOST_REGISTERS))
    if not normed:  # a thread reads this many words of a vector before it stores the first one
        read = min(product.cols * dtype.itemsize // (4 * THREADS), TOGETHER * PIECES * 4)
        limits = limits._replace(registers=max(limits.registers, read + STAGING))
    if product.e4m3 and limits.instructions is not None:
        registers = min(limits.registers + 16, MOST_REGISTERS)
        limits = limits._replace(registers=registers, instructions=limits.instructions + E4M3)
    more = product.batch - 1
    if not more or limits.instructions is None:
        return limits
    width = product.vector
    # 16 bytes take a load and an address. A vector with a norm is float32. Each bfloat16 takes one instruction to
    # widen.
    wide = normed or dtype == FLOAT32
    loading = 2 * ceil(width * (4 if wide else 2) / 16) + (0 if wide else width)
    per_vector = 1 + loading / (share * width)
    # With loads of half the width, a turn covers half the weights. Only multiplying and widening take fewer
    # instructions.
    halved = widest // width
    flat = 1 if dtype == FLOAT32 else 2
    turn = share + 1 if pair else 0  # registers for its position, cosines and sines
    registers = limits.registers + more * (width * (share + 1) + share + turn + 4)
    return KernelLimits(
        min(registers, MOST_REGISTERS), _round_up((limits.instructions - flat) * halved + flat + more * per_vector)
    )


def _of_codes(product: QuantizedProduct) -> KernelLimits:
    """Return limits from a warp's instructions for a step of 256 columns. Every 8 rows take four products in a step.

    A product is an `mma` instruction, a word has 32 bits, and an octet is 8 rows. A plane is the table of one digit
    of the levels. `pallas_kernels.parts.integer_mma` explains sides, digits, units and lanes.

        2 to 16 per 8 rows      to load codes, 16 bytes at a time (8 in groups of 32, 4 in groups of 16), and to load
                                four scales
        3 per word              to separate 8 codes of four bits, or 6 to make selectors from codes of levels
        4 per word, and 2       for codes of 5 or 6 bits: to load the low bits and to combine them with the words
        7 per word and plane    to look up 8 levels, with moves of the table
        1 per word and plane    for each plane after the first: the compiler of jax 0.12.0.1 adds up to 1.4 per word for
                                NF4's three planes, for an unknown reason
        4 per product           to move codes of eight bits in groups of 32, because their sides are loaded separately
        30                      for a turn of the loop
        20 + 16 per copy        to request another step, unless the ring holds all steps

    For each pair of vectors, with codes of up to six bits and sixteen rows:

        8 + 8                   to load the digits of each side
        1 per product           to multiply, for each plane of levels; groups of 16 have twice the number of products
        6 per 8 rows            for each group: two sums become floats, are multiplied by scales, and are added
        16                      to clear the digits of lane 3, if there are minima
        2                       to load the units of the digits of four groups

    For each single vector:

        8 + 4 or 8              to load digits
        1 per product           to multiply
        3 or 4 per 8 rows       for each group: a sum (of both sides, if they are one group) becomes a float, is
                                multiplied by a scale, and is added
        1                       to load the units of the digits of four groups
        8                       to clear the digits of lane 3, if there are minima

    Each plane of levels after the first takes one more instruction per scale.

    Four blocks can share an SM with 128 registers per thread, and three with 168. Three kinds of products may take 168:
    tiles of more than four octets, because three blocks per SM cover their whole matrix; levels of several planes,
    because instructions and not memory limit their speed; and two vectors in groups of 16, with 16 scales per row.
    Products of more than two vectors may take all registers, with two blocks per SM, because the digits of each vector
    take 12 registers. Unrolled steps form no loop, so neither limit applies to them.
    """
    octets, groups = product.rows * product.runs // 8, QUARTER // product.columns
    products, fours = QUARTER // (SIDES * SIDE) * (2 if product.columns < SIDE else 1), -(-groups // 4)
    in_words, apart = product.bits < 8, product.columns == SIDE
    planes = 1 if product.levels is None else len(product.levels.planes)
    if product.levels is not None:
        loads = 2 + (5 + 8 * planes) * QUARTER // 32
    elif in_words:
        loads = 2 + 3 * QUARTER // 32 + product.apart * (2 + 4 * QUARTER // 32)
    elif product.columns < SIDE:
        loads = 16
    else:
        loads = 8 + 4 * products if apart else 4
    codes = octets * (loads + (fours if product.group else 0))
    cleared = QUARTER // SIDE if product.minima else 0
    turn = 30
    if product.blocks < product.tiles or product.ring_stages < product.steps:
        turn += 20 + 16 * product.runs * (1 + (product.kinds if product.group else 0) + product.apart)
    multiplied = octets * products * planes
    scaled = groups * octets * ((2 + (product.group is not None)) * planes + planes - 1)
    joined = groups * octets * planes if product.columns > SIDE else 0
    two = 8 + SIDES * products + multiplied + 2 * (fours + scaled + cleared)
    per_octet = 8 + products * (1 if in_words or product.columns <= SIDE else 2) + multiplied + fours
    per_octet += scaled + joined + cleared
    pairs, single = divmod(product.batch, 2) if in_words and octets % 2 == 0 else (0, product.batch)
    total = codes + turn + pairs * two + single * per_octet
    many_scales = product.batch > 1 and product.columns < SIDE
    registers = MOST_REGISTERS if product.batch > 2 else 168 if octets > 4 or planes > 1 or many_scales else 128
    return KernelLimits(registers, _round_up(total * LANES / (8 * octets * QUARTER)))


def _round_up(instructions: float) -> float:
    """Round up to one decimal, because all limits have one decimal."""
    return ceil(instructions * 10) / 10
