r"""AWQ: weights that multiply large activations are scaled up before rounding.

    s_j = m_j^alpha / sqrt(max_k m_k^alpha  min_k m_k^alpha)        m_j = mean |X_j|
    alpha = argmin over 0, 1/20, ..., 19/20 of  || Q(W diag(s)) (X / s) - W X ||^2

(Lin et al., 2023, https://arxiv.org/abs/2306.00978.) X_j are the values of input feature j in a calibration run, and
s_j is the factor for column j of W. If a weight is multiplied by s, rounded and divided by s, its error is 1 / s of the
error without s, as long as the step stays the same. The step hardly grows, because the weight is one of many in its
group. The input must be divided by s. As in `smoothquant`, we divide the weight of the norm before the layer instead. Q
is `affine` in groups along a row: codes of 4 bits, a zero point, and a range that includes zero. (autoawq does not
extend the range, and clips groups with a single sign.) autoawq finds the same s if its option `duo_scaling` is off. The
option is on by default, and also divides m_j^alpha by a mean of the weights' magnitudes to the power 1 - alpha.

Guaranteed: for the X of the calibration, the squared error || Q(W diag(s)) (X / s) - W X ||^2 is at most the error of
plain rounding, || Q(W) X - W X ||^2. The reason is that the search includes alpha = 0, which makes every s_j 1. The
error of a weight in column j is at most the bound of `affine` for W diag(s), divided by s_j. We replace m_j^alpha below
10^-4 by 10^-4, so no s_j is 0. Powers of two: multiplying W by 2^k does not change s. For a fixed s, Q has the laws of
`affine` for W diag(s): the fixed point, and Q(-W) = -Q(W). But a new search on quantized weights may find a different
s.

A checkpoint (autoawq's "gemm") stores transposed arrays: int32 qweight [cols, rows / 8], int32 qzeros [groups, rows /
8] and float16 scales [groups, rows]. An int32 has the 4-bit numbers of eight rows. In order from its lowest bits, they
belong to the rows 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float64, Int32, Integer, UInt8

from llamaspec.reference.quantizers import affine, packing
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import in_float16

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ALPHAS = tuple(k / 20 for k in range(20))


class PackedTensors(NamedTuple):
    """The tensors of a checkpoint."""

    qweight: Int32[np.ndarray, "cols words"]
    qzeros: Int32[np.ndarray, "groups words"]
    scales: Float16[np.ndarray, "groups rows"]


def quantize(w: Float[np.ndarray, "rows cols"], *, group: int) -> Affine:
    """Quantize to 4-bit codes and zero points, and float32 scales [rows, groups]. Raises the errors of `affine`.

    >>> quantize(np.array([[0.0, 15.0]]), group=2).codes
    array([[ 0, 15]], dtype=uint8)
    """
    return affine.quantize(w, bits=4, block=(1, group))


def search(
    w: Float[np.ndarray, "rows cols"],
    x: Float[np.ndarray, "tokens cols"],
    *,
    rounded: Callable[[np.ndarray], np.ndarray],
) -> Float64[np.ndarray, " cols"]:
    """Find the factors s for the inputs `x`. `rounded(w)` is Q: it quantizes and dequantizes weights.

    Raises ValueError for inputs that are not finite.

    >>> w, x = np.array([[1.0, 0.4]]), np.array([[1.0, 100.0]])
    >>> search(w, x, rounded=np.rint).round(3)  # 0.4 is lost without scaling
    array([0.2  , 5.012])
    """
    w, x = w.astype(np.float64), x.astype(np.float64)
    if not np.isfinite(x).all():
        raise ValueError("inputs must be finite, but some of x are NaN or infinite")
    means = np.mean(np.abs(x), axis=0)
    exact = x @ w.T
    least, best = np.inf, np.ones_like(means)
    for alpha in ALPHAS:
        s = scales(means, alpha=alpha)
        loss = np.sum((x / s @ rounded(w * s).T - exact) ** 2)
        if loss < least:
            least, best = loss, s
    return best


def scales(means: Float[np.ndarray, " cols"], *, alpha: float) -> Float64[np.ndarray, " cols"]:
    """Compute the factors s for one alpha. `means[j]` is the mean of |X_j|.

    >>> scales(np.array([1.0, 4.0]), alpha=0.5), scales(np.array([1.0, 4.0]), alpha=0.0)
    (array([0.70710678, 1.41421356]), array([1., 1.]))
    """
    s = np.maximum(means.astype(np.float64) ** alpha, 1e-4)
    return s / np.sqrt(np.max(s) * np.min(s))


def pack(q: Affine) -> PackedTensors:
    """Pack codes and scales for a checkpoint. As in autoawq, scales are rounded to float16; below 2^-25 they become 0.

    Raises ValueError if the number of rows is not a multiple of 8, or if a scale is too large for float16.
    """
    return PackedTensors(_words(q.codes.T), _words(q.zeros.T), in_float16(q.scales.T))


def unpack(packed: PackedTensors) -> Affine:
    """Read the tensors of a checkpoint, with float32 scales.

    >>> w = np.arange(16.0).reshape(8, 2)
    >>> q = quantize(w, group=2)
    >>> np.array_equal(unpack(pack(q)).codes, q.codes)
    True
    """
    codes, zeros = (_codes(words).T for words in (packed.qweight, packed.qzeros))
    return Affine(codes, packed.scales.T.astype(np.float32), zeros)


def _words(codes: Integer[np.ndarray, "n rows"]) -> Int32[np.ndarray, "n words"]:
    if codes.shape[-1] % 8:
        raise ValueError(f"expected a multiple of 8 rows, got {codes.shape[-1]}")
    shuffled = codes.reshape(len(codes), -1, 8)[..., ORDER].reshape(codes.shape)
    return packing.pack(shuffled, bits=4).view("<i4").astype(np.int32)


def _codes(words: Int32[np.ndarray, "n words"]) -> UInt8[np.ndarray, "n rows"]:
    shuffled = packing.unpack(words.astype("<i4").view(np.uint8), bits=4)
    return shuffled.reshape(len(words), -1, 8)[..., np.argsort(ORDER)].reshape(shuffled.shape)
