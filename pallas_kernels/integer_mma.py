r"""A step of a product with codes on the tensor cores' integers: sums are exact, and each group costs one rounding.

    y_rb += sum_g s_rg 2^e_bg sum_d 256^d sum_(k in g) q_rk x_dbk

x_dbk are the digits of vector b, whose exponents are e_bg (`fixed_point.py`): integers of 8 bits, as the codes q are.

`mma.m16n8k32` multiplies A [16, 32] by B [32, 8] and adds C [16, 8], in 32 bits. A warp is 8 quads of 4 lanes. Quad i
has rows i and i + 8 of A and column i of B; of each of them lane j has 8 of the 32 terms, whichever, as long as they
are the same in A and in B. Of C it has columns 2 j and 2 j + 1 of both rows. So rows of W are rows of A as they lie in
memory, and the digits of two vectors are columns 0 to 2 and 4 to 6 of B; what becomes of the columns beside them nobody
looks at.

Codes of four bits are the upper halves of bytes, and so 16 times as large (`int4.py`), which `finished` takes back.

C begins with the bits of 3 2^22 as a float, and a sum of integers that is less than 2^22 is then added to that float as
well: to take 3 2^22 away is exact, and eight times as fast as an instruction that converts. 128 products of 8 bits are
at most 2^21.

The four warps of a thread block multiply a quarter of the step's columns each, and meet in `finished`.
"""

from itertools import batched, chain
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math
from jaxtyping import Array, Float32

from pallas_kernels import int4
from pallas_kernels.compat import WARPS, Target, tiled_layout
from pallas_kernels.fixed_point import DIGITS, VECTOR
from pallas_kernels.inline import array, float32, int32, load, ptx, times, total, word, words

CHUNK = 1024  # columns of a step
QUARTER = CHUNK // WARPS
TERMS = 32  # of a product
COLUMNS = 8
PAIR = 2  # vectors that share a product
LINE = 128  # bytes of a row that lie together
OCTET = 8  # rows

