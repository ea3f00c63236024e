"""The integer tensor-core code of one thread block, run in NumPy with emulated PTX instructions.

The interpreter has neither these instructions nor the layouts of shared memory. Here an array holds one 32-bit word for
each of 128 threads, and arithmetic is NumPy's. The emulated instructions follow the PTX ISA: `prmt.b32`, `lop3.b32`,
`add.bf16x2`, and `mma.m16n8k32` and `mma.m16n8k16` for 8-bit integers. For `wgmma.m64nNk16`, we check only the layout
of operand A in the threads' registers.
"""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.pallas_kernels.parts import decoded_codes, fixed_point, inline, int4, integer_mma, low_bits
from llamaspec.pallas_kernels.parts.compat import THREADS
from llamaspec.pallas_kernels.parts.integer_mma import CHUNK, DIGITS, WARPS, Lane, StepMemory
from llamaspec.pallas_kernels.parts.levels import Levels

ARITH = SimpleNamespace(
    addi=np.add,
    andi=np.bitwise_and,
    ori=np.bitwise_or,
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
    """Load `count` 32-bit words per thread from an array of bytes. Addresses must be multiples of 4, 8 or 16 bytes."""
    assert not np.any(at % (4 * min(count, 4)))
    return [
        np.stack([ref[first + 4 * i : first + 4 * i + 4] for first in at.astype(int)]).view(kind)[:, 0]
        for i in range(count)
    ]


def ptx(instruction: str, operands: list[np.ndarray], *, results: int) -> list[np.ndarray]:
    if instruction.startswith("prmt.b32"):
        last = instruction.rstrip(";").rsplit(" ", 1)[1]
        order = operands.pop() if last == "$3" else word(int(last))
        assert not np.any(order & 0x8888)  # the upper bit of a selector would replicate signs
        eight = np.stack(operands, axis=-1).view(np.uint8)
        result = np.stack(
            [np.take_along_axis(eight, (order >> 4 * i & 7)[:, None], 1)[:, 0] for i in range(4)], axis=-1
        )
        return [np.ascontiguousarray(result).view(np.uint32)[:, 0]]
    if instruction.startswith("lop3.b32"):
        table, result = int(instruction.rstrip(";").rsplit(" ", 1)[1], 16), word(0)
        for bits in range(8):  # add each combination of a, b and c for which the table has a 1
            if table >> bits & 1:
                a, b, c = (x if bits >> 2 - i & 1 else ~x for i, x in enumerate(operands))
                result |= a & b & c
        return [result]
    if instruction.startswith("add.rn.bf16x2"):
        first_term, second_term = (x.view(jnp.bfloat16).astype(np.float32) for x in operands)
        return [(first_term + second_term).astype(jnp.bfloat16).view(np.uint32)]
    shape = re.match(r"mma\.sync\.aligned\.m16n8k(16|32)\.row\.col\.s32\.([su]8)\.s8\.s32 ", instruction)
    assert shape and results == 4
    halves, kind = int(shape[1]) // 16, {"s": np.int8, "u": np.uint8}[shape[2][0]]
    assert len(re.findall(r"\$\d+", instruction)) == 4 + len(operands) == 8 + 3 * halves
    *ab, c0, c1, c2, c3 = operands
    parts = [x.view(kind).reshape(WARPS, 8, 4, 4).astype(np.int32) for x in ab[: 2 * halves]]
    a = np.zeros((WARPS, 16, halves, 4, 4), np.int32)  # [warps, rows, halves of the terms, threads of a group, 4]
    for half in range(halves):
        a[:, :8, half], a[:, 8:, half] = parts[2 * half : 2 * half + 2]
    b = [x.view(np.int8).reshape(WARPS, 8, 4, 4).astype(np.int32) for x in ab[2 * halves :]]
    b = np.stack(b, axis=2)  # [warps, columns, halves, threads, 4]
    c = np.concatenate([np.stack(x, axis=-1).view(np.int32).reshape(WARPS, 8, 4, 2) for x in ((c0, c1), (c2, c3))], 1)
    d = np.einsum("wrhtf,wchtf->wrc", a, b) + c.reshape(WARPS, 16, 8)
    d = d.reshape(WARPS, 2, 8, 4, 2)
    return [np.ascontiguousarray(d[:, half, :, :, i]).ravel().view(np.uint32) for half in (0, 1) for i in (0, 1)]


@pytest.fixture
def threads(monkeypatch):
    """Patch the kernel's modules so that they compute with NumPy instead of emitting PTX instructions."""
    for name, value in {
        "arith": ARITH,
        "word": word,
        "ptx": ptx,
        "times": lambda x, factor: x * np.uint32(factor),
        "total": lambda *x: sum(x[1:], x[0]),
        "load": load,
        "int32": lambda: np.uint32,
        "float32": lambda: np.float32,
        "ir": SimpleNamespace(FloatAttr=SimpleNamespace(get=lambda kind, x: x)),
        "math": SimpleNamespace(fma=lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32)),
        "utils": SimpleNamespace(thread_idx=lambda: np.arange(THREADS, dtype=np.uint32)),
    }.items():
        for module in (integer_mma, decoded_codes, low_bits, inline, fixed_point):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def in_lines(rows: np.ndarray, line: int = 128) -> np.ndarray:
    """Arrange rows of bytes in shared memory as TMA does: eight rows at a time, in lines of swizzled 16-byte pieces.

    A line has 32, 64 or 128 bytes. The place of a piece in its line is its index XOR s. Here s is the number of whole
    128-byte segments before the line in its tile, modulo the pieces of a line (CUDA driver API, CU_TENSOR_MAP_SWIZZLE).
    """
    octets, pieces = len(rows) // 8, line // 16
    tiles = rows.reshape(octets, 8, -1, pieces, 16).swapaxes(1, 2)  # [octets, lines of a row, rows, pieces, bytes]
    order = np.arange(pieces) ^ (np.arange(8)[:, None] * line // 128) % pieces  # source piece for each place in a row
    swizzled = np.stack([tiles[:, :, row, order[row]] for row in range(8)], axis=2)
    return np.ascontiguousarray(swizzled).ravel().view(np.uint8)


@pytest.mark.sampled(60)  # 460 cases, 9 s
@pytest.mark.parametrize(("batch", "turn"), [(1, 1), (1, 2), (2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize(("runs", "rows"), [(1, 8), (2, 8), (1, 16), (2, 16)])
@pytest.mark.parametrize(
    ("bits", "group", "form"),
    [
        (8, None, "signed"),
        *((bits, group, form) for bits in (8, 4) for group in (16, 32, 64, 128) for form in ("signed", "minima")),
        *((bits, group, form) for bits in (6, 5) for group in (16, 32) for form in ("signed", "minima")),
        *((4, group, form) for group in (32, 64, 128) for form in ("one plane", "three planes")),
    ],
)
def test_threads_multiply_what_belongs_together(threads, bits, group, form, runs, rows, batch, turn):
    """In each of three steps, threads multiply codes by a vector's digits of the same columns, and by the right scales.

    Digits are the bytes of a fixed-point number. A scale belongs to a group of weights or of the vector. The last of
    the four threads (a quad) that hold a row's sums adds the minima times the sums of the vector. The last step reads
    nothing beyond the ends of the arrays.
    """
    rng = np.random.default_rng(bits * rows + batch)
    minima, levels = form == "minima", None
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (runs * rows, CHUNK)).astype(np.int8)
    multiplied, stored, low_words = codes.astype(np.int64) * 2 ** (8 - bits), codes, None
    if bits < 8:
        unsigned = codes.view(np.uint8) & (1 << bits) - 1
        if minima:
            multiplied = 2 ** (8 - bits) * unsigned.astype(np.int64)
        elif form != "signed":
            most = 127 if form == "one plane" else 2**22
            levels = Levels(tuple(rng.integers(-most, most, 16).tolist()), 1.0, group)
            assert len(levels.planes) == (1 if form == "one plane" else 3)
            multiplied = np.array(levels.integers)[unsigned]
        order = int4.order_of(group, levels=levels is not None)
        if bits == 4:
            stored = int4.packed(unsigned, order).view(np.int8)
        else:
            stored, low_words = (part.view(np.int8) for part in int4.packed_apart(unsigned, order, bits=bits))
    columns, width = 3 * CHUNK, group or 128
    digits = rng.integers(-128, 128, (batch, columns // 8, DIGITS, 8)).astype(np.int8)
    units = rng.uniform(1, 2, (batch, 1 + minima, columns // width)).astype(np.float32)
    scales = rng.uniform(1, 2, (1 + minima, runs * rows, CHUNK // width)).astype(np.float32) if group else None
    first = turn * (CHUNK // width)
    step = StepMemory(
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
        low_bits=None if low_words is None else in_lines(low_words, CHUNK // WARPS * (bits - 4) // 8),
    )
    octets, lane = runs * rows // 8, Lane.of_thread()
    zero = np.zeros(THREADS, np.float32)
    sums = [[zero] * octets for _ in range(batch)]
    integer_mma._accumulate(sums, step, lane)

    vectors = (
        digits[:, turn * CHUNK // 8 : (turn + 1) * CHUNK // 8]
        .swapaxes(2, 3)
        .reshape(batch, WARPS, -1, width, DIGITS)
        .astype(np.int64)
    )
    grouped = multiplied.reshape(runs * rows, WARPS, -1, width)
    dots = np.einsum("rwgk,bwgkd->brwgd", grouped, vectors).astype(np.float64)
    units = units[..., first : first + CHUNK // width].reshape(batch, -1, 1, WARPS, CHUNK // width // WARPS, 1)
    dots *= units[:, 0]
    if scales is not None:
        scales = scales.reshape(-1, runs * rows, WARPS, CHUNK // width // WARPS, 1)
        dots *= scales[0]
    if minima and scales is not None:
        dots = np.concatenate([dots, units[:, 1] * scales[1]], axis=-1)
    expected = dots.sum(axis=3)  # [batch, rows, warps, digits and minima]
    size = np.abs(dots).sum(axis=3) * (1 if levels is None else 4)
    digit = lane.place.astype(int)
    looked_at = digit < DIGITS + minima
    for b, octets_of_one in enumerate(sums):
        for octet, octet_sums in enumerate(octets_of_one):
            rows_of_threads = 8 * octet + lane.row.astype(int)
            at = (b, rows_of_threads[looked_at], lane.warp.astype(int)[looked_at], digit[looked_at])
            assert np.all(np.abs(octet_sums[looked_at] - expected[at]) <= 2.0**-20 * size[at])


@pytest.mark.parametrize(
    ("bits", "octets", "batch", "products"),
    [(4, 2, 1, 8), (4, 2, 2, 8), (4, 2, 3, 16), (4, 2, 4, 16), (4, 1, 2, 8), (4, 3, 2, 24), (8, 2, 2, 16)],
)
def test_two_vectors_by_codes_of_four_bits_share_products(threads, monkeypatch, bits, octets, batch, products):
    """With 4-bit codes, two vectors share their mma instructions if the number of 8-row groups is even.

    Otherwise each vector needs four mma instructions per 8 rows.
    """
    instructions = []
    monkeypatch.setattr(
        integer_mma, "ptx", lambda *some, results: (instructions.append(some[0]), ptx(*some, results=results))[1]
    )
    codes = np.zeros(octets * 8 * CHUNK * bits // 8, np.uint8)
    numbers = np.zeros(batch * CHUNK, np.float32)
    digits = np.zeros(batch * DIGITS * CHUNK, np.uint8)
    step = StepMemory(bits, 8 * octets, 64, CHUNK, codes, None, digits, numbers.view(np.uint8))
    integer_mma._accumulate([[np.zeros(THREADS, np.float32)] * octets for _ in range(batch)], step, Lane.of_thread())
    assert len(instructions) == products


def test_the_digits_of_four_numbers_are_put_side_by_side(threads):
    rng = np.random.default_rng(0)
    n = np.concatenate(
        [rng.integers(-(2**21), 2**21 + 1, (4, THREADS - 4)), np.full((4, 4), [-(2**21), 2**21, 0, -1])], 1
    )
    shifted = (n + fixed_point.SHIFTED).astype(np.float32).view(np.uint32)
    digits = [x.view(np.int8).reshape(THREADS, 4).T.astype(int) for x in fixed_point._transposed(*shifted)]
    np.testing.assert_array_equal(sum(digit * 256**place for place, digit in enumerate(digits)), n)


@pytest.mark.parametrize(("first", "count"), [(0, 256), (64, 64), (160, 32)])
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize(
    ("bits", "run"), [(8, 32), (8, 16), (4, 32), *((bits, run) for bits in (6, 5) for run in (32, 16))]
)
def test_threads_decode_codes_in_the_order_of_vectors(threads, bits, run, unsigned, first, count):
    """Each thread decodes its codes of `wgmma`'s operand A, which are four of every 16 columns in two rows."""
    if bits == 8 and unsigned:
        return
    rng = np.random.default_rng(bits)
    plain_codes = rng.integers(0, 1 << bits, (64, 512)).astype(np.uint8)
    order = "bytes" if run == 32 else "halves"
    stored, least = (plain_codes if bits == 8 else int4.packed(plain_codes, order)), None
    if bits in (6, 5):
        stored, least = int4.packed_apart(plain_codes, order, bits=bits)
        least = in_lines(least.view(np.uint8), 32 * (bits - 4))
    codes = decoded_codes.StagedCodes(bits, unsigned, 512, run, in_lines(stored.view(np.uint8)), least)
    lane = decoded_codes.RowLane.of_thread()
    expected = plain_codes.astype(int) if unsigned else np.asarray(int4.signed(plain_codes.astype(int), bits))
    expected = np.asarray(decoded_codes.in_order(jnp.asarray(expected, jnp.float32), run))
    for half in range(2):
        registers = decoded_codes._columns(codes, lane, half, first, count)
        assert len(registers) == count // 8
        rows = (16 * lane.warp + 8 * half + lane.row).astype(int)
        for eight, register in enumerate(registers):
            columns = first + 8 * eight + 2 * lane.place.astype(int)
            pair = register.view(jnp.bfloat16).astype(np.float32).reshape(-1, 2)
            np.testing.assert_array_equal(pair, np.stack([expected[rows, columns + i] for i in range(2)], axis=-1))
