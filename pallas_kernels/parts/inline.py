"""Operations on the words in a thread's registers that Pallas does not have.

`plgpu.inline_mgpu` calls a function with each thread's part of the arrays. The part is a list of *registers*, i.e.
vectors. Their number of elements depends on the array's layout. Words have 32 bits, and are int32 or float32.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float32, Int8

from llamaspec.pallas_kernels.parts.compat import THREADS, Target

ONE_EACH = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # one number per thread


def int32() -> Any:
    return ir.IntegerType.get_signless(32)


def int64() -> Any:
    return ir.IntegerType.get_signless(64)


def float32() -> Any:
    return ir.F32Type.get()


def word(value: int) -> Any:
    """Make a constant from the lower 32 bits of a number."""
    return utils.c(np.array(value & 0xFFFFFFFF, np.uint32).view(np.int32).item(), int32())


def real(value: float) -> Any:
    """Make a float32 constant."""
    return arith.constant(float32(), ir.FloatAttr.get(float32(), value))


def times(value: Any, factor: int) -> Any:
    return arith.muli(value, word(factor))


def total(first: Any, *more: Any) -> Any:
    for term in more:
        first = arith.addi(first, term)
    return first


def down(bits: Any, by: int) -> Any:
    """Shift the bits of a word right by `by`, or left if `by` is negative."""
    return arith.shrui(bits, word(by)) if by > 0 else arith.shli(bits, word(-by)) if by else bits


def words(register: Any, kind: Any) -> list[Any]:
    """List the words of a register, with the type `kind`: int32 or float32."""
    size = utils.bitwidth(register.type) // 32
    register = vector.bitcast(ir.VectorType.get((size,), kind), register)
    return [vector.extract(register, dynamic_position=[], static_position=[place]) for place in range(size)]


def all_words(x: Any, kind: Any) -> list[Any]:
    """List a thread's words of an array, with the type `kind`: int32 or float32."""
    return [register_word for register in x.registers.flat for register_word in words(register, kind)]


def array(registers: Iterable[Sequence[Any]], shape: tuple[int, ...], dtype: np.dtype, layout: Any) -> Any:
    """Make an array of this shape and layout from the words of each register of a thread."""
    layout, element = layout.to_mgpu(), utils.dtype_to_ir_type(dtype)
    laid_out = np.empty(layout.registers_shape(shape), dtype=object)
    for place, some in zip(np.ndindex(laid_out.shape), registers, strict=True):
        register = vector.from_elements(ir.VectorType.get((len(some),), some[0].type), some)
        elements = len(some) * 32 // utils.bitwidth(element)
        laid_out[place] = vector.bitcast(ir.VectorType.get((elements,), element), register)
    signed = True if isinstance(element, ir.IntegerType) else None
    return fragmented_array.FragmentedArray(_registers=laid_out, _layout=layout, _is_signed=signed)


def widened(x: Array, layout: Any, target: Target) -> Array:
    """Convert x to float32 with one instruction per bfloat16. (The compiler would use three instructions for two.)

    A float32 x does not change. If x is bfloat16, each thread must have an even number of adjacent elements.
    """
    if x.dtype == jnp.float32 or target.interpret:
        return x.astype(jnp.float32)

    def unpacked(register: Any) -> Iterator[Any]:
        for pair in words(register, int32()):
            yield arith.bitcast(float32(), arith.shli(pair, word(16)))
            yield arith.bitcast(float32(), arith.andi(pair, word(0xFFFF0000)))

    def run(_, narrow):
        return array([list(unpacked(some)) for some in narrow.registers.flat], x.shape, np.dtype("float32"), layout)

    wide = plgpu.ShapeDtypeStruct(x.shape, np.dtype("float32"), layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=wide)
    return inlined(run)(x)


HALVES_OF_E4M3 = """{
.reg .b16 lower, upper;
mov.b32 {lower, upper}, $2;
cvt.rn.f16x2.e4m3x2 $0, lower;
cvt.rn.f16x2.e4m3x2 $1, upper;
}"""
FLOATS_OF_HALVES = """{
.reg .b16 lower, upper;
mov.b32 {lower, upper}, $2;
cvt.f32.f16 $0, lower;
cvt.f32.f16 $1, upper;
}"""


# `prmt` with these orders puts two bytes of a word each into the upper half of 16 bits, above a byte of zeros.
BYTES_TO_HALVES = 0x5040, 0x7060


def from_e4m3(codes: Int8[Array, "rows cols"], layout: Any, target: Target) -> Float32[Array, "rows cols"]:
    """Convert the bits of e4m3 floats to float32. Each thread has a multiple of four adjacent elements.

    Older cards have no instruction for this, so we move the bits into a float16. A float16 with the same exponent bits
    is 2^8 times smaller than the e4m3 float.
    """
    if target.interpret:
        halves = lax.bitcast_convert_type((codes.astype(jnp.int16) << 7) & ~(1 << 14), jnp.float16)
        return halves.astype(jnp.float32) * 2.0**8

    def pairs_of_halves(bits: Any) -> list[Any]:
        if target.card.converts_e4m3:
            return ptx(HALVES_OF_E4M3, [bits], results=2)
        pairs = [ptx(f"prmt.b32 $0, $1, $2, {order};", [word(0), bits], results=1)[0] for order in BYTES_TO_HALVES]
        numbers = [arith.shrui(arith.andi(pair, word(0x7F007F00)), word(1)) for pair in pairs]
        return [
            arith.ori(arith.andi(pair, word(0x80008000)), number) for pair, number in zip(pairs, numbers, strict=True)
        ]

    def four(bits: Any) -> Iterator[Any]:
        for pair in pairs_of_halves(bits):
            for half in ptx(FLOATS_OF_HALVES, [pair], results=2):
                number = arith.bitcast(float32(), half)
                yield number if target.card.converts_e4m3 else arith.mulf(number, real(2.0**8))

    def run(_, codes):
        registers = [[half for bits in words(some, int32()) for half in four(bits)] for some in codes.registers.flat]
        return array(registers, codes.shape, np.dtype("float32"), layout)

    wide = plgpu.ShapeDtypeStruct(codes.shape, np.dtype("float32"), layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=wide)
    return inlined(run)(codes)


