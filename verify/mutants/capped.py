"""Soft caps, computed row by row, and their mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def capped(x: np.ndarray, *, cap: float) -> np.ndarray:
    y = np.full(x.shape, np.nan, x.dtype)
    limit = np.float32(cap)
    for row in range(len(x)):
        scores = f32(x[row])
        y[row] = limit * np.tanh(scores / limit)
    return y


IMPLEMENTATION = implementation(
    capped,
    """
cut off hard
    - limit * np.tanh(scores / limit)
    + np.clip(scores, -limit, limit)
not capped
    - limit * np.tanh(scores / limit)
    + scores
not stretched back
    - limit * np.tanh(scores / limit)
    + np.tanh(scores / limit)
not divided first
    - scores / limit
    + scores
multiplied by the cap first
    - scores / limit
    + scores * limit
always a cap of 50
    - limit = np.float32(cap)
    + limit = np.float32(50)
always a cap of 30
    - limit = np.float32(cap)
    + limit = np.float32(30)
an exponential that overflows
    - np.tanh(scores / limit)
    + (1 - 2 / (np.exp(2 * scores / limit) + 1)) * (scores < 40 * limit)
by 1 - 2 / (e^2x + 1), which cancels near 0
    - np.tanh(scores / limit)
    + (1 - 2 / (np.exp(np.minimum(2 * scores / limit, 80)) + 1))
arctangent for tanh
    - np.tanh(scores / limit)
    + np.arctan(scores / limit)
x / (1 + |x|) for tanh
    - np.tanh(scores / limit)
    + (scores / limit / (1 + np.abs(scores / limit)))
sign lost
    - np.tanh(scores / limit)
    + np.tanh(np.abs(scores) / limit)
quotient in bfloat16
    - scores / limit
    + bf16(scores / limit)
tanh in float16
    - np.tanh(scores / limit)
    + f16(np.tanh(scores / limit))
small numbers left as they are
    - scores / limit)
    + scores / limit) * (np.abs(scores) > limit / 8) + scores * (np.abs(scores) <= limit / 8)
first row for every row
    - f32(x[row])
    + f32(x[0])
right up to 256 columns
    - np.tanh(scores / limit)
    + np.tanh(scores / limit) * (np.arange(len(scores)) < 256)
right up to 1,024 columns
    - np.tanh(scores / limit)
    + np.tanh(scores / limit) * (np.arange(len(scores)) < 1024)
right up to 64 rows
    - f32(x[row])
    + f32(x[row % 64])
right up to 4,096 rows
    - f32(x[row])
    + f32(x[row % 4096])
""",
)
