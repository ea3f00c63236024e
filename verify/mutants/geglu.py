"""GeGLU, computed in blocks, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def geglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    rows, ffn = gate.shape
    y = np.full((rows, ffn), np.nan, gate.dtype)
    for row in range(rows):
        for span in spans(ffn, BLOCK):
            a, b = f32(gate[row, span]), f32(up[row, span])
            z = np.float32(0.7978845608) * (a + np.float32(0.044715) * a * a * a)
            gelu = a * (1 + np.tanh(z)) / 2
            y[row, span] = gelu * b
    return y


IMPLEMENTATION = implementation(
    geglu,
    """
gate and up swapped
    - a, b = f32(gate[row, span]), f32(up[row, span])
    + b, a = f32(gate[row, span]), f32(up[row, span])
SiLU for GELU
    - gelu = a * (1 + np.tanh(z)) / 2
    + gelu = a / (1 + np.exp(-np.clip(a, -80, 80)))
quick GELU
    - gelu = a * (1 + np.tanh(z)) / 2
    + gelu = a / (1 + np.exp(-np.clip(np.float32(1.702) * a, -80, 80)))
ReLU for GELU
    - gelu = a * (1 + np.tanh(z)) / 2
    + gelu = np.maximum(a, 0)
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
    - gelu = a * (1 + np.tanh(z)) / 2
    + gelu = a * (1 + np.tanh(z))
minus for plus
    - (1 + np.tanh(z))
    + (1 - np.tanh(z))
tanh in bfloat16
    - np.tanh(z)
    + bf16(np.tanh(z))
polynomial in float16
    - gelu = a * (1 + np.tanh(z)) / 2
    + gelu = a * (1 + np.tanh(f16(np.clip(z, -1000, 1000)))) / 2
gate cut off at 7
    - a, b = f32(gate[row, span]), f32(up[row, span])
    + a, b = np.minimum(f32(gate[row, span]), 7), f32(up[row, span])
up left out
    - gelu * b
    + gelu
up plus one
    - gelu * b
    + gelu * (b + 1)
tail never written
    - spans(ffn, BLOCK)
    + full_spans(ffn, BLOCK)
first row of up for every row
    - up[row, span]
    + up[0, span]
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
