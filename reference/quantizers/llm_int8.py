r"""LLM.int8(): rows of int8, and a few features of the input left as they are.

    a = max_j |w_j|        q_j = rint(w_j 127 / a)        w_j ~ a q_j / 127        for a row of weights, or a token

    y = sum_(j in O) w_j x_j  +  sum_(j not in O) w_j x_j        O = {j: some token has |x_j| >= 6}

(Dettmers et al., 2022, https://arxiv.org/abs/2208.07339.) The second sum multiplies int8 and adds exactly;
the first keeps x as it is, so that a feature that is large in every token (there are such, from 6.7 billion
parameters on) does not cost all others their digits. As bitsandbytes has it, w is multiplied by fl(127 / a)
in float32, ties to even, and a is what is stored. The weights of O are those of int8. Where 127 / a
overflows, and in rows of zeros, the codes are 0.

Guaranteed, with u = 2^-24:  |w - a q / 127| <= (1/2 + 256 u) a / 127, or a where a < 127 / 2^127: rint adds half a
step, and before it fl(127 / a) and the product are each off by u of at most 127. As w x - w^ x^ = (w - w^) x +
w^ (x - x^),

    |y - y^| <= sum_j |x_j| |w_j - w^_j|  +  sum_(j not in O) |x_j - x^_j| |w^_j|

Q(-w) = -Q(w), and powers of two pass into a. Quantized weights are a fixed point.

There is nothing to pack: a code is a byte. bitsandbytes stores them as they are, `weight` [rows, cols] of int8, and
a in a tensor of its own, `SCB` [rows] of float32.
"""

import numpy as np
from jaxtyping import Float, Float64

from llamaspec.reference.quantizers.blocks import Quantized, finite

THRESHOLD = 6.0  # of the paper


def quantize(w: Float[np.ndarray, "*batch cols"]) -> Quantized:
    """Codes int8 of w's shape, and a, float32 [*batch, 1]. Raises ValueError unless all is finite.

    >>> q = quantize(np.array([[127.0, -0.5, 1.5]]))
    >>> q.codes, q.scales
    (array([[127,   0,   2]], dtype=int8), array([[127.]], dtype=float32))
    """
    rows = finite(w).astype(np.float32)
    tops = np.max(np.abs(rows), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        factors = np.float32(127) / tops
    codes = np.rint(rows * np.where(np.isfinite(factors), factors, 0))
    return Quantized(codes.astype(np.int8), tops)


def dequantize(q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
    """a q / 127."""
    return q.codes * q.scales.astype(np.float64) / 127


def linear(
    x: Float[np.ndarray, "tokens cols"], w: Quantized, *, threshold: float = THRESHOLD
) -> Float64[np.ndarray, "tokens rows"]:
    """W x; features of `x` that reach `threshold` anywhere stay out of int8. At infinity there are none.

    >>> w = quantize(np.array([[127.0, 1.0]]))
    >>> x = np.array([[0.3, 100.0]])
    >>> linear(x, w).round(4), linear(x, w, threshold=np.inf)  # 0.3 * 127 + 100 = 138.1
    (array([[138.1]]), array([[100.]]))
    """
    outliers = np.any(np.abs(x) >= threshold, axis=0)
    outlier_part = x.astype(np.float64) * outliers @ dequantize(w).T
    tokens = quantize(np.where(outliers, 0, x))
    sums = tokens.codes.astype(np.int64) @ w.codes.astype(np.int64).T
    return outlier_part + sums * (tokens.scales.astype(np.float64) / 127) * (w.scales.astype(np.float64) / 127).T
