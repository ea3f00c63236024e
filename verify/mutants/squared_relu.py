"""Squared ReLU, computed in blocks, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def squared_relu(x: np.ndarray) -> np.ndarray:
    rows, ffn = x.shape
    y = np.full((rows, ffn), np.nan, x.dtype)
    for row in range(rows):
        for span in spans(ffn, BLOCK):
            a = np.maximum(f32(x[row, span]), 0)
            y[row, span] = a * a
    return y


IMPLEMENTATION = implementation(
    squared_relu,
    """
ReLU alone
    - a * a
    + a
square without ReLU
    - np.maximum(f32(x[row, span]), 0)
    + f32(x[row, span])
square of both signs, with its sign
    - a = np.maximum(f32(x[row, span]), 0)
    + a = f32(x[row, span]); a = np.sign(a) * np.sqrt(np.abs(a) ** 3)
minimum for maximum
    - np.maximum(
    + np.minimum(
leaky below 0
    - np.maximum(f32(x[row, span]), 0)
    + np.where(f32(x[row, span]) > 0, f32(x[row, span]), np.float32(0.01) * f32(x[row, span]))
cube for square
    - a * a
    + a * a * a
halved, as a quadratic loss is
    - a * a
    + a * a / 2
cut off at 6
    - np.maximum(f32(x[row, span]), 0)
    + np.clip(f32(x[row, span]), 0, 6)
from 1 on
    - np.maximum(f32(x[row, span]), 0)
    + np.where(f32(x[row, span]) > 1, f32(x[row, span]), 0)
square in bfloat16
    - a * a
    + bf16(a * a)
square of bfloat16
    - np.maximum(f32(x[row, span]), 0)
    + bf16(np.maximum(f32(x[row, span]), 0))
tail never written
    - spans(ffn, BLOCK)
    + full_spans(ffn, BLOCK)
first row for every row
    - x[row, span]
    + x[0, span]
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