# Of eight rows quad i has row i / 2, or, where i is odd, 4 + i / 2: for which see `_codes`.
SUMS = tiled_layout(((OCTET, WARPS, COLUMNS), (OCTET // 2, 1, COLUMNS), (1, 1, 2)), warps=-8, lanes=(-6, -9, -4))

MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
ZERO = 3 * 2.0**22

Sums = list[list[Float32[Array, "rows warps columns"]]]  # of each two vectors, for each run of rows


class Step(NamedTuple):
    """What a thread block has of a step in shared memory, and how it lies."""

    bits: int  # of a code
    group: int  # columns that share a scale, or, where a row does, an exponent
    columns: int  # of all steps
    codes: Any  # a slot of the `ring`
    scales: Any  # float32 [runs, rows, groups], or None
    digits: Any  # int8 [batch, groups, group / 8, DIGITS, 8]
    units: Any  # float32 [batch, groups]: 2^e


def ring(stages: int, runs: int, rows: int, bits: int) -> Any:
    """Shared memory for the codes of so many steps: int8, or words of `int4.pack`."""
    dtype, columns = (jnp.int8, CHUNK) if bits == 8 else (jnp.int32, CHUNK // int4.WORD)
    return plgpu.SMEM((stages, runs, rows, columns), dtype, transforms=_transforms(bits))


def _transforms(bits: int) -> tuple[Any, ...]:
    """How codes lie: lines of eight rows together, and in each the pieces of 16 bytes in another order."""
    line = LINE if bits == 8 else LINE // 4
    return plgpu.TilingTransform((OCTET, line)), plgpu.SwizzleTransform(LINE)  # pyright: ignore[reportAbstractUsage]


def zeros(batch: int, runs: int, rows: int) -> Sums:
    """Sums to begin with."""
    zero = plgpu.layout_cast(jnp.zeros((rows, WARPS, COLUMNS), jnp.float32), SUMS)
    return [[zero] * runs for _ in range(0, batch, PAIR)]


def finished(sums: Sums, batch: int, bits: int) -> list[list[Float32[Array, " rows"]]]:
    """What sums come to, for each vector, for each run of rows."""
    return [[_dot(run, b % PAIR, bits) for run in sums[b // PAIR]] for b in range(batch)]


def _dot(sums, which: int, bits: int):
    place = plgpu.broadcasted_iota(jnp.int32, sums.shape, 2, layout=SUMS) - COLUMNS // PAIR * which
    digits = jnp.zeros_like(sums)
    for digit in range(DIGITS):
        digits = jnp.where(place == digit, sums * 2.0 ** (8 * digit - (4 if bits == 4 else 0)), digits)
    return jnp.sum(jnp.sum(digits, axis=2), axis=1)


def add(sums: Sums, step: Step, target: Target) -> Sums:
    """`sums` and what a step adds to them."""
    if target.interpret:
        return _interpreted(sums, step)
    runs, shape, batch = len(sums[0]), sums[0][0].shape, step.units.shape[0]
    flat = [run for runs in sums for run in runs]

    def run(_, refs, arrays):
        octets = [words(register, float32()) for each in arrays for register in each.registers.flat]
        of_a_pair, of_a_run = runs * shape[0] // OCTET, shape[0] // OCTET
        sums = [list(some) for some in batched(octets, of_a_pair)]
        _accumulate(sums, batch, step._replace(**refs), Lane.mine())
        return [array(some, shape, np.dtype("float32"), SUMS) for some in batched(chain(*sums), of_a_run)]

    refs = {name: getattr(step, name) for name in ("codes", "scales", "digits", "units")}
    refs = {name: ref for name, ref in refs.items() if ref is not None}
    types = {name: plgpu.RefType(_transforms(step.bits) if name == "codes" else ()) for name in refs}
    inlined: Any = plgpu.inline_mgpu(
        arg_types=(types, [SUMS] * len(flat)),
        return_type=[plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout=SUMS) for _ in flat],
    )
    found = inlined(run)(refs, flat)
    return [list(found[i : i + runs]) for i in range(0, len(found), runs)]


def _interpreted(sums: Sums, step: Step) -> Sums:
    """The same, of whole arrays."""
    runs, rows = step.codes.shape[:2]
    groups = QUARTER // step.group

    def read(ref):
        return plgpu.load(ref, layout=None)

    codes = read(step.codes)
    if step.bits == 4:
        both = lax.bitcast_convert_type(codes, jnp.int8).reshape(runs, rows, -1, 4, int4.RUNS, 4).swapaxes(3, 4)
        codes = jnp.stack([both << 4, both & -16], axis=-2)
    codes = codes.reshape(runs, rows, WARPS, groups, step.group).astype(jnp.int32)
    digits = jnp.moveaxis(read(step.digits), 3, 1).reshape(-1, DIGITS, WARPS, groups, step.group).astype(jnp.int32)
    dots = jnp.einsum("nrwgk,bdwgk->gbnrwd", codes, digits).astype(jnp.float32)
    units = read(step.units).reshape(-1, WARPS, groups)
    scales = 1.0 if step.scales is None else read(step.scales).reshape(runs, rows, WARPS, groups)
    found = []
    for pair, arrays in enumerate(sums):
        for group in range(groups):
            factors = (units[:, None, None] * scales)[..., group, None]
            mine = (dots[group] * factors)[PAIR * pair : PAIR * (pair + 1)]
            beside = COLUMNS // PAIR - DIGITS
            mine = jnp.pad(mine, ((0, PAIR - len(mine)), (0, 0), (0, 0), (0, 0), (0, beside)))
            both = jnp.moveaxis(mine, 0, -2).reshape(runs, rows, WARPS, COLUMNS)
            arrays = [array + run for array, run in zip(arrays, both, strict=True)]
        found.append(arrays)
    return found


class Lane(NamedTuple):
    """Where a thread is."""

    warp: Any
    quad: Any
    place: Any  # in its quad
    row: Any  # of eight rows of W, that its quad has

    @classmethod
    def mine(cls) -> "Lane":
        thread = utils.thread_idx()
        quad = arith.andi(arith.shrui(thread, word(2)), word(7))
        row = total(arith.shrui(quad, word(1)), times(arith.andi(quad, word(1)), 4))
        return cls(arith.shrui(thread, word(5)), quad, arith.andi(thread, word(3)), row)


def _accumulate(sums: list[list[list[Any]]], batch: int, step: Step, lane: Lane) -> None:
    """Add what a thread has of a step to its two numbers of each octet of rows, for each two vectors.

    Two octets share a product; the last of an odd number has one to itself.
    """
    octets = len(sums[0])
    groups, products = QUARTER // step.group, step.group // TERMS
    codes = [_codes(step, octet, lane) for octet in range(octets)]
    scales = None if step.scales is None else [_scales(step, octet, lane) for octet in range(octets)]
    nothing = [(word(0), word(0))] * (QUARTER // TERMS)
    zero = arith.constant(float32(), ir.FloatAttr.get(float32(), ZERO))
    begin = [word(int(np.float32(ZERO).view(np.int32)))] * 4
    for first, mine in zip(range(0, batch, PAIR), sums, strict=True):
        vectors = range(first, min(first + PAIR, batch))
        digits, units = _digits(step, vectors, lane), _units(step, vectors, lane)
        for group in range(groups):
            for octet in range(0, octets, 2):
                both = [*codes[octet : octet + 2], nothing][:2]
                c = begin
                for k in range(group * products, (group + 1) * products):
                    (a0, a2), (a1, a3) = (rows[k] for rows in both)
                    c = ptx(MMA, [a0, a1, a2, a3, *digits[k], *c], results=4)
                for o, some in zip(range(octet, octets), (c[:2], c[2:]), strict=False):
                    scale = units[group] if scales is None else arith.mulf(units[group], scales[o][group])
                    floats = [arith.subf(arith.bitcast(float32(), integer), zero) for integer in some]
                    mine[o] = [math.fma(x, scale, y) for x, y in zip(floats, mine[o], strict=True)]


def _codes(step: Step, octet: int, lane: Lane) -> list[tuple[Any, Any]]:
    """What a lane has of A in each product of its warp, of one of its rows: two words.

    A load takes 8 lanes at a time. Of 16 bytes each has them from two rows, one of the upper four and one of the lower:
    where lines are swizzled these are never in the same banks. Of 8 bytes 16 lanes have them from four rows, two by two
    in the same.
    """
    size = CHUNK * step.bits // 8  # bytes of a row
    wide = 16 if step.bits == 4 or step.group > TERMS else 8  # bytes that a lane loads at once
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
    return list(zip(found[::2], found[1::2], strict=True))


def _digits(step: Step, vectors: range, lane: Lane) -> list[list[Any]]:
    """What a lane has of B in each product of its warp: two words of the digit that its quad has."""
    which = arith.minui(arith.shrui(lane.quad, word(2)), word(len(vectors) - 1))
    digit = arith.minui(arith.andi(lane.quad, word(3)), word(DIGITS - 1))
    start = total(
        times(total(which, word(vectors.start)), DIGITS * step.columns),
        times(lane.warp, DIGITS * QUARTER),
        times(digit, VECTOR),
    )
    # The columns whose codes it has: 16 side by side of int8, for two products, 8 where a load has no more.
    beside = 2 if step.bits == 8 and step.group > TERMS else 1
    start = total(start, times(lane.place, DIGITS * VECTOR * beside))
    columns = [at + VECTOR * half for at in range(0, QUARTER, TERMS * beside) for half in range(beside)]
    return [load(step.digits, total(start, word(DIGITS * column)), int32(), 2) for column in columns]


def _scales(step: Step, octet: int, lane: Lane) -> list[Any]:
    """Those of one of a lane's rows, for each group of its warp."""
    groups = QUARTER // step.group
    at = total(times(lane.row, 4 * WARPS * groups), times(lane.warp, 4 * groups))
    return load(step.scales, total(at, word(4 * OCTET * WARPS * groups * octet)), float32(), groups)


def _units(step: Step, vectors: range, lane: Lane) -> list[Any]:
    """Of the vector whose columns of C a lane has, for each group of its warp."""
    groups = QUARTER // step.group
    which = arith.minui(arith.shrui(lane.place, word(1)), word(len(vectors) - 1))
    row = times(total(which, word(vectors.start)), 4 * step.columns // step.group)
    return load(step.units, total(row, times(lane.warp, 4 * groups)), float32(), groups)
