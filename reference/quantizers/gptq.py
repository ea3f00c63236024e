r"""GPTQ: round column by column, and let the remaining columns compensate each rounding error.

    H = X^T X + lambda I        H^-1 = U^T U with U upper triangular (Cholesky)
    for each column i:    w^_i = Q(w_i)        e_i = (w_i - w^_i) / U_ii        w_j <- w_j - e_i U_ij  for all j > i

(Frantar et al., 2022, https://arxiv.org/abs/2210.17323.) w_i is column i of W, and w^_i the column after quantizing and
dequantizing. X [tokens, cols] are inputs from calibration, and lambda is `damp` times the mean diagonal of X^T X. Q
rounds to the nearest number of a grid that is fixed beforehand: the grid of `affine` or `symmetric` for the original
weights, as in llm-compressor. (The paper computes the grid of a group when it reaches the group, and may take columns
in a different order.) A feature that is never active, H_ii = 0, gets weights of 0.

At the end, W - W^ = E U for the errors E = (e_1, e_2, ...). With the damped H,

    || (W - W^) X^T ||^2 + lambda || W - W^ ||^2  =  tr (W - W^) H (W - W^)^T  =  || E ||^2

Guaranteed: if no code is clipped, |e_i| U_ii <= s / 2, because e_i U_ii = w_i - w^_i is the error of one rounding. So a
row of E has a squared norm of at most sum_i (s_i / (2 U_ii))^2, where s_i is the scale of the row's weight i. There is
no guarantee for a single weight, and none that the output W^ X^T is better than with plain rounding. With correlated
features it is nearly always better. Without correlation (if X^T X is diagonal) both give the same weights.

Powers of two: 2^k W has the same codes as W, and the scales times 2^k. Sign: on the grid of `symmetric`, -W becomes
-W^. On the grid of `affine`, this holds if lo / s is not near a tie in any group (`affine` says how near). W^ is not a
fixed point, because the largest weight of a group may change, and with it the grid.

A checkpoint of AutoGPTQ has four tensors. int32 qweight [cols bits / 32, rows] has the bits of the codes, one column of
W after the other. int32 qzeros [groups, rows bits / 32] has the zero points, one row of W after the other; version 1
stores them minus one. float16 scales is [groups, rows]. int32 g_idx [cols] is the group of each column. If the columns
were quantized in a different order (desc_act: the most active first), the columns of a group are not neighbors.
`quantize` keeps the order of the columns.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float64, Int32, UInt8

from llamaspec.reference.quantizers import affine, packing, symmetric
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import finite, in_float16, spread

DAMP = 0.01  # as in the paper


class PackedTensors(NamedTuple):
    """The tensors of a quantized matrix in a GPTQ checkpoint."""

    qweight: Int32[np.ndarray, "words rows"]
    qzeros: Int32[np.ndarray, "groups words_of_rows"]
    scales: Float16[np.ndarray, "groups rows"]
    g_idx: Int32[np.ndarray, " cols"]


def quantize(
    w: Float[np.ndarray, "rows cols"],
    x: Float[np.ndarray, "tokens cols"],
    *,
    bits: int,
    group: int,
    damp: float = DAMP,
    even: bool = False,
) -> Affine:
    """Quantize `w` by GPTQ for the inputs `x`, on the grid of `affine` in groups along a row.

    With `even`, use the grid of `symmetric` instead, with 2^(bits - 1) as the zero point.

    Raises ValueError for weights or inputs that are not finite, and the errors of `affine`.

    >>> w = np.array([[0.0, 1.4, 1.4, 3.0]])
    >>> together = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]])  # the second and third are always equal
    >>> affine.quantize(w, bits=2, block=(1, 4)).codes, quantize(w, together, bits=2, group=4).codes
    (array([[0, 1, 1, 3]], dtype=uint8), array([[0, 1, 2, 3]], dtype=uint8))
    """
    grid = _even_grid(w, bits, group) if even else affine.quantize(w, bits=bits, block=(1, group))
    hessian = _hessian(x)
    remaining = np.where(np.diag(hessian) == 0, 0, finite(w))
    scales, zeros = (spread(a.astype(np.float64), w.shape) for a in (grid.scales, grid.zeros))
    u = factor(hessian, damp=damp)
    codes = np.zeros(w.shape)
    for i in range(w.shape[1]):
        codes[:, i] = affine.encode(remaining[:, i], scales[:, i], zeros[:, i], lowest=int(even), highest=2**bits - 1)
        errors = (remaining[:, i] - scales[:, i] * (codes[:, i] - zeros[:, i])) / u[i, i]
        remaining[:, i:] -= errors[:, None] * u[i, i:]
    return Affine(codes.astype(np.uint8), grid.scales, grid.zeros)


def _even_grid(w: Float[np.ndarray, "rows cols"], bits: int, group: int) -> Affine:
    codes, scales = symmetric.quantize(w, bits=bits, block=(1, group))
    middle = 1 << bits - 1
    return Affine((codes.astype(np.int16) + middle).astype(np.uint8), scales, np.full(scales.shape, middle, np.uint8))


def factor(hessian: Float64[np.ndarray, "cols cols"], *, damp: float) -> Float64[np.ndarray, "cols cols"]:
    """Compute U, the upper triangular factor with H^-1 = U^T U.

    H is `hessian` (X^T X) with `damp` times its mean diagonal added to the diagonal.

    A zero on the diagonal (a feature that is never active) becomes 1 first.

    >>> factor(np.array([[3.0, 0.0], [0.0, 15.0]]), damp=1 / 9).round(4)
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    diagonal = np.diag(hessian)
    h = hessian + np.diag(np.where(diagonal == 0, 1, 0) + damp * np.mean(diagonal + (diagonal == 0)))
    return np.linalg.cholesky(np.linalg.inv(h)).T


