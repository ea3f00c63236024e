"""SwiGLU, computed in blocks, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    rows, ffn = gate.shape
    y = np.full((rows, ffn), np.nan, gate.dtype)
    for row in range(rows):
        for span in spans(ffn, BLOCK):
            a, b = f32(gate[row, span]), f32(up[row, span])
            silu = a / (1 + np.exp(-a))
            y[row, span] = silu * b
    return y


IMPLEMENTATION = implementation(
    swiglu,
    """
gate and up swapped
    - a, b = f32(gate[row, span]), f32(up[row, span])
    + b, a = f32(gate[row, span]), f32(up[row, span])
sigmoid for silu
    - silu = a / (1 + np.exp(-a))
    + silu = 1 / (1 + np.exp(-a))
ReLU for silu
    - silu = a / (1 + np.exp(-a))
    + silu = np.maximum(a, 0)
GELU for silu
    - silu = a / (1 + np.exp(-a))
    + silu = a * (1 + np.tanh(0.7978845608 * (a + 0.044715 * a**3))) / 2
quick GELU for silu
    - silu = a / (1 + np.exp(-a))
    + silu = a / (1 + np.exp(-np.float32(1.702) * a))
sign of the exponent
    - np.exp(-a)
    + np.exp(a)
overflows for large gates
    - silu = a / (1 + np.exp(-a))
    + silu = a * np.exp(a) / (1 + np.exp(a))
gate cut off at 7
    - a, b = f32(gate[row, span]), f32(up[row, span])
    + a, b = np.minimum(f32(gate[row, span]), 7), f32(up[row, span])
low gates give 0
    - silu = a / (1 + np.exp(-a))
    + silu = np.where(a < -10, 0, a / (1 + np.exp(-a)))
up left out
    - silu * b
    + silu
up plus one
    - silu * b
    + silu * (b + 1)
silu in bfloat16
    - silu = a / (1 + np.exp(-a))
    + silu = bf16(a / (1 + np.exp(-a)))
exponential in float16
    - np.exp(-a)
    + f16(np.exp(-a))
tail never written
    - spans(ffn, BLOCK)
    + full_spans(ffn, BLOCK)
first row of up for every row
    - up[row, span]
    + up[0, span]
gate and up taken from one interleaved row
    - a, b = f32(gate[row, span]), f32(up[row, span])
    + a, b = f32(gate[row, span]), f32(gate[row, span])
right up to 4,096 columns
    - spans(ffn, BLOCK)
    + spans(min(ffn, 4096), BLOCK)
right up to 1,024 rows
    - up[row, span]
    + up[row % 1024, span]
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
