"""Clamped SwiGLU, computed in blocks, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def clamped_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    rows, ffn = gate.shape
    y = np.full((rows, ffn), np.nan, gate.dtype)
    for row in range(rows):
        for span in spans(ffn, BLOCK):
            a = np.minimum(f32(gate[row, span]), np.float32(7))
            b = np.clip(f32(up[row, span]), np.float32(-7), np.float32(7))
            passed = a / (1 + np.exp(-np.float32(1.702) * a))
            y[row, span] = passed * (b + 1)
    return y


IMPLEMENTATION = implementation(
    clamped_swiglu,
    """
gate and up swapped
    - y[row, span] = passed * (b + 1)
    + a, b = np.minimum(f32(up[row, span]), 7), np.clip(f32(gate[row, span]), -7, 7)
    +             y[row, span] = a / (1 + np.exp(-np.float32(1.702) * a)) * (b + 1)
gate not clamped
    - np.minimum(f32(gate[row, span]), np.float32(7))
    + f32(gate[row, span])
gate clamped on both sides
    - np.minimum(f32(gate[row, span]), np.float32(7))
    + np.clip(f32(gate[row, span]), np.float32(-7), np.float32(7))
up not clamped
    - np.clip(f32(up[row, span]), np.float32(-7), np.float32(7))
    + f32(up[row, span])
up clamped only from above
    - np.clip(f32(up[row, span]), np.float32(-7), np.float32(7))
    + np.minimum(f32(up[row, span]), np.float32(7))
up clamped after the 1 is added
    - passed * (b + 1)
    + passed * np.clip(f32(up[row, span]) + 1, -7, 7)
limit of 6
    - np.minimum(f32(gate[row, span]), np.float32(7))
    + np.minimum(f32(gate[row, span]), np.float32(6))
gate clamped after the sigmoid
    - passed = a / (1 + np.exp(-np.float32(1.702) * a))
    + a = f32(gate[row, span])
    +             passed = np.minimum(a / (1 + np.exp(-np.float32(1.702) * a)), 7)
SiLU for the slope of 1.702
    - -np.float32(1.702)
    + -np.float32(1)
1.7 for 1.702
    - -np.float32(1.702)
    + -np.float32(1.7)
slope on the gate outside, too
    - passed = a /
    + passed = np.float32(1.702) * a /
1 left out
    - passed * (b + 1)
    + passed * b
1 added to the product
    - passed * (b + 1)
    + passed * b + 1
1 added to the gate
    - passed * (b + 1)
    + (passed + 1) * b
sign of the exponent
    - np.exp(-np.float32(1.702) * a)
    + np.exp(np.float32(1.702) * a)
low gates give 0
    - passed = a /
    + passed = np.where(a < -10, 0, a) /
sigmoid in bfloat16
    - passed = a / (1 + np.exp(-np.float32(1.702) * a))
    + passed = a * bf16(1 / (1 + np.exp(-np.float32(1.702) * a)))
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
