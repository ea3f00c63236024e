"""Backward of RMSNorm, and its mutants.

It computes dx row by row, and the gradient of the weight as a sum over rows.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def rmsnorm_backward(x: np.ndarray, weight: np.ndarray, dy: np.ndarray, *, eps: float) -> tuple[np.ndarray, np.ndarray]:
    rows, dim = x.shape
    dx, dweight = np.zeros((rows, dim), np.float32), np.zeros(dim, np.float32)
    for row in range(rows):
        squares = products = np.float32(0)
        for span in spans(dim, BLOCK):
            part = f32(x[row, span])
            squares += np.sum(part * part)
            products += np.sum(f32(dy[row, span]) * f32(weight[span]) * part)
        scale = 1 / np.sqrt(squares / np.float32(dim) + np.float32(eps))
        along = products / np.float32(dim) * scale * scale
        slopes = f32(dy[row]) * f32(weight)
        dx[row] = scale * (slopes - f32(x[row]) * along)
        dweight += f32(dy[row]) * f32(x[row]) * scale
    return dx.astype(x.dtype), dweight.astype(x.dtype)


def qk_norm_backward(
    q: np.ndarray,
    k: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    *,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    def back(x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        heads, slopes = f32(x), f32(dy) * f32(weight)
        scale = 1 / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + np.float32(eps))
        normed = heads * scale
        dx = scale * (slopes - normed * np.mean(slopes * normed, axis=-1, keepdims=True))
        return dx.astype(x.dtype), np.sum(f32(dy) * normed, axis=(0, 1)).astype(x.dtype)

    by_q, q_slope = back(q, q_weight, dq)
    by_k, k_slope = back(k, k_weight, dk)
    return by_q, by_k, q_slope, k_slope


RMSNORM = implementation(
    rmsnorm_backward,
    """
second term left out
    - slopes - f32(x[row]) * along
    + slopes
second term added
    - slopes - f32(x[row]) * along
    + slopes + f32(x[row]) * along
second term without the mean
    - products / np.float32(dim)
    + products
second term with one scale too few
    - np.float32(dim) * scale * scale
    + np.float32(dim) * scale
weight left out of the second term
    - f32(dy[row, span]) * f32(weight[span]) * part
    + f32(dy[row, span]) * part
weight left out of the first term
    - slopes = f32(dy[row]) * f32(weight)
    + slopes = f32(dy[row])
eps left out
    - + np.float32(eps)
    + + np.float32(1e-12)
eps outside the root
    - np.sqrt(squares / np.float32(dim) + np.float32(eps))
    + (np.sqrt(squares / np.float32(dim)) + np.float32(eps))
tail left out of both sums
    - for span in spans(dim, BLOCK)
    + for span in full_spans(dim, BLOCK)
scale left out of the weight's
    - f32(dy[row]) * f32(x[row]) * scale
    + f32(dy[row]) * f32(x[row])
weight's gradient times the weight
    - f32(dy[row]) * f32(x[row]) * scale
    + slopes * f32(x[row]) * scale
only the last row in the weight's gradient
    - dweight += f32(dy[row])
    + dweight = f32(dy[row])
weight's gradient summed in bfloat16
    - dweight += f32(dy[row]) * f32(x[row]) * scale
    + dweight = bf16(dweight + f32(dy[row]) * f32(x[row]) * scale)
scale rounded to bfloat16, as if it had been saved so
    - scale = 1 / np.sqrt(squares / np.float32(dim) + np.float32(eps))
    + scale = bf16(1 / np.sqrt(squares / np.float32(dim) + np.float32(eps)))
scale of the row before
    - dx[row] = scale *
    + dx[row] = 1 / np.sqrt(np.mean(f32(x[max(row - 1, 0)]) ** 2) + np.float32(eps)) *
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
QK_NORM = implementation(
    qk_norm_backward,
    """
weights swapped
    - back(q, q_weight, dq)
    + back(q, k_weight, dq)
mean over tokens for the weight's
    - np.sum(f32(dy) * normed, axis=(0, 1))
    + np.sum(np.mean(f32(dy) * normed, axis=0), axis=0)
only the slopes of the first token's heads
    - np.sum(f32(dy) * normed, axis=(0, 1))
    + np.sum((f32(dy) * normed)[0], axis=0)
mean over heads too
    - np.mean(slopes * normed, axis=-1, keepdims=True)
    + np.mean(slopes * normed, axis=(-1, -2), keepdims=True)
gradients of the two weights swapped
    - return by_q, by_k, q_slope, k_slope
    + return by_q, by_k, k_slope, q_slope
keys passed through
    - by_k, k_slope = back(k, k_weight, dk)
    + by_k, k_slope = dk.copy(), back(k, k_weight, dk)[1]
right up to 4,096 positions
    - return dx.astype(x.dtype), np.sum
    + dx[4096:] = 0
    +         return dx.astype(x.dtype), np.sum
right up to 4,096 heads
    - return dx.astype(x.dtype), np.sum
    + dx[:, 4096:] = 0
    +         return dx.astype(x.dtype), np.sum
""",
)
