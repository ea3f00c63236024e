"""LayerNorm as in kernels, and its mutants.

It takes two passes over each row. Partial sums are added at the end.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *, eps: float) -> np.ndarray:
    rows, dim = x.shape
    y = np.full((rows, dim), np.nan, x.dtype)
    for row in range(rows):
        lanes, squares = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
        for span in spans(dim, BLOCK):
            numbers = f32(x[row, span])
            lanes[: len(numbers)] += numbers
        mean = np.sum(lanes) / np.float32(dim)
        for span in spans(dim, BLOCK):
            part = f32(x[row, span]) - mean
            squares[: len(part)] += part * part
        variance = np.sum(squares) / np.float32(dim)
        scale = 1 / np.sqrt(variance + np.float32(eps))
        for out in spans(dim, BLOCK):
            part = (f32(x[row, out]) - mean) * scale * f32(weight[out])
            y[row, out] = part if bias is None else part + f32(bias[out])
    return y


IMPLEMENTATION = implementation(
    layernorm,
    """
RMSNorm for LayerNorm
    - mean = np.sum(lanes) / np.float32(dim)
    + mean = np.float32(0)
mean left in the output
    - part = (f32(x[row, out]) - mean)
    + part = f32(x[row, out])
mean square for variance
    - part = f32(x[row, span]) - mean
    + part = f32(x[row, span])
mean of squares less the square of the mean, in one pass
    - part = f32(x[row, span]) - mean
    + part = np.sqrt(np.maximum(f32(x[row, span]) * f32(x[row, span]) - mean * mean, 0))
eps outside the root
    - np.sqrt(variance + np.float32(eps))
    + (np.sqrt(variance) + np.float32(eps))
eps left out
    - variance + np.float32(eps)
    + variance + np.float32(1e-12)
eps of another model
    - variance + np.float32(eps)
    + variance + np.float32(1e-5)
variance over dim - 1, as of a sample
    - variance = np.sum(squares) / np.float32(dim)
    + variance = np.sum(squares) / np.float32(max(dim - 1, 1))
mean over the padded dim
    - mean = np.sum(lanes) / np.float32(dim)
    + mean = np.sum(lanes) / np.float32(-(-dim // BLOCK) * BLOCK)
padding counted in the variance
    - variance = np.sum(squares) / np.float32(dim)
    + variance = (np.sum(squares) + mean * mean * (-dim % BLOCK)) / np.float32(dim)
no root
    - np.sqrt(variance + np.float32(eps))
    + (variance + np.float32(eps))
magnitudes for squares
    - part * part
    + np.abs(part)
weight left out
    -  * f32(weight[out])
    +
weight plus one, as Nemotron stores it
    -  * f32(weight[out])
    +  * (1 + f32(weight[out]))
bias left out
    - part if bias is None else part + f32(bias[out])
    + part
bias before the weight
    -  * f32(weight[out])
    +  * f32(weight[out]) + (0 if bias is None else f32(bias[out]) * (f32(weight[out]) - 1))
bias subtracted
    - part + f32(bias[out])
    + part - f32(bias[out])
bias of the first block for every block
    - bias[out]
    + bias[: out.stop - out.start]
weight of the first block for every block
    - weight[out]
    + weight[: out.stop - out.start]
mean of the first row for every row
    - numbers = f32(x[row, span])
    + numbers = f32(x[0, span])
sums not reset between rows
    - lanes, squares = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    + lanes, squares = (np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)) if row == 0 else (lanes, squares)
tail never written
    - for out in spans(dim, BLOCK)
    + for out in full_spans(dim, BLOCK)
mean in bfloat16
    - mean = np.sum(lanes) / np.float32(dim)
    + mean = bf16(np.sum(lanes) / np.float32(dim))
squares in float16
    - part * part
    + f16(part * part)
rounded to bfloat16 before the bias
    - part if bias is None else part + f32(bias[out])
    + bf16(part) if bias is None else bf16(part) + f32(bias[out])
right up to 1,024 columns
    - squares[: len(part)] += part * part
    + squares[: len(part)] += part * part * (span.start < 1024)
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
