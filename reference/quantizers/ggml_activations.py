r"""Activations in llama.cpp: before a product with a quantized matrix, the vector x is rounded to x^.

(https://github.com/ggml-org/llama.cpp, ggml/src/ggml-cpu: `vec_dot_type` of each type, and `quantize_row_*` on x86.)
The product then needs only integers. For a block of consecutive numbers of x, with d in float32:

    matrix of                    x^                 numbers  d                  x^
    Q8_0 Q4_0 Q5_0 IQ4_NL MXFP4  q8_0               32       max |x| / 127      fl16(d) rint(x fl(127 / max |x|))
    Q4_1 Q5_1                    q8_1               32       as q8_0            as q8_0, and the sum: see below
    Q2_K to Q6_K, TQ1_0, TQ2_0,  q8_k               256      1 / fl(-127 / x*)  d min(127, rint(x fl(-127 / x*)))
      and IQ1 to IQ3, IQ4_XS
    F16, BF16                    float16, bfloat16                              the nearest
    F32                          float32                                        x

x* is the number of largest magnitude, with its sign; the first one on ties. rint rounds ties to even, and the codes are
computed before d is rounded to float16. Both differ from Q8_0 for weights in `ggml_blocks`.

A block of Q4_1 or Q5_1 has a minimum m. llama.cpp multiplies m by a sum that q8_1 stores for each block of x: d
sum(codes), rounded to float16. The stored sum differs from the exact sum of the block's x^ by up to 2^-10 of that sum.
So our q8_1 returns this difference, one number per block, after all x^. It is also multiplied by m.

For the same float32 x, our codes are equal to llama.cpp's (test_libggml.py checks each product of each type). But in a
model, llama.cpp computes x itself by float32 sums, with errors of about 10^-5 of a step of q8_0. So one or two of
100,000 numbers are on the other side of a tie, and later results differ by about 10^-3.

Guaranteed: |x - x^| <= (1/2 + 2^-4) d + 2^-18 for q8_0, and (1/2 + 2^-15) |d| for q8_k. Reasons: Rounding to a code
moves x by at most half a step, d / 2. In q8_0, rounding to float16 changes d by at most 2^-11 d, or by 2^-25 if d is
denormal in float16. A code of up to 127 multiplies this error. In q8_k, at most four results are rounded to float32,
and they are at most 127.

Q(x) = x^. Sign: Q(-x) = -Q(x) for every format. Fixed point: Q(Q(x)) = Q(x), except in q8_k, where d is rounded twice.
Powers of two: Q(2^k x) = 2^k Q(x), while d, or the number in float16, is not denormal.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float64

from llamaspec.reference.quantizers.blocks import in_float16
from llamaspec.reference.quantizers.ggml_blocks import BLOCK, in_blocks, in_rows, largest
from llamaspec.reference.quantizers.ggml_superblocks import BLOCK as SUPERBLOCK

Rounding = Callable[[Float[np.ndarray, "*batch cols"]], Float64[np.ndarray, "*batch rounded"]]


def q8_0(x: Float[np.ndarray, "*batch cols"]) -> Float64[np.ndarray, "*batch cols"]:
    """Round `x` in blocks of 32; the last block is padded with zeros.

    Raises ValueError if a scale is too large for float16.

    >>> q8_0(np.array([127.0, 2.5, -3.5, 0.2]))
    array([127.,   2.,  -4.,   0.])
    """
    cols = x.shape[-1]
    blocks = in_blocks(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -cols % BLOCK)]), BLOCK)
    most = np.max(np.abs(blocks), axis=-1, keepdims=True)
    d = in_float16(most / np.float32(127))
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(d == 0, 0, np.float32(127) / most)
    return in_rows(np.rint(blocks * factor) * d.astype(np.float64))[..., :cols]


def q8_1(x: Float[np.ndarray, "*batch cols"]) -> Float64[np.ndarray, "*batch cols_and_blocks"]:
    """Return `q8_0(x)`, followed by one number for each block: fl16(d sum(codes)) - fl16(d) sum(codes).

    Raises ValueError if a scale or a sum is too large for float16.

    >>> q8_1(np.array([127.0] * 31 + [126.0]))[30:]
    array([127., 126.,   1.])
    """
    rounded = q8_0(x)
    blocks = in_blocks(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]), BLOCK)
    d = np.max(np.abs(blocks), axis=-1) / np.float32(127)
    stored = d.astype(np.float16).astype(np.float64)
    totals = np.add.reduceat(rounded, np.arange(0, x.shape[-1], BLOCK), axis=-1)
    sums = np.rint(totals / np.where(stored == 0, 1, stored)).astype(np.float32)  # sums of the codes
    return np.concatenate([rounded, in_float16(d * sums) - totals], axis=-1)


def q8_k(x: Float[np.ndarray, "*batch cols"]) -> Float64[np.ndarray, "*batch cols"]:
    """Round `x` in superblocks of 256. Raises ValueError unless a row consists of complete superblocks.

    >>> q8_k(np.array([[-127.0, 2.5, -3.5, 0.2] * 64]))[0, :4]
    array([-127.,    2.,   -4.,    0.])
    """
    blocks = in_blocks(x, SUPERBLOCK)
    most = largest(blocks)[..., None]
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(-127) / most
        usable = np.isfinite(factor)
        factor = np.where(usable, factor, 0)
        d = np.where(usable, 1 / factor, 0)
    return in_rows(np.minimum(np.rint(blocks * factor), 127) * d.astype(np.float64))


def bfloat16(x: Float[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Round each number to float32, then to bfloat16, the upper half of its bits. A tie goes to the even bits.

    >>> bfloat16(np.array([257.0, 259.0, 0.3]))
    array([256.        , 260.        ,   0.30078125])
    """
    narrow = x.astype(np.float32)
    bits = narrow.view(np.uint32).astype(np.int64)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.where(np.isnan(narrow), narrow, upper.astype(np.uint32).view(np.float32)).astype(np.float64)


def float16(x: Float[np.ndarray, "*batch cols"]) -> Float64[np.ndarray, "*batch cols"]:
    """Round each number to float32, then to float16. Raises ValueError for numbers too large for float16."""
    return in_float16(x.astype(np.float32)).astype(np.float64)


ROUNDINGS: dict[str, Rounding] = {"q8_0": q8_0, "q8_1": q8_1, "q8_k": q8_k, "bfloat16": bfloat16, "float16": float16}

_OF = {
    "q8_0": ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4"),
    "q8_1": ("Q4_1", "Q5_1"),
    "q8_k": (
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
    ),
    "bfloat16": ("BF16",),
    "float16": ("F16",),
}
ROUNDING_OF = {type: rounding for rounding, types in _OF.items() for type in types}  # key: the matrix's type
