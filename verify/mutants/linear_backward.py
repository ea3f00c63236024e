"""Backward of a product with a matrix, and its mutants.

It computes dx by blocks of rows, and dW as a sum over vectors.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def linear_backward(x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch, (rows, cols) = len(x), weight.shape
    dx = np.zeros((batch, cols), np.float32)
    for span in spans(rows, BLOCK):
        dx += f32(dy[:, span]) @ f32(weight[span])
    dweight, dbias = np.zeros((rows, cols), np.float32), np.zeros(rows, np.float32)
    for some in spans(batch, BLOCK):
        dweight += f32(dy[some]).T @ f32(x[some])
        dbias += np.sum(f32(dy[some]), axis=0)
    return dx.astype(x.dtype), dweight.astype(x.dtype), dbias.astype(x.dtype)


IMPLEMENTATION = implementation(
    linear_backward,
    """
tail of the rows left out of dx
    - for span in spans(rows, BLOCK)
    + for span in full_spans(rows, BLOCK)
tail of the batch left out of dW
    - for some in spans(batch, BLOCK)
    + for some in full_spans(batch, BLOCK)
blocks of rows overwritten
    - dx += f32(dy[:, span])
    + dx = f32(dy[:, span])
blocks of vectors overwritten
    - dweight += f32(dy[some]).T
    + dweight = f32(dy[some]).T
only the bias of the last block
    - dbias += np.sum
    + dbias = np.sum
mean over the batch instead of a sum
    - dweight.astype(x.dtype), dbias
    + (dweight / batch).astype(x.dtype), dbias
bias divided by the batch
    - dbias.astype(x.dtype)
    + (dbias / batch).astype(x.dtype)
first vector counted twice
    - dweight, dbias = np.zeros((rows, cols), np.float32), np.zeros(rows, np.float32)
    + dweight, dbias = f32(dy[:1]).T @ f32(x[:1]), np.zeros(rows, np.float32)
last vector left out
    - f32(dy[some]).T @ f32(x[some])
    + f32(dy[some]).T @ (f32(x[some]) * (np.arange(some.start, some.stop) < max(batch - 1, 1))[:, None])
dW summed in bfloat16
    - dweight += f32(dy[some]).T @ f32(x[some])
    + dweight = bf16(dweight + f32(dy[some]).T @ f32(x[some]))
dx summed in bfloat16
    - dx += f32(dy[:, span]) @ f32(weight[span])
    + dx = bf16(dx + f32(dy[:, span]) @ f32(weight[span]))
dx by magnitudes of the weight
    - @ f32(weight[span])
    + @ np.abs(f32(weight[span]))
dy of the first vector for the bias
    - np.sum(f32(dy[some]), axis=0)
    + len(dy[some]) * f32(dy[0])
right up to 4,096 rows
    - spans(rows, BLOCK)
    + spans(min(rows, 4096), BLOCK)
right up to 4,096 vectors
    - spans(batch, BLOCK)
    + spans(min(batch, 4096), BLOCK)
""",
)
