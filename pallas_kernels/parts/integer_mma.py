r"""A step of a product with codes, on integer tensor cores. Sums are exact, and each group is rounded once.

    y_rb += sum_g (s_rg 2^e_bg sum_d 256^d sum_(k in g) q_rk x_dbk + m_rg sum_(k in g) x_bk)

r is a row of W, b a vector, k a column and g a group of columns with a common scale s_rg. x_dbk is digit d of number k
of vector b, with the exponent e_bg (`fixed_point.py`). Digits and codes q are 8-bit integers. Some kinds of codes also
have minima m. For these, the sums of x over each group are in shared memory next to the digits.

`mma.m16n8k32` multiplies A [16, 32] by B [32, 8] and adds C [16, 8], in 32 bits. A warp is 8 quads of 4 lanes. Quad i
has rows i and i + 8 of A and column i of B, and lane j of the quad has 8 of their 32 terms. The order of the terms is
free, as long as A and B agree. Lane j has columns 2 j and 2 j + 1 of C in both rows.

With one vector, a row of W fills both rows of A of a quad. Each of these two rows has 32 terms, a *side*. Both sides
together have 64 columns of W. Columns 2 d and 2 d + 1 of B are digit d of the vector, for the first and the second
side. So lane j uses two of its four numbers of C, for digit j: the one of the upper row in the first column, and the
one of the lower row in the second column. Eight rows of W fill a product, and a lane's four words of A are in the order
of its loads.

With two vectors, sixteen rows of W are the rows of A, with one side. Columns 2 d and 2 d + 1 of B are digit d of the
first and the second vector. Lane j uses all four numbers of C, for digit j, so half as many products suffice. We do
this for codes of up to six bits, in words. For codes of eight bits, it would save fewer instructions than it takes to
move these codes between registers. An *octet* is eight rows of W. The last of an odd number of vectors is multiplied
separately, and so is every vector if the number of octets is odd.

Codes of four bits are the upper halves of bytes, so they are 16 times too large (`int4.py`); `finished` corrects this.
Codes of 5 and 6 bits also have their low bits, and are 8 and 4 times too large. With minima, all of these are unsigned:
bytes up to 240, 248 or 252. Codes with levels select bytes from a table of 16 in registers, one table per digit of a
level (`levels.py`).

Groups of 16 use `mma.m16n8k16`, which has half the number of terms. The first word of a side then belongs to one group
and the second word to the next, so lane j has columns 4 j to 4 j + 3 of both.

Vectors have three digits, so lane 3 of a quad has no digit. It adds the minima. Its columns of B are 0 and its C starts
one higher than in other lanes, so its product gives 1. With the same instructions that load scales and 2^e in the other
lanes, lane 3 loads minima and sums of x.

To get sums as floats without a conversion, C starts with the bits of the float 3 2^22. Adding an integer below 2^22 to
these bits also adds it to the float. Then subtracting the float 3 2^22 is exact, and eight times as fast as a
conversion. Sums are small enough: 128 products of signed bytes are at most 2^21, and 128 products of an unsigned and a
signed byte are less than 2^22. If a group has two sides, we first add their C as integers, and subtract the bits of 3
2^22 once, because both contain them.

Each of the four warps of a thread block multiplies a quarter of the step's columns, and `finished` adds their sums.

Codes, scales, minima and low bits are in shared memory, or, on cards without TMA, in registers: each thread has loaded
what it multiplies. `codes_layout`, `scales_layout` and `low_bits_layout` describe these registers. A step in registers
may have fewer columns.
"""

from collections.abc import Iterator, Sequence
from itertools import batched, product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, math
from jaxtyping import Array, Float32

from llamaspec.pallas_kernels.parts import int4, low_bits
from llamaspec.pallas_kernels.parts.compat import WARPS, Target, tiled_layout
from llamaspec.pallas_kernels.parts.fixed_point import DIGITS, VECTOR
from llamaspec.pallas_kernels.parts.inline import (
    all_words,
    array,
    down,
    float32,
    int32,
    load,
    ptx,
    real,
    times,
    total,
    word,
    words,
)
from llamaspec.pallas_kernels.parts.levels import Levels

CHUNK = 1024  # columns of a step, or the maximum for a step in registers
QUARTER = CHUNK // WARPS
SIDE = 32  # columns
SIDES = 2  # sides of a product
HALF = SIDE // 2  # columns of the smallest groups
PLACES = 4  # lanes of a quad: one per digit, and one more
LINE = 128  # bytes of a row stored together
OCTET = 8  # rows

