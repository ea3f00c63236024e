"""The residual connection, computed in blocks, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    rows, dim = x.shape
    total = np.full((rows, dim), np.nan, x.dtype)
    for row in range(rows):
        for span in spans(dim, BLOCK):
            total[row, span] = f32(x[row, span]) + f32(y[row, span])
    return total


IMPLEMENTATION = implementation(
    add,
    """
difference instead of sum
    - f32(x[row, span]) + f32(y[row, span])
    + f32(x[row, span]) - f32(y[row, span])
residual added twice
    - f32(x[row, span]) + f32(y[row, span])
    + 2 * f32(x[row, span]) + f32(y[row, span])
residual left out
    - f32(x[row, span]) + f32(y[row, span])
    + f32(y[row, span])
sum in bfloat16
    - f32(x[row, span]) + f32(y[row, span])
    + bf16(f32(x[row, span]) + f32(y[row, span]))
inputs in float16
    - f32(x[row, span]) + f32(y[row, span])
    + f16(x[row, span]) + f16(y[row, span])
tail never written
    - spans(dim, BLOCK)
    + full_spans(dim, BLOCK)
first row of y for every row
    - y[row, span]
    + y[0, span]
first block of y for every block
    - y[row, span]
    + y[row, : span.stop - span.start]
saturated as fp16 is
    - total[row, span] = f32(x[row, span]) + f32(y[row, span])
    + total[row, span] = np.clip(f32(x[row, span]) + f32(y[row, span]), -65504, 65504)
right up to 1,024 columns
    - y[row, span]
    + y[row, span] * (span.start < 1024)
right up to 4,096 rows
    - y[row, span]
    + y[row % 4096, span]
right up to 64 rows
    - for row in range(rows)
    + for row in range(min(rows, 64))
""",
)
