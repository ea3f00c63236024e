"""GELU by tanh, computed in blocks, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def gelu(x: np.ndarray) -> np.ndarray:
    rows, ffn = x.shape
    y = np.full((rows, ffn), np.nan, x.dtype)
    for row in range(rows):
        for span in spans(ffn, BLOCK):
            a = f32(x[row, span])
            z = np.float32(0.7978845608) * (a + np.float32(0.044715) * a * a * a)
            y[row, span] = a * (1 + np.tanh(z)) / 2
    return y


IMPLEMENTATION = implementation(
    gelu,
    """
SiLU for GELU
    - a * (1 + np.tanh(z)) / 2
    + a / (1 + np.exp(-np.clip(a, -80, 80)))
quick GELU
    - a * (1 + np.tanh(z)) / 2
    + a / (1 + np.exp(-np.clip(np.float32(1.702) * a, -80, 80)))
ReLU for GELU
    - a * (1 + np.tanh(z)) / 2
    + np.maximum(a, 0)
square for cube
    - np.float32(0.044715) * a * a * a
    + np.float32(0.044715) * a * a
no cube at all
    - np.float32(0.044715) * a * a * a
    + 0
0.0447 for 0.044715
    - np.float32(0.044715)
    + np.float32(0.0447)
sqrt(2) / pi for sqrt(2 / pi)
    - np.float32(0.7978845608)
    + np.float32(0.4501581581)
half forgotten
    - a * (1 + np.tanh(z)) / 2
    + a * (1 + np.tanh(z))
minus for plus
    - (1 + np.tanh(z))
    + (1 - np.tanh(z))
tanh in bfloat16
    - np.tanh(z)
    + bf16(np.tanh(z))
cut off at 7
    - a = f32(x[row, span])
    + a = np.minimum(f32(x[row, span]), 7)
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
