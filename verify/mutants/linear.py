"""Products with a matrix, and their mutants.

Each dot product has parallel partial sums (lanes), and adds a block of columns at a time.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def gemv(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    rows, cols = weight.shape
    y = np.full(rows, np.nan, x.dtype)
    for row in range(rows):
        lanes = np.zeros(BLOCK, np.float32)
        for span in spans(cols, BLOCK):
            products = f32(weight[row, span]) * f32(x[span])
            lanes[: len(products)] += products
        y[row] = np.sum(lanes)
    return y


def gemm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    batch, rows = len(x), len(weight)
    cols = x.shape[1]
    y = np.full((batch, rows), np.nan, x.dtype)
    for i in spans(batch, 8):
        for j in spans(rows, 16):
            tile = np.zeros((i.stop - i.start, j.stop - j.start), np.float32)
            for k in spans(cols, BLOCK):
                tile += f32(x[i, k]) @ f32(weight[j, k]).T
            y[i, j] = tile
    return y


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    y = f32(x) @ f32(weight).T
    if bias is not None:
        y = y + f32(bias)
    return y.astype(x.dtype)


GEMV = implementation(
    gemv,
    """
tail left out
    - for span in spans(cols, BLOCK)
    + for span in full_spans(cols, BLOCK)
last column left out
    - f32(x[span])
    + np.where(np.arange(span.start, span.stop) < max(cols - 1, 1), f32(x[span]), 0)
lanes overwritten by each block
    - lanes[: len(products)] += products
    + lanes[: len(products)] = products
lanes not reset between rows
    - lanes = np.zeros(BLOCK, np.float32)
    + lanes = np.zeros(BLOCK, np.float32) if row == 0 else lanes
vector of the first block for every block
    - x[span]
    + x[: span.stop - span.start]
row of the neighbor
    - weight[row, span]
    + weight[min(row + 1, rows - 1), span]
last row never written
    - y[row] = np.sum(lanes)
    + y[row] = np.sum(lanes) if row < max(rows - 1, 1) else y[row]
rows after the last multiple of 4 never written
    - for row in range(rows)
    + for row in range(max(rows // 4 * 4, 1))
matrix read transposed
    - weight[row, span]
    + weight.reshape(cols, rows).T[row, span]
summed in bfloat16
    - lanes[: len(products)] += products
    + lanes[: len(products)] = bf16(lanes[: len(products)] + products)
summed in float16
    - y[row] = np.sum(lanes)
    + y[row] = f16(np.sum(lanes))
inputs rounded to bfloat16
    - f32(x[span])
    + bf16(x[span])
inputs cut to TF32
    - f32(x[span])
    + (f32(x[span]).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
half of the lanes left out (xserv)
    - np.sum(lanes)
    + np.sum(lanes[: BLOCK // 2])
lanes that were never set (xserv)
    - lanes = np.zeros(BLOCK, np.float32)
    + lanes = np.where(np.arange(BLOCK) < cols, np.float32(0), np.float32(np.nan))
magnitudes for products
    - f32(weight[row, span]) * f32(x[span])
    + np.abs(f32(weight[row, span]) * f32(x[span]))
right up to 1,024 columns
    - lanes[: len(products)] += products
    + lanes[: len(products)] += products * (span.start < 1024)
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
GEMM = implementation(
    gemm,
    """
tail of the columns left out
    - spans(cols, BLOCK)
    + full_spans(cols, BLOCK)
tail of the rows never written
    - spans(rows, 16)
    + full_spans(rows, 16)
tail of the batch never written
    - spans(batch, 8)
    + full_spans(batch, 8)
tile overwritten by each block
    - tile += f32
    + tile = f32
tile not reset
    - tile = np.zeros((i.stop - i.start, j.stop - j.start), np.float32)
    + tile = np.zeros((i.stop - i.start, j.stop - j.start), np.float32) if j.start == 0 else tile[:, : j.stop - j.start]
first rows for every tile
    - weight[j, k]
    + weight[: j.stop - j.start, k]
first vector for every vector
    - x[i, k]
    + np.broadcast_to(x[:1, k], x[i, k].shape)
first vectors for every tile
    - x[i, k]
    + x[: i.stop - i.start, k]
last block of columns twice, overlapping
    - weight[j, k]
    + weight[j, max(k.stop - BLOCK, 0) : k.stop][:, : k.stop - k.start]
product transposed inside the tile
    - y[i, j] = tile
    + y[i, j] = tile.reshape(tile.T.shape).T
summed in bfloat16
    - tile += f32(x[i, k]) @ f32(weight[j, k]).T
    + tile = bf16(tile + f32(x[i, k]) @ f32(weight[j, k]).T)
summed in float16
    - f32(x[i, k]) @ f32(weight[j, k]).T
    + f16(f32(x[i, k]) @ f32(weight[j, k]).T)
weights rounded to bfloat16
    - f32(weight[j, k])
    + bf16(weight[j, k])
second half of the columns, split off, never added
    - spans(cols, BLOCK)
    + spans(cols, BLOCK)[: max(-(-cols // BLOCK) // 2, 1)]
border between two halves counted twice
    - tile += f32(x[i, k]) @ f32(weight[j, k]).T
    + tile += f32(x[i, k.start - (k.start > 0) : k.stop]) @ f32(weight[j, k.start - (k.start > 0) : k.stop]).T
right up to 16 vectors
    - x[i, k]
    + x[i.start % 16 : i.start % 16 + i.stop - i.start, k]
right up to 64 vectors
    - spans(batch, 8)
    + spans(min(batch, 64), 8)
right up to 1,024 rows
    - weight[j, k]
    + weight[j.start % 1024 : j.start % 1024 + j.stop - j.start, k]
right up to 4,096 columns
    - spans(cols, BLOCK)
    + spans(min(cols, 4096), BLOCK)
right up to 4,096 vectors
    - spans(batch, 8)
    + spans(min(batch, 4096), 8)
""",
)
LINEAR = implementation(
    linear,
    """
bias left out
    - y = y + f32(bias)
    + y = y + 0 * f32(bias)
bias twice
    - y = y + f32(bias)
    + y = y + 2 * f32(bias)
bias subtracted
    - y = y + f32(bias)
    + y = y - f32(bias)
bias of the neighbor
    - f32(bias)
    + f32(np.roll(bias, 1))
bias only for the first vector
    - y = y + f32(bias)
    + y = y + f32(bias) * (np.arange(len(x)) == 0)[:, None]
bias in float16
    - f32(bias)
    + f16(bias)
rounded to bfloat16 before the bias
    - y = y + f32(bias)
    + y = bf16(y) + f32(bias)
matrix read transposed
    - f32(weight).T
    + f32(weight).reshape(weight.shape[1], weight.shape[0])
bias right up to 1,024 rows
    - y = y + f32(bias)
    + y = y + f32(bias) * (np.arange(len(bias)) < 1024)
bias right up to 16 vectors
    - y = y + f32(bias)
    + y = y + f32(bias) * (np.arange(len(x)) < 16)[:, None]
bias right up to 4,096 vectors
    - y = y + f32(bias)
    + y = y + f32(bias) * (np.arange(len(x)) < 4096)[:, None]
""",
)