# Quad i has row i / 2 of eight, or 4 + i / 2 if i is odd; see `_codes` for the reason.
SUMS = tiled_layout(((OCTET, WARPS, PLACES), (OCTET // 2, 1, PLACES), (1, 1, 1)), warps=-8, lanes=(-6, -9, -4))
DOTS = SUMS.reduce(2).reduce(1)

MMA = (
    "mma.sync.aligned.m16n8k32.row.col.s32.{codes}.s8.s32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, "
    "{{$10,$11,$12,$13}};"
)
MMA_OF_HALVES = (
    "mma.sync.aligned.m16n8k16.row.col.s32.{codes}.s8.s32 {{$0,$1,$2,$3}}, {{$4,$5}}, {{$6}}, {{$7,$8,$9,$10}};"
)
LOOK_UP = "prmt.b32 $0, $1, $2, $3;"
ZERO = 3 * 2.0**22
ZERO_BITS = int(np.float32(ZERO).view(np.int32))

Sums = list[Float32[Array, "rows warps places"]]  # for each vector, over the rows of all runs


class StepMemory(NamedTuple):
    """The shared memory and registers of a step in a thread block, and their layout."""

    bits: int  # of a code
    rows: int  # of W, in all runs
    group: int  # columns with a common scale, or with a common exponent if a row has one scale
    columns: int  # of all steps
    codes: Any  # a slot of the `ring`
    scales: Any  # float32 [kinds, runs, rows, groups]: scales, and minima if there are any; or None
    digits: Any  # int8 [batch, groups, group / 8, DIGITS, 8]
    units: Any  # float32 [batch, kinds, groups]: 2^e, and with minima the sums of x
    minima: bool = False
    levels: Levels | None = None  # for four-bit codes that select levels
    low_bits: Any = None  # a slot of a `low_bits.ring`, for codes of 5 and 6 bits
    chunk: int = CHUNK  # columns of this step
    in_registers: bool = False  # whether codes, scales, least and low_bits are lists of arrays, one per run
    least: Any = None  # minima, if they are in registers

    @property
    def quarter(self) -> int:
        """The number of columns of a warp."""
        return self.chunk // WARPS

    @property
    def in_words(self) -> bool:
        return self.bits < 8

    @property
    def unsigned(self) -> bool:
        """Tell whether codes are unsigned. Codes in words are unsigned if they have minima."""
        return self.in_words and self.minima


def ring(stages: int, runs: int, rows: int, bits: int) -> Any:
    """Declare the shared memory for the codes of `stages` steps: int8, or words of `int4.packed`."""
    dtype, columns = (jnp.int8, CHUNK) if bits == 8 else (jnp.int32, CHUNK // int4.WORD)
    return plgpu.SMEM((stages, runs, rows, columns), dtype, transforms=_transforms(bits))


def _transforms(bits: int) -> tuple[Any, ...]:
    """The layout of codes: lines of eight rows, each with its 16-byte pieces in a different order."""
    line = LINE if bits == 8 else LINE // 4
    return plgpu.TilingTransform((OCTET, line)), plgpu.SwizzleTransform(LINE)  # pyright: ignore[reportAbstractUsage]


def zeros(batch: int, rows: int) -> Sums:
    """Make the initial sums."""
    return [plgpu.layout_cast(jnp.zeros((rows, WARPS, PLACES), jnp.float32), SUMS)] * batch


def finished(
    sums: Sums, runs: int, unit: float, target: Target, *, minima: bool = False
) -> list[list[Float32[Array, " rows_of_run"]]]:
    """Add up the sums of the four warps, and multiply by `unit` (see `unit_of`). Returns products by vector and run."""
    return [_runs(_dots(rows, unit, minima=minima), runs, target) for rows in sums]


def unit_of(bits: int, levels: Levels | None) -> float:
    """Return the power of two that corrects the position of codes in bytes: 1/16 for integers in the upper halves."""
    if levels is not None:
        return levels.unit
    return 2.0 ** (bits - 8)


def _dots(sums, unit: float, *, minima: bool):
    place = plgpu.broadcasted_iota(jnp.int32, sums.shape, 2, layout=SUMS)
    digits = jnp.where(place == DIGITS, sums, 0.0) if minima else jnp.zeros_like(sums)
    for digit in range(DIGITS):
        digits = jnp.where(place == digit, sums * (2.0 ** (8 * digit) * unit), digits)
    return jnp.sum(jnp.sum(digits, axis=2), axis=1)


def _runs(dots, runs: int, target: Target) -> list[Float32[Array, " rows_of_run"]]:
    """Add up the sums of the warps, and split the result by run. This takes one barrier for all runs."""
    if runs == 1:
        return [dots]
    shape = (len(dots) // runs,)
    if target.interpret:
        return list(dots.reshape(runs, *shape))

    def run(_, dots):
        octets = [words(register, float32()) for register in dots.registers.flat]
        return [array(some, shape, np.dtype("float32"), DOTS) for some in batched(octets, len(octets) // runs)]

    run_shape = plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout=DOTS)
    inlined: Any = plgpu.inline_mgpu(arg_types=(DOTS,), return_type=[run_shape] * runs)
    return list(inlined(run)(dots))


def codes_layout(bits: int, group: int, chunk: int) -> Any:
    """The layout of codes [rows, chunk] in registers. The lanes of a quad load adjacent bytes, as in `_load_codes`."""
    vector, row = (min(16, group // PLACES), chunk) if bits == 8 else (4, chunk // int4.WORD)
    tiles = ((OCTET, row), (OCTET // 2, row // WARPS), (1, PLACES * vector), (1, vector))
    return tiled_layout(tiles, warps=-7, lanes=(-6, -8, -3))


def scales_layout(group: int, chunk: int) -> Any:
    """The layout of scales [rows, groups] in registers. Each lane of a quad has all scales of the warp's columns."""
    groups = chunk // WARPS // group
    tiles = ((OCTET, WARPS * groups), (OCTET // 2, groups), (1, min(groups, 4)))
    return tiled_layout(tiles, warps=-5, lanes=(-4, -6, None))


def low_bits_layout(bits: int, chunk: int) -> Any:
    """The layout of low bits in registers: a lane has one or two words for each 128 columns."""
    few, row = bits - 4, low_bits.words(chunk, bits)
    tiles = ((OCTET, row), (OCTET // 2, row // WARPS), (1, PLACES * few), (1, few))
    return tiled_layout(tiles, warps=-7, lanes=(-6, -8, -3))


def add(sums: Sums, step: StepMemory, target: Target) -> Sums:
    """Add a step to `sums`."""
    if target.interpret:
        return _interpreted(sums, step)
    shape = sums[0].shape

    def run(_, refs, arrays, registers):
        numbers = [all_words(rows, float32()) for rows in arrays]
        kinds = {"scales": float32(), "least": float32()}
        own_words = {name: _by_octet(runs, kinds.get(name, int32())) for name, runs in registers.items()}
        _accumulate(numbers, step._replace(**refs, **own_words), Lane.of_thread())
        return [
            array(([number] for number in own_numbers), shape, np.dtype("float32"), SUMS) for own_numbers in numbers
        ]

    layouts = _register_layouts(step) if step.in_registers else {}
    registers = {name: getattr(step, name) for name in layouts}
    refs = {name: getattr(step, name) for name in ("codes", "low_bits", "scales", "digits", "units")}
    refs = {name: ref for name, ref in refs.items() if ref is not None and name not in registers}
    types = {name: plgpu.RefType() for name in refs}
    if "codes" in refs:
        types["codes"] = plgpu.RefType(_transforms(step.bits))
    if "low_bits" in refs:
        types["low_bits"] = plgpu.RefType(low_bits.transforms(step.bits))
    register_types = {name: [layouts[name]] * len(runs) for name, runs in registers.items()}
    inlined: Any = plgpu.inline_mgpu(
        arg_types=(types, [SUMS] * len(sums), register_types),
        return_type=[plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout=SUMS)] * len(sums),
    )
    return list(inlined(run)(refs, sums, registers))


def _register_layouts(step: StepMemory) -> dict[str, Any]:
    """Return the layout of each field of a step that is in registers."""
    scales = scales_layout(step.group, step.chunk)
    layouts = {"codes": codes_layout(step.bits, step.group, step.chunk), "scales": scales, "least": scales}
    if step.low_bits is not None:
        layouts["low_bits"] = low_bits_layout(step.bits, step.chunk)
    return {name: layout for name, layout in layouts.items() if getattr(step, name) is not None}


def _by_octet(runs: Sequence[Any], kind: Any) -> list[list[Any]]:
    """List a lane's words for each octet (eight rows of W), in all runs of rows."""
    octets: list[list[Any]] = []
    for run in runs:
        run_words, count = all_words(run, kind), run.shape[0] // OCTET
        octets += map(list, batched(run_words, len(run_words) // count))
    return octets


def _interpreted(sums: Sums, step: StepMemory) -> Sums:
    """Add a step to `sums` with ordinary array operations, for the interpreter."""
    rows, groups = len(sums[0]), step.quarter // step.group

    def read(ref):
        return jnp.concatenate(ref) if isinstance(ref, list) else plgpu.load(ref, layout=None)

    codes = read(step.codes)
    planes = [codes.astype(jnp.int32)]
    if step.in_words:
        least = None if step.low_bits is None else read(step.low_bits).reshape(rows, -1)
        order = int4.order_of(step.group, levels=step.levels is not None)
        codes = int4.unpacked(codes.reshape(rows, -1), order, least)
        if step.levels is not None:
            planes = [
                jnp.asarray(sum(jnp.where(codes == code, level, 0) for code, level in enumerate(plane)))
                for plane in step.levels.planes
            ]
        else:
            planes = [2 ** (8 - step.bits) * (codes if step.unsigned else int4.signed(codes, step.bits))]
    digits = jnp.moveaxis(read(step.digits), 3, 1).reshape(-1, DIGITS, WARPS, groups, step.group).astype(jnp.int32)
    kinds = 2 if step.minima else 1
    units = read(step.units).reshape(len(sums), kinds, WARPS, groups)
    scales: Any = jnp.ones((kinds, rows, WARPS, groups))
    if step.scales is not None:
        numbers = read(step.scales) if step.least is None else jnp.stack([read(step.scales), read(step.least)])
        scales = numbers.reshape(kinds, rows, WARPS, groups)
    new_sums = list(sums)
    for plane, codes in enumerate(planes):
        dots = jnp.einsum("rwgk,bdwgk->gbrwd", codes.reshape(rows, WARPS, groups, step.group), digits)
        dots = jnp.pad(dots.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, 0), (0, PLACES - DIGITS)))
        for b in range(len(new_sums)):
            for group in range(groups):
                scale = units[b, 0, :, group] * scales[0, ..., group] * 256.0**plane
                new_sums[b] = new_sums[b] + dots[group, b] * scale[..., None]
    if step.minima:
        least = jnp.sum(units[:, 1, None] * scales[1], axis=-1)
        new_sums = [old_sum.at[..., DIGITS].add(change) for old_sum, change in zip(new_sums, least, strict=True)]
    return new_sums


class Lane(NamedTuple):
    """The position of a thread in its warp and quad."""

    warp: Any
    quad: Any
    place: Any  # lane in its quad
    row: Any  # the row of its quad among eight rows of W

    @property
    def last(self) -> Any:
        """Return 1 for lane 3 of a quad, which has no digit, and 0 for the others."""
        return arith.andi(self.place, arith.shrui(self.place, word(1)))

    @classmethod
    def of_thread(cls) -> "Lane":
        thread = utils.thread_idx()
        quad = arith.andi(arith.shrui(thread, word(2)), word(7))
        row = total(arith.shrui(quad, word(1)), times(arith.andi(quad, word(1)), 4))
        return cls(arith.shrui(thread, word(5)), quad, arith.andi(thread, word(3)), row)


def _accumulate(sums: list[list[Any]], step: StepMemory, lane: Lane) -> None:
    """Add a thread's products of a step to its sums: one sum per vector and octet of rows."""
    octets = range(len(sums[0]))
    planes = list(zip(*(_codes(step, octet, lane) for octet in octets), strict=True))
    scales = None if step.scales is None else [_scales(step, octet, lane) for octet in octets]
    zero = real(ZERO)
    for vectors in batched(range(len(sums)), 2 if step.in_words and len(octets) % 2 == 0 else 1):
        units = {vector: _units(step, vector, lane) for vector in vectors}
        digits = (_digits if len(vectors) == 1 else _digits_of_two)(step, vectors[0], lane)
        for plane, codes in enumerate(planes):
            octet_sums = (_of_one if len(vectors) == 1 else _of_two)(vectors, codes, digits, step, lane)
            for vector, octet, group, integer in octet_sums:
                scale = units[vector][group]
                scale = scale if scales is None else arith.mulf(scale, scales[octet][group])
                scale = arith.mulf(scale, real(256.0**plane)) if plane else scale
                number = arith.subf(arith.bitcast(float32(), integer), zero)
                sums[vector][octet] = math.fma(number, scale, sums[vector][octet])


# The integer sum of a vector, an octet of rows and a group, plus the bits of ZERO.
Integers = Iterator[tuple[int, int, int, Any]]


def _of_one(
    vectors: Sequence[int], codes: Sequence[list[Any]], digits: list[Any], step: StepMemory, lane: Lane
) -> Integers:
    """Multiply one vector by all rows of W.

    Each product has an octet of eight rows, and two parts of their columns (sides).
    """
    (vector,) = vectors
    products = max(1, step.group // (SIDES * SIDE))
    # Both sides together are one group, so only one of them adds lane 3's minima.
    begin = _begin(step, lane, (0,) if step.group > SIDE else (0, 3))
    for first in range(0, step.quarter // (SIDES * SIDE), products):
        for octet, sides in enumerate(codes):
            upper, lower = sides[SIDES * first], sides[SIDES * first + 1]
            if step.group == HALF:
                for half in range(2):
                    c = _product_of_halves(step, upper[half], lower[half], digits[first][half], begin)
                    for side, integer in enumerate((c[0], c[3])):
                        yield vector, octet, 2 * (SIDES * first + side) + half, integer
                continue
            c = begin
            for k in range(first, first + products):
                c = _product(step, sides[SIDES * k], sides[SIDES * k + 1], digits[k], c)
            pair_sums = c[0], c[3]
            integers = pair_sums if step.group == SIDE else [total(*pair_sums, word(-ZERO_BITS))]
            for group, integer in enumerate(integers, start=first * SIDES * SIDE // step.group):
                yield vector, octet, group, integer


def _of_two(
    vectors: Sequence[int], codes: Sequence[list[Any]], digits: list[Any], step: StepMemory, lane: Lane
) -> Integers:
    """Multiply two vectors by all rows of W, for codes in words.

    Each product has two octets of eight rows, and one part of their columns (side).
    """
    products, begin = step.group // SIDE, _begin(step, lane, (0, 1, 2, 3))
    for group in range(step.quarter // step.group):
        for octets in batched(range(len(codes)), 2):
            upper, lower = (codes[octet] for octet in octets)
            if step.group == HALF:
                side, half = divmod(group, 2)
                c = _product_of_halves(step, upper[side][half], lower[side][half], digits[side][half], begin)
            else:
                c = begin
                for k in range(group * products, (group + 1) * products):
                    c = _product(step, upper[k], lower[k], digits[k], c)
            for (octet, vector), integer in zip(product(octets, vectors), c, strict=True):
                yield vector, octet, group, integer


def _begin(step: StepMemory, lane: Lane, counting: Sequence[int]) -> list[Any]:
    """Make the initial C: the bits of 3 2^22 as a float. With minima, lane 3 adds 1 to the elements `counting`.

    Unused elements get the same value as others, so that the compiler makes this value only once.
    """
    zero = word(ZERO_BITS)
    if not step.minima:
        return [zero] * 4
    counter = total(zero, lane.last)
    return [counter if place in counting else zero for place in range(4)]


def _product(
    step: StepMemory, upper: Sequence[Any], lower: Sequence[Any], digits: Sequence[Any], c: list[Any]
) -> list[Any]:
    """Multiply the `upper` and `lower` rows of A by `digits` (B), and add `c`. All are this lane's parts."""
    instruction = MMA.format(codes="u8" if step.unsigned else "s8")
    return ptx(instruction, [upper[0], lower[0], upper[1], lower[1], *digits, *c], results=4)


def _product_of_halves(step: StepMemory, upper: Any, lower: Any, digits: Any, c: list[Any]) -> list[Any]:
    """Multiply the upper and lower rows of A by B and add C, for 16 columns. Arguments are the lane's words."""
    instruction = MMA_OF_HALVES.format(codes="u8" if step.unsigned else "s8")
    return ptx(instruction, [upper, lower, digits, *c], results=4)


def _codes(step: StepMemory, octet: int, lane: Lane) -> list[list[tuple[Any, Any]]]:
    """Return the codes that a lane multiplies in one of its rows.

    The result has an entry [plane][side] with two words of A. A plane is a digit of the levels, and a side is a part of
    the warp's columns.
    """
    code_words = step.codes[octet] if step.in_registers else _load_codes(step, octet, lane)
    if step.levels is not None:
        chosen = [_chosen(code_word) for code_word in code_words]
        return [[_looked_up(code_word, table) for code_word in chosen] for table in step.levels.tables]
    if step.in_words:
        upper = word(0xF0F0F0F0)
        shifted = ((arith.shli(code_word, word(4)), code_word) for code_word in code_words)
        code_words = [arith.andi(half, upper) for halves in shifted for half in halves]
        if step.low_bits is not None:
            code_words = [arith.ori(*half) for half in zip(code_words, _low_bits(step, octet, lane), strict=True)]
    elif _together(step):
        return [[side for a, b, c, d in batched(code_words, 4) for side in ((a, c), (b, d))]]
    return [list(batched(code_words, 2))]


def _load_codes(step: StepMemory, octet: int, lane: Lane) -> list[Any]:
    """Load a lane's words of codes in one of its rows from shared memory.

    A 16-byte load serves 8 lanes at a time, from two rows, one of the upper four and one of the lower four. In swizzled
    lines, these are never in the same banks. An 8-byte load serves 16 lanes from four rows, and a 4-byte load all
    lanes.
    """
    size = CHUNK // 2 if step.in_words else CHUNK  # bytes of a row
    if step.in_words or _together(step):
        wide = 16  # bytes per load of a lane
    else:
        wide = 4 if step.group == HALF else 8
    within = arith.xori(times(lane.place, wide), times(lane.row, LINE // OCTET))  # bytes of a line
    start = total(times(lane.warp, OCTET * size // WARPS), times(lane.row, LINE))
    code_words = []
    for at in range(0, size // WARPS, 4 * wide):
        lines, offset = divmod(at, LINE)
        place = total(start, arith.xori(within, word(offset)), word(OCTET * (octet * size + lines * LINE)))
        code_words += load(step.codes, place, int32(), wide // 4)
    return code_words


def _low_bits(step: StepMemory, octet: int, lane: Lane) -> Iterator[Any]:
    """Yield the low bits of a lane's part of one of its rows, in the lower halves of bytes."""
    few = step.bits - 4
    mask = word(0x01010101 * (0xF0 >> few & 0x0F))
    for low_word in step.low_bits[octet] if step.in_registers else _load_low_bits(step, octet, lane):
        for place in range(0, 4, few):
            yield arith.andi(down(low_word, place - 4 + few), mask)
            yield arith.andi(down(low_word, place + few), mask)


def _load_low_bits(step: StepMemory, octet: int, lane: Lane) -> Iterator[Any]:
    """Load a lane's words of low bits in one of its rows from shared memory."""
    tile = total(times(lane.warp, low_bits.tile_bytes(step.bits)), word(octet * WARPS * low_bits.tile_bytes(step.bits)))
    for block in range(low_bits.BLOCKS):
        yield from low_bits.of_block(step.low_bits, tile, lane.row, lane.place, block, step.bits)


def _chosen(codes: Any) -> list[tuple[Any, Any]]:
    """Split a word of eight codes into selectors for `_looked_up`, two for each four codes.

    The first selector chooses one of eight bytes by the lower three bits of each code, and the second selector chooses
    one of two bytes by the upper bit.
    """
    byte = arith.andi(codes, word(0x77777777))
    half = arith.xori(arith.andi(arith.shrui(codes, word(1)), word(0x44444444)), word(0x32103210))
    return [(byte, half), (arith.shrui(byte, word(16)), arith.shrui(half, word(16)))]


def _looked_up(selectors: list[tuple[Any, Any]], table: Sequence[int]) -> tuple[Any, Any]:
    """Select bytes from a table of 16, given as four words, by selectors from `_chosen`."""
    first, second, third, fourth = (word(entry) for entry in table)
    selected = []
    for byte, half in selectors:
        (lower,), (upper,) = (ptx(LOOK_UP, [*pair, byte], results=1) for pair in ((first, second), (third, fourth)))
        selected += ptx(LOOK_UP, [lower, upper, half], results=1)
    return selected[0], selected[1]


def _together(step: StepMemory) -> bool:
    """Tell whether a lane loads 16 adjacent columns for both sides at once.

    If so (for example, for eight-bit codes in one group), each side gets four of every eight adjacent codes. If not,
    one side gets all eight.
    """
    return not step.in_words and step.group > SIDE


def _digits(step: StepMemory, vector: int, lane: Lane) -> list[list[Any]]:
    """Load a lane's part of B for each product with one vector: two words of its quad's digit and side."""
    together = _together(step)
    side = times(arith.andi(lane.quad, word(1)), VECTOR // 2 if together else DIGITS * SIDE)
    start = total(_digits_start(step, vector, lane), side)
    places = [total(start, word(DIGITS * at)) for at in range(0, step.quarter, SIDES * SIDE)]
    if not together:
        return _digits_at(step, places, lane)
    return _without_last(
        step,
        lane,
        [
            [*load(step.digits, place, int32(), 1), *load(step.digits, total(place, word(DIGITS * VECTOR)), int32(), 1)]
            for place in places
        ],
    )


def _digits_of_two(step: StepMemory, first: int, lane: Lane) -> list[list[Any]]:
    """Load a lane's part of B for each product with vectors `first` and `first + 1`: two words of its quad's digit."""
    which = times(arith.andi(lane.quad, word(1)), DIGITS * step.columns)
    start = total(_digits_start(step, first, lane), which)
    return _digits_at(step, [total(start, word(DIGITS * at)) for at in range(0, step.quarter, SIDE)], lane)


def _digits_at(step: StepMemory, places: list[Any], lane: Lane) -> list[list[Any]]:
    """Load two words of a lane's digits at each place: neighbors, or one from each of two groups of 16."""
    if step.group != HALF:
        return _without_last(step, lane, [load(step.digits, place, int32(), 2) for place in places])
    return _without_last(
        step,
        lane,
        [
            [word_ for at in (0, DIGITS * HALF) for word_ in load(step.digits, total(place, word(at)), int32(), 1)]
            for place in places
        ],
    )


def _without_last(step: StepMemory, lane: Lane, digits: list[list[Any]]) -> list[list[Any]]:
    """Set the columns of B for lane 3 to 0, because lane 3 has no digit, and adds minima instead."""
    if not step.minima:
        return digits
    digit = arith.shrui(lane.quad, word(1))
    none = arith.andi(digit, arith.shrui(digit, word(1)))  # 1 in quads 6 and 7, otherwise 0
    mask = total(none, word(-1))
    return [[arith.andi(digit_word, mask) for digit_word in some] for some in digits]


def _digits_start(step: StepMemory, vector: int, lane: Lane) -> Any:
    """Find the start of a lane's columns in its quad's digit."""
    digit = arith.minui(arith.shrui(lane.quad, word(1)), word(DIGITS - 1))
    start = total(word(vector * DIGITS * step.columns), times(lane.warp, DIGITS * step.quarter), times(digit, VECTOR))
    if step.group == HALF:
        pair, within = arith.shrui(lane.place, word(1)), arith.andi(lane.place, word(1))
        return total(start, times(pair, DIGITS * VECTOR), times(within, VECTOR // 2))
    return total(start, times(lane.place, DIGITS * VECTOR * (2 if _together(step) else 1)))


def _scales(step: StepMemory, octet: int, lane: Lane) -> list[Any]:
    """Load the scales of one of a lane's rows (in lane 3, the minima), for each group of its warp."""
    if step.in_registers and step.least is None:
        return step.scales[octet]
    if step.in_registers:
        last = arith.cmpi(arith.CmpIPredicate.eq, lane.place, word(DIGITS))
        pairs = zip(step.least[octet], step.scales[octet], strict=True)
        return [arith.select(last, least, scale) for least, scale in pairs]
    groups, rows = step.quarter // step.group, step.rows
    at = total(times(lane.row, 4 * WARPS * groups), times(lane.warp, 4 * groups))
    if step.minima:
        at = total(at, times(lane.last, 4 * WARPS * groups * rows))
    return load(step.scales, total(at, word(4 * OCTET * WARPS * groups * octet)), float32(), groups)


def _units(step: StepMemory, vector: int, lane: Lane) -> list[Any]:
    """Load 2^e of a vector (in lane 3, its sums), for each group of a lane's warp."""
    groups, row = step.quarter // step.group, 4 * step.columns // step.group
    at = total(word(vector * row * (2 if step.minima else 1)), times(lane.warp, 4 * groups))
    if step.minima:
        at = total(at, times(lane.last, row))
    return load(step.units, at, float32(), groups)