def thread_sums(x: Float32[Array, " length"], vector: int, layout: Any, target: Target) -> Float32[Array, " threads"]:
    """Add up the numbers of x in each thread.

    x is cut into parts of `vector` numbers, and thread t has the parts t, t + 128, t + 256, ..."""
    if target.interpret:
        return jnp.sum(x.reshape(-1, THREADS, vector), axis=(0, 2))

    def run(_, x):
        return array([[reduce(arith.addf, all_words(x, float32()))]], (THREADS,), np.dtype("float32"), ONE_EACH)

    sums = plgpu.ShapeDtypeStruct((THREADS,), np.dtype("float32"), layout=ONE_EACH)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=sums)
    return inlined(run)(x)


def read_past_first_cache(ref: Any) -> Any:
    """Read the single int32 of `ref` from the second-level cache. The first-level cache may have an old value."""

    def run(_, ref):
        address = llvm.ptrtoint(int64(), utils.memref_ptr(ref))
        read = "ld.relaxed.gpu.global.s32 $0, [$1];"
        value = llvm.inline_asm(int32(), [address], read, "=r,l", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(value, (), is_signed=True)

    number = plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=plgpu.Layout.WG_SPLAT)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=number)
    return inlined(run)(ref)


def stream(ref: Any, layout: Any, target: Target, *, written: bool = False) -> Array:
    """Load numbers from global memory to registers. This bypasses the first-level cache: each number is read only once.

    If an earlier kernel may have `written` them, the load stays after `Target.wait_for_previous`. Weights may be loaded
    before that.
    """
    if target.interpret:
        return plgpu.load(ref, layout=layout, optimized=False)

    def run(_, ref):
        kind = ir.MemRefType(ref.type)
        signed = True if isinstance(kind.element_type, ir.IntegerType) else None
        tiled = utils.memref_reshape(ref, (*(1 for _ in kind.shape), *kind.shape))
        load_tiled = fragmented_array.FragmentedArray.load_tiled
        register_layout = layout.to_mgpu()
        return load_tiled(tiled, 16, is_signed=signed, layout=register_layout, optimized=False, _load_fun=load_vector)

    def load_vector(kind: Any, pointer: Any) -> Any:
        count = utils.bitwidth(kind) // 32
        loaded = load_global(llvm.ptrtoint(int64(), pointer), count, written=written)
        return vector.bitcast(kind, vector.from_elements(ir.VectorType.get((count,), int32()), loaded))

    registers = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=registers)
    return inlined(run)(ref)


def address(ref: Any, offset: int) -> Any:
    """Return the address of a ref in global memory, plus `offset` bytes."""
    start = arith.constant(int64(), ir.IntegerAttr.get(int64(), offset))
    return arith.addi(llvm.ptrtoint(int64(), utils.memref_ptr(ref)), start)


def load_global(address: Any, count: int, *, written: bool) -> list[Any]:
    """Load 1, 2 or 4 words from global memory, past the first-level cache. `written` means the same as in `stream`."""
    names, width = [f"${i}" for i in range(count)], f".v{count}" if count > 1 else ""
    into = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    constant = "" if written else ".nc"
    instruction = f"ld.global{constant}.L1::no_allocate.L2::128B{width}.b32 {into}, [${count}];"
    constraints = ",".join([*["=r"] * count, "l"])
    return assembly(instruction, [address], [int32()] * count, constraints, has_side_effects=written)


def load(ref: Any, at: Any, kind: Any, count: int) -> list[Any]:
    """Load words from shared memory, `at` bytes after the start of a ref, up to 16 bytes at a time."""
    loaded = []
    for start in range(0, count, 4):
        some = min(4, count - start)
        byte = utils.getelementptr(utils.memref_ptr(ref), [total(at, word(4 * start))], ir.IntegerType.get_signless(8))
        loaded += words(llvm.load(ir.VectorType.get((some,), kind), byte, alignment=4 * some), kind)
    return loaded


def ptx(instruction: str, operands: Sequence[Any], *, results: int) -> list[Any]:
    """Run a PTX instruction without side effects. In its text, $0, $1, ... are int32 results, then operands."""
    constraints = ",".join(["=r"] * results + ["r"] * len(operands))
    return assembly(instruction, operands, [int32()] * results, constraints)


def assembly(
    instruction: str, operands: Sequence[Any], kinds: Sequence[Any], constraints: str, *, has_side_effects: bool = False
) -> list[Any]:
    """Run a PTX instruction with results of these `kinds`.

    `constraints` is LLVM's string of constraints: first for the results, then for the operands.
    """
    several = len(kinds) > 1
    type = llvm.StructType.get_literal(list(kinds)) if several else kinds[0]
    out = llvm.inline_asm(type, list(operands), instruction, constraints, has_side_effects=has_side_effects)
    return [llvm.extractvalue(kind, out, [place]) for place, kind in enumerate(kinds)] if several else [out]
