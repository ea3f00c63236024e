r"""LLM.int8(): int8 with a scale per row, and a few features of the input x in full precision.

    a = max_j |w_j|        q_j = rint(w_j 127 / a)        w_j ~ a q_j / 127        for a row of weights, or a token

    y = sum_(j in O) w_j x_j  +  sum_(j not in O) w_j x_j        O = {j: some token has |x_j| >= 6}

(Dettmers et al., 2022, https://arxiv.org/abs/2208.07339.) O is the set of outlier features. The first sum uses their x
unchanged. The second sum rounds x to int8; its products are integers, and their sum is exact. The weights are int8 in
both sums. In models of at least 6.7 billion parameters, some features are large in every token. With a common scale,
they would leave only a few digits for the other features of the token. As in bitsandbytes, w is multiplied by fl(127 /
a) in float32, ties go to even, and a is stored. The codes are 0 in rows of zeros, and if 127 / a overflows.

Guaranteed, with u = 2^-24: |w - a q / 127| <= (1/2 + 256 u) a / 127, or at most a if a < 127 / 2^127. Reasons: rint
changes a number by at most 1/2. Before rint, fl(127 / a) and the product each have a relative error of u, and the
product is at most 127. For the output, w^ and x^ are the dequantized w and x, and y^ is computed from them. w x - w^ x^
= (w - w^) x + w^ (x - x^), so

    |y - y^| <= sum_j |x_j| |w_j - w^_j|  +  sum_(j not in O) |x_j - x^_j| |w^_j|

Sign: Q(-w) = -Q(w), where Q(w) = w^. Powers of two: the weights 2^k w have the same codes as w, and 2^k a. Fixed point:
Q(Q(w)) = Q(w).

A code is a byte, so there is nothing to pack. bitsandbytes stores int8 `weight` [rows, cols], and a in a separate
tensor, float32 `SCB` [rows].
"""

import numpy as np
from jaxtyping import Float, Float64

from llamaspec.reference.quantizers.blocks import Quantized, finite

THRESHOLD = 6.0  # as in the paper


def quantize(w: Float[np.ndarray, "*batch cols"]) -> Quantized:
    """Quantize to int8 codes, with float32 scales [*batch, 1]: the largest magnitude of each row.

    Raises ValueError unless all weights are finite.

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
    """Return the weights: code times scale, divided by 127."""
    return q.codes * q.scales.astype(np.float64) / 127


def linear(
    x: Float[np.ndarray, "tokens cols"], w: Quantized, *, threshold: float = THRESHOLD
) -> Float64[np.ndarray, "tokens rows"]:
    """Compute W x. Features of `x` that reach `threshold` in any token stay exact; all others are rounded to int8.

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
