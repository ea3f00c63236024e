r"""BitNet b1.58: weights -1, 0 and 1 times a single scale, activations in int8 (Ma et al., 2024,
https://arxiv.org/abs/2402.17764).

    b = max(mean |W|, 10^-5)        T = clip(rint(W / b), -1, 1)        W ~ b T
    a = max(max_j |x_j|, 10^-5)     q = clip(rint(127 x / a), -128, 127)        x ~ a q / 127, for each token
    y = (T q) a b / 127             T q in integers

as in Hugging Face transformers: W is multiplied by fl(1 / b) and x by fl(127 / a), in float32; ties go to
even. The mean is exact and then rounded to float32. A model must be trained with this rounding (see `qat`: the
gradient ignores it). Ordinary weights lose most of their quality.

Guaranteed, with u = 2^-24 and for W and x of float32 or narrower:

    |w - b t|  <=  (1/2 + 4 u) b    where |w| <= 3 b / 2, and |w| - b beyond
    |x - a q / 127|  <=  (1/2 + 512 u) a / 127

rint adds half a step. Before it, the reciprocal and the product have an error of u each, relative to a number up to 3/2
for w and up to 127 for x. Beyond 3 b / 2 the code is 1 or -1, and the error is the rest.

Weights below 10^-5 / 2 all become 0. Multiplying W by a power of two multiplies only b, and multiplying x by one only
a, while b and a are above 10^-5. Q(-W) = -Q(W). Quantized weights are not a fixed point, because their mean differs.
Quantized tokens are a fixed point: fl(fl(127 s) / 127) = s for every s = fl(a / 127).
"""

import numpy as np
from jaxtyping import Float, Float64, Int8, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite

SMALLEST = np.float32(1e-5)


def quantize(w: Float[np.ndarray, "rows cols"]) -> Quantized:
    """Quantize to int8 codes -1, 0 and 1, and b, float32 [1, 1]. Raises ValueError unless all weights are finite.

    >>> q = quantize(np.array([[1.0, -2.0, 0.25, 0.75]]))
    >>> q.codes, q.scales
    (array([[ 1, -1,  0,  1]], dtype=int8), array([[1.]], dtype=float32))
    """
    w = finite(w)
    scale = np.maximum(np.float32(np.mean(np.abs(w))), SMALLEST)
    codes = np.rint(w.astype(np.float32) * (1 / scale)).clip(-1, 1)
    return Quantized(codes.astype(np.int8), scale.reshape(1, 1))


def quantize_tokens(x: Float[np.ndarray, "*batch dim"]) -> Quantized:
    """Quantize to int8 codes, and a / 127, float32 [*batch, 1]. Raises ValueError unless all of x is finite.

    >>> quantize_tokens(np.array([[127.0, -0.5, 1.5]])).codes
    array([[127,   0,   2]], dtype=int8)
    """
    x32 = finite(x).astype(np.float32)
    tops = np.maximum(np.max(np.abs(x32), axis=-1, keepdims=True), SMALLEST)
    codes = np.rint(x32 * (np.float32(127) / tops)).clip(-128, 127)
    return Quantized(codes.astype(np.int8), tops / np.float32(127))


def dequantize(q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
    """Return b T for weights, or a q / 127 for tokens."""
    return q.codes * q.scales.astype(np.float64)


def linear(x: Float[np.ndarray, "*batch cols"], w: Quantized) -> Float64[np.ndarray, "*batch rows"]:
    """Compute W x with quantized tokens. The sums are exact.

    >>> linear(np.array([[127.0, 1.0]]), quantize(np.array([[1.0, -1.0]])))
    array([[126.]])
    """
    tokens = quantize_tokens(x)
    sums = tokens.codes.astype(np.int64) @ w.codes.astype(np.int64).T
    return sums * tokens.scales.astype(np.float64) * w.scales.astype(np.float64)[0, 0]


def pack(codes: Int8[np.ndarray, "rows cols"]) -> UInt8[np.ndarray, "quarter cols"]:
    """Pack t + 1 of each weight in two bits. A byte holds the rows i, i + rows / 4, ... of a column.

    The number of rows is a multiple of 4.

    >>> pack(np.array([[1], [0], [-1], [1]], np.int8))
    array([[134]], dtype=uint8)
    """
    if codes.shape[0] % 4:
        raise ValueError(f"expected a multiple of 4 rows, got {codes.shape[0]}")
    return packing.pack((codes + np.int8(1)).T, bits=2, stride=codes.shape[0] // 4).T


def unpack(packed: UInt8[np.ndarray, "quarter cols"]) -> Int8[np.ndarray, "rows cols"]:
    """Restore the codes from `pack`. The bits 11, which `pack` never writes, give 2."""
    return packing.unpack(packed.T, bits=2, stride=packed.shape[0]).T.astype(np.int8) - np.int8(1)
