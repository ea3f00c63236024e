"""Limits on a compiled product: the figures of its design, extended to several vectors.

The design was measured for one vector before any kernel ran, in registers of a thread and instructions per weight:
bfloat16 in tiles of 8, 16 and 32 rows 54 and 6.0, 94 and 4.3, 151 and 3.5; float32 50 and 3.9; with a norm, and in
pairs of rows too, 96 and 5.0. Since then two instructions, not three, widen the two bfloat16 of a word, which lowers
the counts. A comment gives the reason for any other difference. Limits for codes are counted, below: tensor cores
multiply them, where the design multiplied one by one, with 4.3 instructions, or 3.4 for codes of four bits.

A turn of the loop takes one instruction more than in the design, because it waits for its reads before it asks for a
slot of the ring again. Each limit of floats includes it. A step of several chunks is one turn: it saves `TURN`
instructions for each chunk but one (39 with a norm), and takes a few more registers, because it loads the numbers of
one chunk while it multiplies those of the previous one.

With n vectors, each takes 1 + c / (R V) instructions per weight that is a float, in addition to the instructions that a
turn takes once: its multiplication and addition, and its share of the c instructions that load V columns of a vector
and widen them for a thread's R rows. Each vector adds R V sums, V numbers, R numbers that are added in the end, and
some addresses to a thread's registers.
"""

from math import ceil

from llamaspec.benchmarks.common.kernel_cases.case import FLOAT32, KernelLimits
from llamaspec.pallas_kernels.parts.compat import LANES, THREADS, WARPS
from llamaspec.pallas_kernels.parts.integer_mma import QUARTER, SIDE, SIDES
from llamaspec.pallas_kernels.parts.quantized_product import QuantizedProduct
from llamaspec.pallas_kernels.parts.row_product import PIECES, TOGETHER, RowProduct

MOST_REGISTERS = 255
FENCE = 1  # instructions of a turn that wait for reads
TURN = 25  # instructions of a turn that a further chunk in the same turn does not repeat

# Limits by dtype and rows of a tile. Apart from its products, a turn takes as many instructions for half the rows: in
# float32 43 instructions for 8 or 16 weights. float32 takes eight registers more than the design, because a residual
# and a bias are read before the loop, two numbers of each, with their addresses. bfloat16 in 8 rows takes two more,
# because both halves of a word are widened together, and two more in 40 rows, because threads meet only where they
# must. Two to four blocks share a processor, which leaves each thread 128 registers or more; with 40 rows two blocks
# could.
PLAIN = {
    ("float32", 8): KernelLimits(58, 8.4),
    ("float32", 16): KernelLimits(58, 3.9),
    ("bfloat16", 8): KernelLimits(56, 5.3),
    ("bfloat16", 16): KernelLimits(94, 3.7),
    ("bfloat16", 40): KernelLimits(194, 2.8),
}
# The design multiplied by the norm in the loop; now x is staged with its norm, in float32, and is not widened. The
# design had a block for each tile; a block of several tiles looks up the next one. A pair of rows copies once more
# each turn, which in float32 covers half as many weights, 16. A ring with a length that is no power of two takes three
# more instructions to begin again. Four more registers hold a position, cosines and sines, read before the loop. One
# more in bfloat16 holds a sum of squares, since its threads stage 32 numbers at once. A tile of 32 rows has that
# register, too, and a block of its own; it takes no more than a tile of 40 rows, which widens its vector.
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
        limits = limits._replace(instructions=_up(limits.instructions + (FENCE - shared) / (share * widest)))
    if product.chunks > 1:
        limits = limits._replace(registers=min(limits.registers + LOADED, MOST_REGISTERS))
    if not normed:  # a thread reads these words of a vector before it stores any
        read = min(product.cols * dtype.itemsize // (4 * THREADS), TOGETHER * PIECES * 4)
        limits = limits._replace(registers=max(limits.registers, read + STAGING))
    if product.e4m3 and limits.instructions is not None:
        registers = min(limits.registers + 16, MOST_REGISTERS)
        limits = limits._replace(registers=registers, instructions=limits.instructions + E4M3)
    more = product.batch - 1
    if not more or limits.instructions is None:
        return limits
    width = product.vector
    # 16 bytes take a load and an address; a vector with a norm is float32. Each bfloat16 takes one more, to widen it.
    wide = normed or dtype == FLOAT32
    loading = 2 * ceil(width * (4 if wide else 2) / 16) + (0 if wide else width)
    per_vector = 1 + loading / (share * width)
    # Half as wide loads make a turn cover half the weights in as many instructions, but for multiplying and widening.
    halved = widest // width
    flat = 1 if dtype == FLOAT32 else 2
    turn = share + 1 if pair else 0  # registers for its position, cosines and sines
    registers = limits.registers + more * (width * (share + 1) + share + turn + 4)
    return KernelLimits(
        min(registers, MOST_REGISTERS), _up((limits.instructions - flat) * halved + flat + more * per_vector)
    )


def _of_codes(product: QuantizedProduct) -> KernelLimits:
    """Count the instructions of a warp in a step of 256 columns, with four tensor-core products for each 8 rows:

        2 to 16 / 8 rows        to load codes, 16 bytes at a time, or 8 in groups of 32 and 4 in groups of 16, and a
                                load for four scales
        3 a word                to cut 8 codes of four bits apart, or 6 to make selectors of levels of them
        4 a word and 2          to join them with their rest, where codes have 5 or 6 bits, and to load it
        7 a word and plane      to look 8 levels up, with moves of the table
        1 a word and plane      for each plane but the first: the compiler of jax 0.12.0.1 adds up to 1.4 a word to
                                NF4's three planes, for a reason that we have not looked up in its code
        4 a product             to move codes of eight bits in groups of 32; their sides are not loaded together
        30                      a turn of the loop
        20 + 16 a copy          to ask for another step, unless the ring holds all steps

    for each two vectors, by codes of up to six bits of sixteen rows,

        8 + 8                   to load digits, of a side each
        1 a product             to multiply, for each plane of levels; in groups of 16 there are twice as many
        6 / 8 rows              for each group: two sums become floats, with a scale each, and are added
        16                      to clear lane 3's digits, where there are minima
        2                       to load the units of four groups' digits

    and for each single vector

        8 + 4 or 8              to load digits
        1 a product             to multiply
        3 or 4 / 8 rows         for each group: a sum, of both sides where they are one group's, becomes a float, with a
                                scale, and is added
        1                       to load the units of four groups' digits
        8                       to clear lane 3's digits, where there are minima

    Each plane of levels but the first takes one more instruction for each scale.

    Four blocks can share a processor with 128 registers a thread, and three with 168. Tiles of more than four octets
    may take 168, because three blocks a processor cover their whole matrix. Levels of several planes may, too, since
    they wait for instructions and not for memory, and two vectors in groups of 16, with 16 scales a row. More than two
    vectors may take all registers, with two blocks a processor: their digits take 12 each. Steps that are written
    out form no loop, so neither limit is theirs.
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
    return KernelLimits(registers, _up(total * LANES / (8 * octets * QUARTER)))


def _up(instructions: float) -> float:
    """Round up to one decimal, like all limits."""
    return ceil(instructions * 10) / 10
