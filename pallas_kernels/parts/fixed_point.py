r"""Vectors in fixed point, for integer tensor cores: each group of columns has one exponent.

    x_k = 2^e n_k + rest,  |n_k| <= 2^21,  |rest| <= 2^(e - 1)        2^(e + 20) <= max |x| < 2^(e + 21)

The integer n_k has three digits to the base 256, each from -128 to 127: n_k = d_0 + 256 d_1 + 65536 d_2. The error of a
number is at most 2^-21 times the largest number in its group. (The error of a float32 is at most 2^-24 times the number
itself.) 2^e must be a normal float32, so e is at least -126. In a group of numbers below 2^-106, errors are up to
2^-127.

Numbers must be smaller than 2^127. For larger numbers, the value of the upper digit would be infinite. A number that is
not finite makes 2^e NaN, and so every sum over its group becomes NaN.

To get the digits, we add 3 2^22 + 128 + 128 256 to n_k as a float32. The lower 24 bits of the result are n_k plus a
constant: 64 for the upper digit and 128 for each lower digit, so that no digit is negative. The three bytes are then
the digits, and we only need to collect them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float32, Int8

from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.inline import array, int32, ptx, word, words

DIGITS = 3
VECTOR = 8  # numbers of a group per thread
BITS = 20  # the largest number of a group becomes at least 2^20
SHIFTED = 3 * 2.0**22 + 0x8080
LEAST, SPECIAL = BITS + 1, 255  # biased exponents of a float32: the smallest with a normal 2^e, and infinity's


def fixed_point(
    x: Float32[Array, "groups lanes 8"], layout: Any, digits_layout: Any, target: Target
) -> tuple[Int8[Array, "groups lanes digits 8"], Float32[Array, " groups"]]:
    """Convert each group of numbers to fixed point. Returns their digits, lowest first, and 2^e of each group.

    A thread has eight numbers of x in `layout`, and the digits of these numbers in `digits_layout`.
    """
    largest = jnp.max(jnp.max(jnp.abs(x), axis=2), axis=1)
    top = lax.shift_right_logical(lax.bitcast_convert_type(largest, jnp.int32), jnp.int32(23))
    exponent = jnp.maximum(top, LEAST)
    unit = lax.bitcast_convert_type((exponent - BITS) * 2**23, jnp.float32)
    unit = jnp.where(top == SPECIAL, jnp.float32(jnp.nan), unit)
    inverse = lax.bitcast_convert_type((2 * 127 + BITS - exponent) * 2**23, jnp.float32)
    shifted = x * lax.broadcast_in_dim(inverse, x.shape, (0,)) + SHIFTED
    return _digits(shifted, layout, digits_layout, target), unit


def _digits(shifted, layout: Any, digits_layout: Any, target: Target):
    groups, lanes, size = shifted.shape
    shape = (groups, lanes, DIGITS, size)
    if target.interpret:
        n = lax.bitcast_convert_type(shifted, jnp.int32)
        bytes_ = [n ^ 0x80, (n >> 8) ^ 0x80, (n >> 16) - 0x40]
        return jnp.stack(bytes_, axis=2).astype(jnp.int8)

    def run(_, shifted):
        (register,) = shifted.registers.flat
        numbers = words(register, int32())
        fours = [_transposed(*numbers[at : at + 4]) for at in range(0, size, 4)]
        return array(zip(*fours, strict=True), shape, np.dtype("int8"), digits_layout)

    inlined: Any = plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, np.dtype("int8"), layout=digits_layout)
    )
    return inlined(run)(shifted)


def _transposed(a, b, c, d) -> list[Any]:
    """Collect the digits of four numbers in three words, one word per digit."""
    ab, cd = _bytes(a, b, 0x5140), _bytes(c, d, 0x5140)  # x0 y0 x1 y1
    lower = [arith.xori(_bytes(ab, cd, order), word(0x80808080)) for order in (0x5410, 0x7632)]
    upper = _bytes(_bytes(a, b, 0x0062), _bytes(c, d, 0x0062), 0x5410)
    # The upper digits are 64 too large, and below 128. Adding 64 does not carry into other bytes; the flip subtracts
    # 128.
    return [*lower, arith.xori(arith.addi(upper, word(0x40404040)), word(0x80808080))]


def _bytes(a, b, order: int):
    """Select four of the eight bytes of two words. `order` has four bits for each byte of the result."""
    return ptx(f"prmt.b32 $0, $1, $2, {order};", [a, b], results=1)[0]
