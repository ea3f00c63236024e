r"""AWQ: weights that meet large activations are scaled up before they are rounded (Lin et al., 2023,
https://arxiv.org/abs/2306.00978).

    s_j = m_j^alpha / sqrt(max_k m_k^alpha  min_k m_k^alpha)        m_j = mean |X_j|
    alpha = argmin over 0, 1/20, ..., 19/20 of  || Q(W diag(s)) (X / s) - W X ||^2

A weight times s, rounded, over s is off by 1 / s of a step, while the step itself hardly grows, as one
column among the many of a group. As in `smoothquant` the norm before the layer takes 1 / s. Q is `affine`
in groups along a row: codes of 4 bits, a zero point, and a range that holds zero (which autoawq's does
not widen to; it clips groups of one sign). autoawq ends at the same s, but for its `duo_scaling`, which is
on by default and divides m_j^alpha by a mean of the weights' magnitudes to the 1 - alpha, too.

Guaranteed: on the calibration's X the sum is no larger than that of plain rounding, which is among those compared:
alpha = 0 makes every s_j 1.
And what `affine` guarantees, over s. m^alpha is at least 10^-4, so that no s is 0. Powers of two in W leave s
as it is. Fixed points and Q(-W) = -Q(W) are those of `affine` for W diag(s), as long as s is kept: a search
on what was quantized may end elsewhere.

A checkpoint (autoawq's "gemm") holds the transposes: qweight [cols, rows / 8] and qzeros [groups, rows / 8]
of int32, whose nibbles, from the lowest on, are those of the rows 0, 2, 4, 6, 1, 3, 5, 7; and scales
[groups, rows] of float16.
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


class Packed(NamedTuple):
    """The tensors of a checkpoint."""

    qweight: Int32[np.ndarray, "cols words"]
    qzeros: Int32[np.ndarray, "groups words"]
    scales: Float16[np.ndarray, "groups rows"]


def quantize(w: Float[np.ndarray, "rows cols"], *, group: int) -> Affine:
    """Q: codes and zero points of 4 bits, scales of float32 [rows, groups]. Raises ValueError as `affine` does.

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
    """s for the inputs `x`; `rounded` gives the weights that a quantizer makes of weights.

    Raises ValueError for inputs that are not finite.

    >>> w, x = np.array([[1.0, 0.4]]), np.array([[1.0, 100.0]])
    >>> search(w, x, rounded=np.rint).round(3)  # 0.4 is lost unless it is scaled up
    array([0.2  , 5.012])
    """
    w, x = w.astype(np.float64), x.astype(np.float64)
    if not np.isfinite(x).all():
        raise ValueError("inputs must be finite")
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
    """s for one alpha, where `means` is mean |X_j|.

    >>> scales(np.array([1.0, 4.0]), alpha=0.5), scales(np.array([1.0, 4.0]), alpha=0.0)
    (array([0.70710678, 1.41421356]), array([1., 1.]))
    """
    s = np.maximum(means.astype(np.float64) ** alpha, 1e-4)
    return s / np.sqrt(np.max(s) * np.min(s))


def pack(q: Affine) -> Packed:
    """The scales are rounded to float16, as autoawq has them: below 2^-25 to 0.

    Raises ValueError for rows that are no multiple of 8, and for a scale beyond float16.
    """
    return Packed(_words(q.codes.T), _words(q.zeros.T), in_float16(q.scales.T))


def unpack(packed: Packed) -> Affine:
    """Read what a checkpoint says; its scales in float32.

    >>> w = np.arange(16.0).reshape(8, 2)
    >>> q = quantize(w, group=2)
    >>> np.array_equal(unpack(pack(q)).codes, q.codes)
    True
    """
    codes, zeros = (_codes(words).T for words in (packed.qweight, packed.qzeros))
    return Affine(codes, packed.scales.T.astype(np.float32), zeros)


def _words(codes: Integer[np.ndarray, "n rows"]) -> Int32[np.ndarray, "n words"]:
    if codes.shape[-1] % 8:
        raise ValueError(f"{codes.shape[-1]} rows are no multiple of 8")
    shuffled = codes.reshape(len(codes), -1, 8)[..., ORDER].reshape(codes.shape)
    return packing.pack(shuffled, bits=4).view("<i4").astype(np.int32)


def _codes(words: Int32[np.ndarray, "n words"]) -> UInt8[np.ndarray, "n rows"]:
    shuffled = packing.unpack(words.astype("<i4").view(np.uint8), bits=4)
    return shuffled.reshape(len(words), -1, 8)[..., np.argsort(ORDER)].reshape(shuffled.shape)
