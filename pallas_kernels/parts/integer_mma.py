r"""A step of a product with codes, on the tensor cores' integers: sums are exact, and each group costs one rounding.

    y_rb += sum_g s_rg 2^e_bg sum_d 256^d sum_(k in g) q_rk x_dbk

x_dbk are the digits of vector b, whose exponents are e_bg (`fixed_point.py`): integers of 8 bits, as the codes q are.

`mma.m16n8k32` multiplies A [16, 32] by B [32, 8] and adds C [16, 8], in 32 bits. A warp is 8 quads of 4 lanes. Quad i
has rows i and i + 8 of A and column i of B, and lane j of the quad has 8 of their 32 terms. The order of the terms is
free, as long as A and B agree. Lane j has columns 2 j and 2 j + 1 of C in both rows.

One vector: a row of W fills both rows of A of a quad, with two *sides* of 32 terms each, which are 64 of its columns.
Columns 2 d and 2 d + 1 of B are digit d of the vector, for the first side and the second. Lane j then uses two numbers
of C, for digit j: the upper row in the first column and the lower row in the second; the other two are unused. Eight
rows of W fill a product, and a lane has its four words of A side by side, as it loaded them.

Two vectors by codes of four bits: sixteen rows of W are the rows of A, with one side, and columns 2 d and 2 d + 1 of B
are digit d of the first vector and of the second. Lane j uses all four numbers, for digit j, so half as many products
suffice. Codes of eight bits would have to be moved for this, which takes more instructions than it saves. The last of
an odd number of vectors is multiplied alone, and so are all vectors if the octets of rows are odd in number.

Codes of four bits are the upper halves of bytes, and so 16 times as large (`int4.py`); `finished` undoes that.

C begins with the bits of 3 2^22 as a float. A sum of integers below 2^22 is then also added to that float, and
subtracting 3 2^22 is exact and eight times as fast as a conversion. 128 products of 8 bits are at most 2^21. Sides of
one group are first added as integers, less those bits, which would be there twice.

The four warps of a thread block multiply a quarter of the step's columns each, and meet in `finished`.
"""

from collections.abc import Iterator, Sequence
from itertools import batched, product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math
from jaxtyping import Array, Float32

from pallas_kernels.parts import int4
from pallas_kernels.parts.compat import WARPS, Target, tiled_layout
from pallas_kernels.parts.fixed_point import DIGITS, VECTOR
from pallas_kernels.parts.inline import all_words, array, float32, int32, load, ptx, times, total, word, words

CHUNK = 1024  # columns of a step
QUARTER = CHUNK // WARPS
SIDE = 32  # columns
SIDES = 2  # sides of a product
PLACES = 4  # lanes of a quad: one for each digit, and one
LINE = 128  # bytes of a row that lie together
OCTET = 8  # rows