def pack(q: Affine, *, bits: int, version: int) -> PackedTensors:
    """Pack for a checkpoint. Version 1 stores zero points minus one, modulo 2^bits; version 2 stores them unchanged.

    Scales are rounded to float16; below 2^-25 they become 0. Raises ValueError if codes do not fill 32-bit words, or if
    a scale is too large for float16.
    """
    zeros = (q.zeros - (version == 1)) & np.uint8(2**bits - 1)
    groups = q.scales.shape[1]
    g_idx = np.repeat(np.arange(groups, dtype=np.int32), q.codes.shape[1] // groups)
    qzeros = _words(zeros.T.astype(np.uint8), bits)
    return PackedTensors(_words(q.codes, bits).T, qzeros, in_float16(q.scales.T), g_idx)


def unpack(packed: PackedTensors, *, bits: int, version: int) -> Affine:
    """Read the tensors of a checkpoint.

    Scales become float32: one per group, or one per column if groups are not in order.

    Raises ValueError if g_idx names a group that does not exist.

    >>> q = affine.quantize(np.arange(64.0).reshape(8, 8), bits=4, block=(1, 8))
    >>> again = unpack(pack(q, bits=4, version=1), bits=4, version=1)
    >>> np.array_equal(again.codes, q.codes) and np.array_equal(again.zeros, q.zeros)
    True
    """
    zeros = _codes(packed.qzeros, bits).T
    zeros = (zeros + np.uint8(version == 1)) & np.uint8(2**bits - 1)
    scales, g_idx = packed.scales.T.astype(np.float32), packed.g_idx
    groups = scales.shape[1]
    if g_idx.size and not 0 <= g_idx.min() <= g_idx.max() < groups:
        raise ValueError(f"g_idx names groups from {g_idx.min()} to {g_idx.max()}, but there are {groups} groups")
    if not np.array_equal(g_idx, np.repeat(np.arange(groups), len(g_idx) // groups)):
        scales, zeros = scales[:, g_idx], zeros[:, g_idx]
    return Affine(_codes(packed.qweight.T, bits), scales, zeros)


def _hessian(x: Float[np.ndarray, "tokens cols"]) -> Float64[np.ndarray, "cols cols"]:
    if not np.isfinite(x).all():
        raise ValueError("inputs must be finite, but some of x are NaN or infinite")
    return x.astype(np.float64).T @ x.astype(np.float64)


def _words(codes: UInt8[np.ndarray, "n codes"], bits: int) -> Int32[np.ndarray, "n words"]:
    if codes.shape[-1] * bits % 32:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill words of 32 bits")
    return packing.pack(codes, bits=bits).view("<i4").astype(np.int32)


def _codes(words: Int32[np.ndarray, "n words"], bits: int) -> UInt8[np.ndarray, "n codes"]:
    return packing.unpack(np.ascontiguousarray(words.astype("<i4")).view(np.uint8), bits=bits)
