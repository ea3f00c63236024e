"""Work of a block's threads on registers, in NumPy by PTX's definitions: arrays hold a number for each thread.

The interpreter has neither these instructions nor the layouts of shared memory. Here an array has a word of each of 128
threads, arithmetic is NumPy's, and the instructions follow the PTX ISA: `prmt.b32`, and the fragments of `mma.m16n8k32`
and `mma.m16n8k16` for 8-bit integers.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from pallas_kernels.parts import fixed_point, int4, integer_mma
from pallas_kernels.parts.compat import THREADS
from pallas_kernels.parts.integer_mma import CHUNK, DIGITS, WARPS, Lane, Step
from pallas_kernels.parts.levels import Levels

ARITH = SimpleNamespace(
    addi=np.add,
    andi=np.bitwise_and,
    xori=np.bitwise_xor,
    shli=np.left_shift,
    shrui=np.right_shift,
    minui=np.minimum,
    mulf=np.multiply,
    subf=np.subtract,
    bitcast=lambda kind, x: x.view(kind),
    constant=lambda kind, x: kind(x),
)


def word(value: int) -> np.ndarray:
    return np.full(THREADS, value & 0xFFFFFFFF, np.uint32)


def load(ref: np.ndarray, at: np.ndarray, kind, count: int) -> list[np.ndarray]:
    """Load words from bytes; a load of several words must be aligned."""
    assert not np.any(at % (4 * min(count, 4)))
    return [
        np.stack([ref[first + 4 * i : first + 4 * i + 4] for first in at.astype(int)]).view(kind)[:, 0]
        for i in range(count)
    ]


def ptx(instruction: str, operands: list[np.ndarray], *, results: int) -> list[np.ndarray]:
    if instruction.startswith("prmt.b32"):
        last = instruction.rstrip(";").rsplit(" ", 1)[1]
        order = operands.pop() if last == "$3" else word(int(last))
        assert not np.any(order & 0x8888)  # an upper bit would ask for a sign
        eight = np.stack(operands, axis=-1).view(np.uint8)
        found = np.stack([np.take_along_axis(eight, (order >> 4 * i & 7)[:, None], 1)[:, 0] for i in range(4)], axis=-1)
        return [np.ascontiguousarray(found).view(np.uint32)[:, 0]]
    shape = re.match(r"mma\.sync\.aligned\.m16n8k(16|32)\.row\.col\.s32\.([su]8)\.s8\.s32 ", instruction)
    assert shape and results == 4
    halves, kind = int(shape[1]) // 16, {"s": np.int8, "u": np.uint8}[shape[2][0]]
    assert len(re.findall(r"\$\d+", instruction)) == 4 + len(operands) == 8 + 3 * halves
    *ab, c0, c1, c2, c3 = operands
    parts = [x.view(kind).reshape(WARPS, 8, 4, 4).astype(np.int32) for x in ab[: 2 * halves]]
    a = np.zeros((WARPS, 16, halves, 4, 4), np.int32)  # warps, rows, halves of the terms, threads of a group, four each
    for half in range(halves):
        a[:, :8, half], a[:, 8:, half] = parts[2 * half : 2 * half + 2]
    b = [x.view(np.int8).reshape(WARPS, 8, 4, 4).astype(np.int32) for x in ab[2 * halves :]]
    b = np.stack(b, axis=2)  # warps, columns, halves, threads, four each
    c = np.concatenate([np.stack(x, axis=-1).view(np.int32).reshape(WARPS, 8, 4, 2) for x in ((c0, c1), (c2, c3))], 1)
    d = np.einsum("wrhtf,wchtf->wrc", a, b) + c.reshape(WARPS, 16, 8)
    d = d.reshape(WARPS, 2, 8, 4, 2)
    return [np.ascontiguousarray(d[:, half, :, :, i]).ravel().view(np.uint32) for half in (0, 1) for i in (0, 1)]


@pytest.fixture
def threads(monkeypatch):
    """Patch both modules to compute with NumPy where they would emit instructions."""
    for module in (integer_mma, fixed_point):
        for name, value in (("arith", ARITH), ("word", word), ("ptx", ptx)):
            monkeypatch.setattr(module, name, value)
    for name, value in {
        "times": lambda x, factor: x * np.uint32(factor),
        "total": lambda *x: sum(x[1:], x[0]),
        "load": load,
        "int32": lambda: np.uint32,
        "float32": lambda: np.float32,
        "ir": SimpleNamespace(FloatAttr=SimpleNamespace(get=lambda kind, x: x)),
        "math": SimpleNamespace(fma=lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32)),
        "utils": SimpleNamespace(thread_idx=lambda: np.arange(THREADS, dtype=np.uint32)),
    }.items():
        monkeypatch.setattr(integer_mma, name, value)


def in_lines(rows: np.ndarray) -> np.ndarray:
    """Arrange bytes of rows as the copy engine does: lines of eight rows together, pieces of 16 bytes swizzled."""
    octets, pieces = len(rows) // 8, rows.shape[1] // 16
    lines = rows.reshape(octets, 8, pieces // 8, 8, 16)
    order = np.arange(8) ^ np.arange(8)[:, None]  # of a row, which piece is where
    swizzled = np.stack([lines[:, row][:, :, order[row]] for row in range(8)], axis=2)
    return np.ascontiguousarray(swizzled).ravel().view(np.uint8)


@pytest.mark.parametrize(("batch", "turn"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize(("runs", "rows"), [(1, 8), (2, 8), (1, 16), (2, 16)])
@pytest.mark.parametrize(
    ("bits", "group", "form"),
    [
        (8, None, "signed"),
        *((bits, group, form) for bits in (8, 4) for group in (16, 32, 64, 128) for form in ("signed", "minima")),
        *((4, group, form) for group in (32, 64, 128) for form in ("one plane", "three planes")),
    ],
)
def test_threads_multiply_what_belongs_together(threads, bits, group, form, runs, rows, batch, turn):
    """Multiply every code by the digits of its column, scaled by its row's group and its vector's, in each of 3 steps.

    Lane 3 adds the minima times the sums. The last step reads nothing beyond the end.
    """
    rng = np.random.default_rng(bits * rows + batch)
    minima, levels = form == "minima", None
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (runs * rows, CHUNK)).astype(np.int8)
    multiplied, stored = codes.astype(np.int64) * (16 if bits == 4 else 1), codes
    if bits == 4:
        unsigned = codes & 15
        if minima:
            multiplied = 16 * unsigned.astype(np.int64)
        elif form != "signed":
            most = 127 if form == "one plane" else 2**22
            levels = Levels(tuple(rng.integers(-most, most, 16).tolist()), 1.0, group)
            assert len(levels.planes) == (1 if form == "one plane" else 3)
            multiplied = np.array(levels.integers)[unsigned]
        order = int4.order_of(group, levels=levels is not None)
        stored = int4.pack(unsigned, order, lowest=0).view(np.int8)
    columns, width = 3 * CHUNK, group or 128
    digits = rng.integers(-128, 128, (batch, columns // 8, DIGITS, 8)).astype(np.int8)
    units = rng.uniform(1, 2, (batch, 1 + minima, columns // width)).astype(np.float32)
    scales = rng.uniform(1, 2, (1 + minima, runs * rows, CHUNK // width)).astype(np.float32) if group else None
    first = turn * (CHUNK // width)
    step = Step(
        bits=bits,
        rows=runs * rows,
        group=width,
        columns=columns,
        codes=in_lines(stored),
        scales=None if scales is None else scales.ravel().view(np.uint8),
        digits=digits.ravel().view(np.uint8)[turn * CHUNK * DIGITS :],
        units=units.ravel().view(np.uint8)[4 * first :],
        minima=minima,
        levels=levels,
    )
    octets, lane = runs * rows // 8, Lane.mine()
    zero = np.zeros(THREADS, np.float32)
    sums = [[zero] * octets for _ in range(batch)]
    integer_mma._accumulate(sums, step, lane)

    mine = (
        digits[:, turn * CHUNK // 8 : (turn + 1) * CHUNK // 8]
        .swapaxes(2, 3)
        .reshape(batch, WARPS, -1, width, DIGITS)
        .astype(np.int64)
    )
    grouped = multiplied.reshape(runs * rows, WARPS, -1, width)
    dots = np.einsum("rwgk,bwgkd->brwgd", grouped, mine).astype(np.float64)
    units = units[..., first : first + CHUNK // width].reshape(batch, -1, 1, WARPS, CHUNK // width // WARPS, 1)
    dots *= units[:, 0]
    if scales is not None:
        scales = scales.reshape(-1, runs * rows, WARPS, CHUNK // width // WARPS, 1)
        dots *= scales[0]
    if minima and scales is not None:
        dots = np.concatenate([dots, units[:, 1] * scales[1]], axis=-1)
    expected = dots.sum(axis=3)  # batch, rows, warps, digits and minima
    size = np.abs(dots).sum(axis=3) * (1 if levels is None else 4)
    digit = lane.place.astype(int)
    looked_at = digit < DIGITS + minima
    for b, octets_of_one in enumerate(sums):
        for octet, found in enumerate(octets_of_one):
            rows_of_threads = 8 * octet + lane.row.astype(int)
            at = (b, rows_of_threads[looked_at], lane.warp.astype(int)[looked_at], digit[looked_at])
            assert np.all(np.abs(found[looked_at] - expected[at]) <= 2.0**-20 * size[at])


@pytest.mark.parametrize(
    ("bits", "octets", "batch", "products"),
    [(4, 2, 1, 8), (4, 2, 2, 8), (4, 2, 3, 16), (4, 2, 4, 16), (4, 1, 2, 8), (4, 3, 2, 24), (8, 2, 2, 16)],
)
def test_two_vectors_by_codes_of_four_bits_share_products(threads, monkeypatch, bits, octets, batch, products):
    """With an even number of octets of rows vectors share products; otherwise each has four for each octet."""
    asked = []
    monkeypatch.setattr(
        integer_mma, "ptx", lambda *some, results: (asked.append(some[0]), ptx(*some, results=results))[1]
    )
    codes = np.zeros(octets * 8 * CHUNK * bits // 8, np.uint8)
    numbers = np.zeros(batch * CHUNK, np.float32)
    digits = np.zeros(batch * DIGITS * CHUNK, np.uint8)
    step = Step(bits, 8 * octets, 64, CHUNK, codes, None, digits, numbers.view(np.uint8))
    integer_mma._accumulate([[np.zeros(THREADS, np.float32)] * octets for _ in range(batch)], step, Lane.mine())
    assert len(asked) == products


def test_the_digits_of_four_numbers_are_put_side_by_side(threads):
    rng = np.random.default_rng(0)
    n = np.concatenate(
        [rng.integers(-(2**21), 2**21 + 1, (4, THREADS - 4)), np.full((4, 4), [-(2**21), 2**21, 0, -1])], 1
    )
    shifted = (n + fixed_point.SHIFTED).astype(np.float32).view(np.uint32)
    digits = [x.view(np.int8).reshape(THREADS, 4).T.astype(int) for x in fixed_point._transposed(*shifted)]
    np.testing.assert_array_equal(sum(digit * 256**place for place, digit in enumerate(digits)), n)
