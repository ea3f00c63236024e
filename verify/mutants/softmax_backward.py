"""Backward of softmax, and its mutants.

The sum of each row is computed in blocks.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def softmax_backward(p: np.ndarray, dp: np.ndarray) -> np.ndarray:
    rows, n = p.shape
    dx = np.full((rows, n), np.nan, p.dtype)
    for row in range(rows):
        total = np.float32(0)
        for span in spans(n, BLOCK):
            total += np.sum(f32(p[row, span]) * f32(dp[row, span]))
        for out in spans(n, BLOCK):
            dx[row, out] = f32(p[row, out]) * (f32(dp[row, out]) - total)
    return dx


IMPLEMENTATION = implementation(
    softmax_backward,
    """
the sum left out
    - f32(dp[row, out]) - total
    + f32(dp[row, out])
the sum added
    - f32(dp[row, out]) - total
    + f32(dp[row, out]) + total
the sum not weighted
    - f32(p[row, span]) * f32(dp[row, span])
    + f32(dp[row, span])
mean for sum
    - (f32(dp[row, out]) - total)
    + (f32(dp[row, out]) - total / np.float32(n))
probability outside of the bracket twice
    - f32(p[row, out]) *
    + f32(p[row, out]) ** 2 *
probability left out
    - f32(p[row, out]) *
    + (f32(p[row, out]) > 0) *
derivative of a sigmoid
    - (f32(dp[row, out]) - total)
    + f32(dp[row, out]) * (1 - f32(p[row, out]))
tail left out of the sum
    - for span in spans(n, BLOCK)
    + for span in full_spans(n, BLOCK)
tail never written
    - for out in spans(n, BLOCK)
    + for out in full_spans(n, BLOCK)
only the sum of the last block
    - total += np.sum
    + total = np.sum
sum not reset between rows
    - total = np.float32(0)
    + total = np.float32(0) if row == 0 else total
sum of the first row for every row
    - total += np.sum(f32(p[row, span]) * f32(dp[row, span]))
    + total += np.sum(f32(p[0, span]) * f32(dp[0, span]))
sum rounded to bfloat16
    - total += np.sum(f32(p[row, span]) * f32(dp[row, span]))
    + total = bf16(total + np.sum(f32(p[row, span]) * f32(dp[row, span])))
slopes rounded to float16
    - f32(dp[row, out]) - total
    + f16(f32(dp[row, out])) - total
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
