"""RMSNorm, computed row by row as in kernels, and its mutants.

Each row has partial sums (lanes), which are added at the end.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def rmsnorm(x: np.ndarray, weight: np.ndarray, *, eps: float) -> np.ndarray:
    rows, dim = x.shape
    y = np.full((rows, dim), np.nan, x.dtype)
    for row in range(rows):
        lanes = np.zeros(BLOCK, np.float32)
        for span in spans(dim, BLOCK):
            part = f32(x[row, span])
            lanes[: len(part)] += part * part
        mean = np.sum(lanes) / np.float32(dim)
        scale = 1 / np.sqrt(mean + np.float32(eps))
        for out in spans(dim, BLOCK):
            y[row, out] = f32(x[row, out]) * scale * f32(weight[out])
    return y


IMPLEMENTATION = implementation(
    rmsnorm,
    """
eps outside the root
    - np.sqrt(mean + np.float32(eps))
    + (np.sqrt(mean) + np.float32(eps))
eps left out
    - mean + np.float32(eps)
    + mean + np.float32(1e-12)
eps of another model
    - mean + np.float32(eps)
    + mean + np.float32(1e-5)
eps divided by dim
    - mean = np.sum(lanes) / np.float32(dim)
    + mean = (np.sum(lanes) + eps) / np.float32(dim) - eps
variance for mean square
    - part = f32(x[row, span])
    + part = f32(x[row, span]) - f32(x[row]).mean()
sum for mean
    - np.sum(lanes) / np.float32(dim)
    + np.sum(lanes)
mean over dim - 1
    - np.float32(dim)
    + np.float32(max(dim - 1, 1))
mean over the padded dim
    - np.float32(dim)
    + np.float32(-(-dim // BLOCK) * BLOCK)
no root
    - np.sqrt(mean + np.float32(eps))
    + (mean + np.float32(eps))
magnitudes for squares
    - part * part
    + np.abs(part)
weight left out
    -  * f32(weight[out])
    + 
weight used twice (torchtune #11)
    -  * f32(weight[out])
    +  * f32(weight[out]) ** 2
weight plus one, as Gemma has it
    -  * f32(weight[out])
    +  * (1 + f32(weight[out]))
weight of the first block for every block
    - weight[out]
    + weight[: out.stop - out.start]
tail left out of the sum (Liger #519)
    - for span in spans(dim, BLOCK)
    + for span in full_spans(dim, BLOCK)
tail never written
    - for out in spans(dim, BLOCK)
    + for out in full_spans(dim, BLOCK)
last feature left out of the sum
    - part * part
    + part * part * (np.arange(len(part)) + span.start < max(dim - 1, 1))
scale of the first row for every row
    - part = f32(x[row, span])
    + part = f32(x[0, span])
sum not reset between rows
    - np.zeros(BLOCK, np.float32)
    + np.zeros(BLOCK, np.float32) if row == 0 else lanes
squares summed in bfloat16
    - lanes[: len(part)] += part * part
    + lanes[: len(part)] = bf16(lanes[: len(part)] + part * part)
squares in float16
    - part * part
    + f16(part * part)
scale in bfloat16
    - scale = 1 / np.sqrt(mean + np.float32(eps))
    + scale = bf16(1 / np.sqrt(mean + np.float32(eps)))
rounded to bfloat16 before the weight
    - f32(x[row, out]) * scale *
    + bf16(f32(x[row, out]) * scale) *
right up to 1,024 columns
    - lanes[: len(part)] += part * part
    + lanes[: len(part)] += part * part * (span.start < 1024)
right up to 8,192 columns
    - for out in spans(dim, BLOCK)
    + for out in spans(min(dim, 8192), BLOCK)
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
