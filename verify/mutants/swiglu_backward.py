"""Backward of SwiGLU, computed element by element, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 128


def swiglu_backward(gate: np.ndarray, up: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, ffn = gate.shape
    dgate, dup = (np.full((rows, ffn), np.nan, gate.dtype) for _ in range(2))
    for row in range(rows):
        for span in spans(ffn, BLOCK):
            a, b, slope = (f32(x[row, span]) for x in (gate, up, dy))
            small = np.exp(-np.abs(a))
            sigmoid = np.where(a < 0, small, np.float32(1)) / (1 + small)
            dgate[row, span] = slope * b * (sigmoid * (1 + a * (1 - sigmoid)))
            dup[row, span] = slope * (a * sigmoid)
    return dgate, dup


IMPLEMENTATION = implementation(
    swiglu_backward,
    """
derivative of the sigmoid for that of silu
    - sigmoid * (1 + a * (1 - sigmoid))
    + sigmoid * (1 - sigmoid)
derivative of silu without its second term
    - sigmoid * (1 + a * (1 - sigmoid))
    + sigmoid
sigmoid left out of the second term
    - sigmoid * (1 + a * (1 - sigmoid))
    + (sigmoid + a * (1 - sigmoid))
sign of the second term
    - 1 + a * (1 - sigmoid)
    + 1 - a * (1 - sigmoid)
second term squared
    - a * (1 - sigmoid)
    + a * (1 - sigmoid) ** 2
gelu's constant in the sigmoid
    - small = np.exp(-np.abs(a))
    + small = np.exp(np.float32(-1.702) * np.abs(a))
up left out
    - slope * b * (sigmoid
    + slope * (sigmoid
slope left out
    - dup[row, span] = slope * (a * sigmoid)
    + dup[row, span] = a * sigmoid
sigmoid for silu
    - slope * (a * sigmoid)
    + slope * sigmoid
gradients swapped
    - return dgate, dup
    + return dup, dgate
tail never written
    - for span in spans(ffn, BLOCK)
    + for span in full_spans(ffn, BLOCK)
first row of up for every row
    - (f32(x[row, span]) for x in (gate, up, dy))
    + (f32(x[r, span]) for x, r in ((gate, row), (up, 0), (dy, row)))
exp overflows for large negative gates
    - small = np.exp(-np.abs(a))
    + small = np.exp(-np.abs(a)) if np.all(a > -88) else np.exp(-a) * np.float32(np.inf)
sigmoid in bfloat16
    - slope * (a * sigmoid)
    + slope * (a * bf16(sigmoid))
derivative in float16
    - (sigmoid * (1 + a * (1 - sigmoid)))
    + f16(sigmoid * (1 + a * (1 - sigmoid)))
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
