r"""BitNet b1.58 (Ma et al., 2024, https://arxiv.org/abs/2402.17764): weights -1, 0 and 1, and activations in int8.

    b = max(mean |W|, 10^-5)        T = clip(rint(W / b), -1, 1)        W ~ b T
    a = max(max_j |x_j|, 10^-5)     q = clip(rint(127 x / a), -128, 127)        x ~ a q / 127, for each token
    y = (T q) a b / 127             T q in integers

All weights of a matrix share the scale b. This is the arithmetic of Hugging Face transformers: W is multiplied by fl(1
/ b) and x by fl(127 / a), in float32, and ties go to even. The mean is computed exactly and then rounded to float32. A
model must be trained with this rounding, as in `qat`, where the gradient ignores it. A model that was trained without
it loses most of its quality.

Guaranteed, with u = 2^-24, for W and x of float32 or narrower. A weight w has the code t, and a number x of a token has
the code q:

    |w - b t|  <=  (1/2 + 4 u) b    where |w| <= 3 b / 2, and |w| - b beyond
    |x - a q / 127|  <=  (1/2 + 512 u) a / 127

Reasons: rint changes a number by at most 1/2. Before rint, the reciprocal and the product each have a relative error of
u, and the product is at most 3/2 for w and at most 127 for x. If |w| exceeds 3 b / 2, the code is 1 or -1, so the error
is |w| - b.

A weight smaller than 10^-5 / 2 always becomes 0. Powers of two: 2^k W has the same codes as W, and the scale 2^k b, if
both scales are above 10^-5. The same is true for x and a. Sign: Q(-W) = -Q(W), where Q(W) = b T. Quantized weights are
not a fixed point, because the mean of |b T| differs from b. Quantized tokens are a fixed point, because fl(fl(127 s) /
127) = s for every s = fl(a / 127).
"""

import numpy as np
from jaxtyping import Float, Float64, Int8, UInt8

from llamaspec.reference.quantizers import packing
from llamaspec.reference.quantizers.blocks import Quantized, finite

SMALLEST = np.float32(1e-5)


def quantize(w: Float[np.ndarray, "rows cols"]) -> Quantized:
    """Quantize to int8 codes -1, 0 and 1, and one float32 scale b [1, 1].

    Raises ValueError unless all weights are finite.

    >>> q = quantize(np.array([[1.0, -2.0, 0.25, 0.75]]))
    >>> q.codes, q.scales
    (array([[ 1, -1,  0,  1]], dtype=int8), array([[1.]], dtype=float32))
    """
    w = finite(w)
    scale = np.maximum(np.float32(np.mean(np.abs(w))), SMALLEST)
    codes = np.rint(w.astype(np.float32) * (1 / scale)).clip(-1, 1)
    return Quantized(codes.astype(np.int8), scale.reshape(1, 1))


def quantize_tokens(x: Float[np.ndarray, "*batch dim"]) -> Quantized:
    """Quantize to int8 codes and float32 scales [*batch, 1].

    A scale is a token's largest magnitude (at least 10^-5), divided by 127. Raises ValueError unless all of x is
    finite.

    >>> quantize_tokens(np.array([[127.0, -0.5, 1.5]])).codes
    array([[127,   0,   2]], dtype=int8)
    """
    x32 = finite(x).astype(np.float32)
    tops = np.maximum(np.max(np.abs(x32), axis=-1, keepdims=True), SMALLEST)
    codes = np.rint(x32 * (np.float32(127) / tops)).clip(-128, 127)
    return Quantized(codes.astype(np.int8), tops / np.float32(127))


def dequantize(q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
    """Return each code times its scale, for weights or for tokens."""
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
    """Store t + 1 of each code t in two bits. Byte i of a column has the rows i, i + rows / 4, ..., lowest bits first.

    The number of rows is a multiple of 4.

    >>> pack(np.array([[1], [0], [-1], [1]], np.int8))
    array([[134]], dtype=uint8)
    """
    if codes.shape[0] % 4:
        raise ValueError(f"expected a multiple of 4 rows, got {codes.shape[0]}")
    return packing.pack((codes + np.int8(1)).T, bits=2, stride=codes.shape[0] // 4).T


def unpack(packed: UInt8[np.ndarray, "quarter cols"]) -> Int8[np.ndarray, "rows cols"]:
    """Restore the codes from `pack`. The two bits 11, which `pack` never writes, give the code 2."""
    return packing.unpack(packed.T, bits=2, stride=packed.shape[0]).T.astype(np.int8) - np.int8(1)