# Quad i has row i / 2 of eight, or 4 + i / 2 where i is odd; `_codes` says why.
SUMS = tiled_layout(((OCTET, WARPS, PLACES), (OCTET // 2, 1, PLACES), (1, 1, 1)), warps=-8, lanes=(-6, -9, -4))
DOTS = SUMS.reduce(2).reduce(1)

MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
ZERO = 3 * 2.0**22
ZERO_BITS = int(np.float32(ZERO).view(np.int32))

Sums = list[Float32[Array, "rows warps places"]]  # for each vector, over the rows of all runs


class Step(NamedTuple):
    """The shared memory of a step in a thread block, and its layout."""

    bits: int  # of a code
    group: int  # columns that share a scale, or, where a row does, an exponent
    columns: int  # of all steps
    codes: Any  # a slot of the `ring`
    scales: Any  # float32 [runs, rows, groups], or None
    digits: Any  # int8 [batch, groups, group / 8, DIGITS, 8]
    units: Any  # float32 [batch, groups]: 2^e


def ring(stages: int, runs: int, rows: int, bits: int) -> Any:
    """Name the shared memory for the codes of so many steps: int8, or words of `int4.pack`."""
    dtype, columns = (jnp.int8, CHUNK) if bits == 8 else (jnp.int32, CHUNK // int4.WORD)
    return plgpu.SMEM((stages, runs, rows, columns), dtype, transforms=_transforms(bits))


def _transforms(bits: int) -> tuple[Any, ...]:
    """Layout of the codes: lines of eight rows together, each with its pieces of 16 bytes in another order."""
    line = LINE if bits == 8 else LINE // 4
    return plgpu.TilingTransform((OCTET, line)), plgpu.SwizzleTransform(LINE)  # pyright: ignore[reportAbstractUsage]


def zeros(batch: int, rows: int) -> Sums:
    """Make the sums to begin with."""
    return [plgpu.layout_cast(jnp.zeros((rows, WARPS, PLACES), jnp.float32), SUMS)] * batch


def finished(sums: Sums, runs: int, bits: int, target: Target) -> list[list[Float32[Array, " rows_of_run"]]]:
    """Add up the sums of the warps, for each vector and each run of rows."""
    return [_runs(_dots(rows, bits), runs, target) for rows in sums]


def _dots(sums, bits: int):
    place = plgpu.broadcasted_iota(jnp.int32, sums.shape, 2, layout=SUMS)
    digits = jnp.zeros_like(sums)
    for digit in range(DIGITS):
        digits = jnp.where(place == digit, sums * 2.0 ** (8 * digit - (4 if bits == 4 else 0)), digits)
    return jnp.sum(jnp.sum(digits, axis=2), axis=1)


def _runs(dots, runs: int, target: Target) -> list[Float32[Array, " rows_of_run"]]:
    """Split sums by runs, after the warps have met once to add up those of all runs."""
    if runs == 1:
        return [dots]
    shape = (len(dots) // runs,)
    if target.interpret:
        return list(dots.reshape(runs, *shape))

    def run(_, dots):
        octets = [words(register, float32()) for register in dots.registers.flat]
        return [array(some, shape, np.dtype("float32"), DOTS) for some in batched(octets, len(octets) // runs)]

    one = plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout=DOTS)
    inlined: Any = plgpu.inline_mgpu(arg_types=(DOTS,), return_type=[one] * runs)
    return list(inlined(run)(dots))


def add(sums: Sums, step: Step, target: Target) -> Sums:
    """Add a step to `sums`."""
    if target.interpret:
        return _interpreted(sums, step)
    shape = sums[0].shape

    def run(_, refs, arrays):
        numbers = [all_words(rows, float32()) for rows in arrays]
        _accumulate(numbers, step._replace(**refs), Lane.mine())
        return [array(([number] for number in mine), shape, np.dtype("float32"), SUMS) for mine in numbers]

    refs = {name: getattr(step, name) for name in ("codes", "scales", "digits", "units")}
    refs = {name: ref for name, ref in refs.items() if ref is not None}
    types = {name: plgpu.RefType(_transforms(step.bits) if name == "codes" else ()) for name in refs}
    inlined: Any = plgpu.inline_mgpu(
        arg_types=(types, [SUMS] * len(sums)),
        return_type=[plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout=SUMS)] * len(sums),
    )
    return list(inlined(run)(refs, sums))


def _interpreted(sums: Sums, step: Step) -> Sums:
    """Add a step to `sums` with whole arrays, for the interpreter."""
    rows, groups = len(sums[0]), QUARTER // step.group

    def read(ref):
        return plgpu.load(ref, layout=None)

    codes = read(step.codes)
    if step.bits == 4:
        both = lax.bitcast_convert_type(codes, jnp.int8).reshape(rows, -1, 4, int4.RUNS, 4).swapaxes(2, 3)
        codes = jnp.stack([both << 4, both & -16], axis=-2)
    codes = codes.reshape(rows, WARPS, groups, step.group).astype(jnp.int32)
    digits = jnp.moveaxis(read(step.digits), 3, 1).reshape(-1, DIGITS, WARPS, groups, step.group).astype(jnp.int32)
    dots = jnp.einsum("rwgk,bdwgk->gbrwd", codes, digits).astype(jnp.float32)
    dots = jnp.pad(dots, ((0, 0), (0, 0), (0, 0), (0, 0), (0, PLACES - DIGITS)))
    units = read(step.units).reshape(-1, WARPS, groups)
    scales = 1.0 if step.scales is None else read(step.scales).reshape(rows, WARPS, groups)
    found = []
    for b, mine in enumerate(sums):
        for group in range(groups):
            mine = mine + dots[group, b] * (units[b] * scales)[..., group, None]
        found.append(mine)
    return found


class Lane(NamedTuple):
    """Position of a thread in its warp and quad."""

    warp: Any
    quad: Any
    place: Any  # lane in its quad
    row: Any  # row of its quad, of eight rows of W

    @classmethod
    def mine(cls) -> "Lane":
        thread = utils.thread_idx()
        quad = arith.andi(arith.shrui(thread, word(2)), word(7))
        row = total(arith.shrui(quad, word(1)), times(arith.andi(quad, word(1)), 4))
        return cls(arith.shrui(thread, word(5)), quad, arith.andi(thread, word(3)), row)


def _accumulate(sums: list[list[Any]], step: Step, lane: Lane) -> None:
    """Add a thread's part of a step to its number of each octet of rows, for each vector."""
    octets = range(len(sums[0]))
    codes = [_codes(step, octet, lane) for octet in octets]
    scales = None if step.scales is None else [_scales(step, octet, lane) for octet in octets]
    zero = arith.constant(float32(), ir.FloatAttr.get(float32(), ZERO))
    for vectors in batched(range(len(sums)), 2 if step.bits == 4 and len(octets) % 2 == 0 else 1):
        units = {vector: _units(step, vector, lane) for vector in vectors}
        found = _of_one(vectors[0], codes, step, lane) if len(vectors) == 1 else _of_two(vectors, codes, step, lane)
        for vector, octet, group, integer in found:
            unit = units[vector][group]
            scale = unit if scales is None else arith.mulf(unit, scales[octet][group])
            number = arith.subf(arith.bitcast(float32(), integer), zero)
            sums[vector][octet] = math.fma(number, scale, sums[vector][octet])


# For a vector, an octet of rows and a group: their integer sum, plus the bits of ZERO.
Integers = Iterator[tuple[int, int, int, Any]]


def _of_one(vector: int, codes: list[list[Any]], step: Step, lane: Lane) -> Integers:
    """Multiply a vector by all rows, with products of both sides of an octet."""
    digits = _digits(step, vector, lane)
    products = max(1, step.group // (SIDES * SIDE))
    for first in range(0, QUARTER // (SIDES * SIDE), products):
        for octet, sides in enumerate(codes):
            c = _begin()
            for k in range(first, first + products):
                c = _product(sides[SIDES * k], sides[SIDES * k + 1], digits[k], c)
            found = c[0], c[3]
            integers = found if step.group == SIDE else [total(*found, word(-ZERO_BITS))]
            for group, integer in enumerate(integers, start=first * SIDES * SIDE // step.group):
                yield vector, octet, group, integer


def _of_two(vectors: Sequence[int], codes: list[list[Any]], step: Step, lane: Lane) -> Integers:
    """Multiply two vectors by all rows of codes of four bits, with products of one side of two octets."""
    digits = _digits_of_two(step, vectors[0], lane)
    products = step.group // SIDE
    for group in range(QUARTER // step.group):
        for both in batched(range(len(codes)), 2):
            upper, lower = (codes[octet] for octet in both)
            c = _begin()
            for k in range(group * products, (group + 1) * products):
                c = _product(upper[k], lower[k], digits[k], c)
            for (octet, vector), integer in zip(product(both, vectors), c, strict=True):
                yield vector, octet, group, integer


def _begin() -> list[Any]:
    """Make C before the products. Unused numbers get the same value, because the compiler then makes it only once."""
    return [word(ZERO_BITS)] * 4


def _product(upper: Sequence[Any], lower: Sequence[Any], digits: Sequence[Any], c: list[Any]) -> list[Any]:
    """Multiply the upper and lower rows of A by B and add C, with a lane's part of each."""
    return ptx(MMA, [upper[0], lower[0], upper[1], lower[1], *digits, *c], results=4)


def _codes(step: Step, octet: int, lane: Lane) -> list[tuple[Any, Any]]:
    """Load a lane's part of each side of its warp's columns, all of one of its rows: two words of A.

    A load of 16 bytes serves 8 lanes at a time, from two rows, one of the upper four and one of the lower four. In
    swizzled lines these are never in the same banks. A load of 8 bytes serves 16 lanes from four rows.
    """
    size = CHUNK * step.bits // 8  # bytes of a row
    wide = 16 if step.bits == 4 or _together(step) else 8  # bytes that a lane loads at once
    within = arith.xori(times(lane.place, wide), times(lane.row, LINE // OCTET))  # a line
    start = total(times(lane.warp, OCTET * size // WARPS), times(lane.row, LINE))
    found = []
    for at in range(0, size // WARPS, 4 * wide):
        lines, rest = divmod(at, LINE)
        place = total(start, arith.xori(within, word(rest)), word(OCTET * (octet * size + lines * LINE)))
        found += load(step.codes, place, int32(), wide // 4)
    if step.bits == 4:
        upper = word(0xF0F0F0F0)
        found = [arith.andi(both, upper) for one in found for both in (arith.shli(one, word(4)), one)]
    elif _together(step):
        return [side for a, b, c, d in batched(found, 4) for side in ((a, c), (b, d))]
    return list(batched(found, 2))


def _together(step: Step) -> bool:
    """Whether a lane has the codes of 16 columns of both sides side by side: those of eight bits in one group.

    Of eight codes the first four then belong to one side; otherwise all eight do.
    """
    return step.bits == 8 and step.group > SIDE


def _digits(step: Step, vector: int, lane: Lane) -> list[list[Any]]:
    """Load a lane's part of B in each product with one vector: two words of its quad's digit and side."""
    together = _together(step)
    side = times(arith.andi(lane.quad, word(1)), VECTOR // 2 if together else DIGITS * SIDE)
    start = total(_digits_start(step, vector, lane), side)
    places = [total(start, word(DIGITS * at)) for at in range(0, QUARTER, SIDES * SIDE)]
    if not together:
        return [load(step.digits, place, int32(), 2) for place in places]
    return [
        [*load(step.digits, place, int32(), 1), *load(step.digits, total(place, word(DIGITS * VECTOR)), int32(), 1)]
        for place in places
    ]


def _digits_of_two(step: Step, first: int, lane: Lane) -> list[list[Any]]:
    """Load a lane's part of B in each product with vector `first` and the next: two words of its quad's digit."""
    which = times(arith.andi(lane.quad, word(1)), DIGITS * step.columns)
    start = total(_digits_start(step, first, lane), which)
    return [load(step.digits, total(start, word(DIGITS * at)), int32(), 2) for at in range(0, QUARTER, SIDE)]


def _digits_start(step: Step, vector: int, lane: Lane) -> Any:
    """Find the start of a lane's columns in the digit of its quad."""
    digit = arith.minui(arith.shrui(lane.quad, word(1)), word(DIGITS - 1))
    start = total(word(vector * DIGITS * step.columns), times(lane.warp, DIGITS * QUARTER), times(digit, VECTOR))
    return total(start, times(lane.place, DIGITS * VECTOR * (2 if _together(step) else 1)))


def _scales(step: Step, octet: int, lane: Lane) -> list[Any]:
    """Load the scales of one of a lane's rows, for each group of its warp."""
    groups = QUARTER // step.group
    at = total(times(lane.row, 4 * WARPS * groups), times(lane.warp, 4 * groups))
    return load(step.scales, total(at, word(4 * OCTET * WARPS * groups * octet)), float32(), groups)


def _units(step: Step, vector: int, lane: Lane) -> list[Any]:
    """Load the 2^e of a vector, for each group of a lane's warp."""
    groups = QUARTER // step.group
    row = word(vector * 4 * step.columns // step.group)
    return load(step.units, total(row, times(lane.warp, 4 * groups)), float32(), groups)
