"""Runs code for the registers of a thread block in NumPy: the operations of MLIR and PTX, for all 128 threads at once.

Pallas's interpreter does not run code for registers (`plgpu.inline_mgpu`): kernels have other code for it, with whole
arrays. Here a word is an array with one element for each thread. Instructions for tensor cores follow the tables of
NVIDIA's PTX manual, so they do not depend on what our modules say about lanes.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS, LANES = 128, 32
QUAD, PLACE = np.arange(LANES) // 4, np.arange(LANES) % 4


class Memory(NamedTuple):
    """An array in memory, as bytes, and its address."""

    data: np.ndarray
    address: int = 0

    @property
    def bytes(self) -> np.ndarray:
        return np.frombuffer(self.data.tobytes(), np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


class Fragments(NamedTuple):
    """An array that is distributed over the registers of a thread block.

    Each entry of `registers` is an array [threads, elements]: the elements that each thread has in this register.
    """

    registers: np.ndarray  # of objects
    shape: tuple[int, ...]


def elements(shape: tuple[int, ...], layout: Any) -> np.ndarray:
    """Return the indices (in the flat array) of the elements of each register: [registers, threads, elements]."""
    tiled, layout = np.arange(np.prod(shape)).reshape(shape), layout.to_mgpu()
    for tile in layout.tiling.tiles:
        outer, inner = tiled.ndim - len(tile), list(tile)
        sizes = [(size // part, part) for size, part in zip(tiled.shape[outer:], inner, strict=True)]
        tiled = tiled.reshape(*tiled.shape[:outer], *(number for pair in sizes for number in pair))
        counts, parts = range(outer, tiled.ndim, 2), range(outer + 1, tiled.ndim, 2)
        tiled = tiled.transpose(*range(outer), *counts, *parts)
    threads = np.arange(THREADS)
    index: list[Any] = [None] * tiled.ndim
    for part, dims in ((threads // LANES, layout.warp_dims), (threads % LANES, layout.lane_dims)):
        for dim in reversed(dims):
            size = dim.times if isinstance(dim, fragmented_array.Replicated) else tiled.shape[dim]
            if not isinstance(dim, fragmented_array.Replicated):
                index[dim] = part % size
            part = part // size
        assert not part.any(), "the layout has fewer lanes or warps than a thread block"
    vector = tiled.ndim + layout.vector_dim
    own = [dim for dim in range(tiled.ndim) if index[dim] is None and dim != vector]
    registers = []
    for place in np.ndindex(*(tiled.shape[dim] for dim in own)):
        at = list(index)
        for dim, value in zip(own, place, strict=True):
            at[dim] = np.full(THREADS, value)
        at[vector] = np.arange(tiled.shape[vector])
        at = [part if dim == vector else np.asarray(part)[:, None] for dim, part in enumerate(at)]
        registers.append(tiled[tuple(at)])
    return np.stack(registers)


def fragments(array: Any, layout: Any) -> Fragments:
    array = np.asarray(array)
    values = array.reshape(-1)[elements(array.shape, layout)]
    registers = np.empty(len(values), object)
    registers[:] = list(values)
    return Fragments(registers, array.shape)


def whole(registers: Sequence[Sequence[np.ndarray]], shape: tuple[int, ...], dtype: Any, layout: Any) -> jax.Array:
    """Put the words of each register into an array. Threads that have the same element must agree."""
    flat, written = np.zeros(np.prod(shape), dtype), np.zeros(np.prod(shape), bool)
    for places, own_words in zip(elements(shape, layout), registers, strict=True):
        values = np.stack([np.broadcast_to(word, THREADS) for word in own_words], axis=1)
        values = np.ascontiguousarray(values).view(dtype)
        flat[places], written[places] = values, True
        np.testing.assert_array_equal(flat[places], values)
    assert written.all()
    return jax.numpy.asarray(flat.reshape(shape))


def words(register: np.ndarray, kind: Any) -> list[np.ndarray]:
    return list(np.ascontiguousarray(register).view(kind).T)


def all_words(array: Fragments, kind: Any) -> list[np.ndarray]:
    return [word for register in array.registers for word in words(register, kind)]


def word(value: int) -> np.ndarray:
    return np.full(THREADS, value & 0xFFFFFFFF, np.uint32)


def load(ref: Memory, at: np.ndarray, kind: Any, count: int) -> list[np.ndarray]:
    assert not (at % (4 * min(count, 4))).any(), "the address is not aligned"
    places = at.astype(np.int64)[:, None] + np.arange(4 * count)
    return list(np.ascontiguousarray(ref.bytes[places]).view(kind).T)


# Functions of the dialect `arith`, of `math` and of `llvm` that kernels call.
ARITH = SimpleNamespace(
    addi=lambda a, b: a + b,
    muli=lambda a, b: a * b,
    andi=lambda a, b: a & b,
    ori=lambda a, b: a | b,
    xori=lambda a, b: a ^ b,
    shrui=lambda a, b: a >> b,
    shli=lambda a, b: a << b,
    minui=np.minimum,
    mulf=lambda a, b: a * b,
    subf=lambda a, b: a - b,
    bitcast=lambda kind, a: np.ascontiguousarray(a).view(kind),
    extui=lambda kind, a: a.astype(kind),
    select=np.where,
    cmpi=lambda predicate, a, b: predicate(a, b),
    CmpIPredicate=SimpleNamespace(eq=np.equal),
)
MATH = SimpleNamespace(fma=lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32))


def inline_asm(
    kind: Any, operands: Sequence[np.ndarray], text: str, constraints: str, *, has_side_effects: bool
) -> Any:
    del kind, constraints, has_side_effects
    operands = [np.broadcast_to(operand, THREADS) for operand in operands]
    if text.startswith("prmt"):
        return prmt(*operands, order=text)
    if text.startswith("cvt.rn.bf16x2.f32 $0, $2, $1"):
        return rounded_pair(lower=operands[0], upper=operands[1])
    if "cvt.f32.f16 $0, lower" in text:
        halves = np.ascontiguousarray(operands[0]).view(np.float16).reshape(THREADS, 2)
        return words(halves.astype(np.float32), np.uint32)
    warps = [[operand[at : at + LANES] for operand in operands] for at in range(0, THREADS, LANES)]
    results = [warp_instruction(text, operands) for operands in warps]
    joined = [np.concatenate(parts) for parts in zip(*results, strict=True)]
    return joined if len(joined) > 1 else joined[0]


LLVM = SimpleNamespace(
    inline_asm=inline_asm,
    extractvalue=lambda kind, out, place: out[place[0]],
    StructType=SimpleNamespace(get_literal=lambda kinds: kinds),
)


def prmt(a: np.ndarray, b: np.ndarray, *orders: np.ndarray, order: str) -> np.ndarray:
    """Choose four of the eight bytes of two words."""
    selector = orders[0] if orders else word(int(re.search(r", (\d+);", order)[1]))  # pyright: ignore[reportOptionalSubscript]
    eight = np.stack([a, b], axis=1).view(np.uint8)
    chosen = [eight[np.arange(THREADS), (selector >> 4 * place & 7).astype(int)] for place in range(4)]
    return np.stack(chosen, axis=1).view(np.uint32)[:, 0]


def rounded_pair(*, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    pair = np.stack([lower, upper], axis=1).astype(jax.numpy.bfloat16)
    return pair.view(np.uint32)[:, 0]


def warp_instruction(text: str, operands: list[np.ndarray]) -> list[np.ndarray]:
    if text.startswith("movmatrix.sync.aligned.m8n8.trans.b16"):
        return [transposed(*operands)]
    if text.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"):
        return product(operands[:4], operands[4:6], operands[6:], kind=jax.numpy.bfloat16, other=jax.numpy.bfloat16)
    integer = re.match(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.s32\.([su])8\.s8\.s32", text)
    assert integer, f"no such instruction: {text}"
    count = {"32": 4, "16": 2}[integer[1]]
    kind = {"s": np.int8, "u": np.uint8}[integer[2]]
    half = count // 2
    return product(operands[:count], operands[count : count + half], operands[count + half :], kind=kind, other=np.int8)


def product(a: list[Any], b: list[Any], c: list[Any], *, kind: Any, other: Any) -> list[np.ndarray]:
    """Multiply A [16, k] by B [k, 8] and add C [16, 8].

    A 32-bit register of A has numbers in adjacent columns. A register of B has numbers in adjacent rows. The registers
    of A in a lane are for rows quad and quad + 8, first in the lower half of the columns, then in the upper half.
    """
    numbers = 4 // np.dtype(kind).itemsize
    halves = max(1, len(a) // 2)
    width = 4 * numbers  # columns of a half
    rows, columns = np.zeros((16, halves * width)), np.zeros((halves * width, 8))
    sums, exact = np.zeros((16, 8)), np.float64
    for half in range(halves):
        for part in range(numbers):
            at = half * width + PLACE * numbers + part
            for lower in range(2):
                own = np.ascontiguousarray(a[2 * half + lower]).view(kind).reshape(LANES, numbers)
                rows[QUAD + 8 * lower, at] = own[:, part].astype(exact)
            own = np.ascontiguousarray(b[half]).view(other).reshape(LANES, numbers)
            columns[at, QUAD] = own[:, part].astype(exact)
    floats = np.issubdtype(c[0].dtype, np.floating)
    for i, register in enumerate(c):
        sums[QUAD + 8 * (i // 2), 2 * PLACE + i % 2] = register if floats else register.view(np.int32)
    sums = rows @ columns + sums
    results = [sums[QUAD + 8 * (i // 2), 2 * PLACE + i % 2] for i in range(4)]
    return [part.astype(np.float32) if floats else part.astype(np.int64).astype(np.uint32) for part in results]


def transposed(register: np.ndarray) -> np.ndarray:
    """Transpose a matrix [8, 8] of 16-bit numbers. Lane j of quad i has row i, columns 2 j and 2 j + 1."""
    matrix = np.ascontiguousarray(register).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T).view(np.uint32).reshape(LANES)


def inline_mgpu(*, arg_types: Any, return_type: Any = None) -> Callable[..., Any]:
    """Return a decorator that runs a function of registers in NumPy.

    Arguments with a layout in `arg_types` become `Fragments`. Refs are passed on unchanged.
    """
    del return_type  # the function names the layout of its results when it calls `array`

    def is_type(leaf: Any) -> bool:
        return isinstance(leaf, plgpu.RefType) or hasattr(leaf, "to_mgpu")

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            def convert(kind: Any, argument: Any) -> Any:
                return argument if isinstance(kind, plgpu.RefType) else fragments(argument, kind)

            return run(None, *jax.tree.map(convert, arg_types, arguments, is_leaf=is_type))

        return call

    return decorate


@contextmanager
def emulated(*modules: ModuleType):
    """Let these modules run their code for registers in NumPy."""
    names: dict[str, Any] = {
        "arith": ARITH, "llvm": LLVM, "math": MATH,
        "words": words, "all_words": all_words, "array": whole, "word": word,
        "real": lambda value: np.full(THREADS, value, np.float32), "int32": lambda: np.uint32,
        "int64": lambda: np.uint64, "float32": lambda: np.float32, "load": load,
        "address": lambda ref, offset: np.full(THREADS, ref.address + offset, np.uint64),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in names.items():
                if hasattr(module, name) and getattr(module, name) is not math:
                    patch.setattr(module, name, value)
            if hasattr(module, "utils"):
                patch.setattr(module.utils, "thread_idx", lambda: np.arange(THREADS, dtype=np.uint32))
        patch.setattr(plgpu, "inline_mgpu", inline_mgpu)
        patch.setattr(plgpu, "load", lambda ref, layout=None, **options: jax.numpy.asarray(ref.data))
        yield patch
