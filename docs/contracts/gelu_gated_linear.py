"""A GELU-gated linear layer (GEGLU, https://arxiv.org/abs/2002.05202): two products and a gate, in one kernel."""

import numpy as np

from llamaspec.verify.contract import independent
from llamaspec.verify.declare import declare, sizes, values
from llamaspec.verify.mutant import f32, implementation


def gelu_gated_linear(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gelu(gate x) * (up x), with the tanh form of GELU (https://arxiv.org/abs/1606.08415)."""
    a, b = x @ gate.T, x @ up.T
    return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))) * b


CONTRACT = declare(
    gelu_gated_linear,
    arrays={"x": "batch cols", "gate": "ffn cols", "up": "ffn cols"},
    sizes={"batch": [1, 2, 3, 7], "ffn": sizes(8, 16, most=33), "cols": sizes(8, 32, 64, most=129)},
    draws={"x": values(-4, 0), "gate": values(-4, 0), "up": values(-4, 0)},
    laws=[independent("a vector", "x")],
)


def right(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Compute in float32, and round once."""
    a, b = f32(x) @ f32(gate).T, f32(x) @ f32(up).T
    inner = np.float32(np.sqrt(2 / np.pi)) * (a + np.float32(0.044715) * a * a * a)
    return (np.float32(0.5) * a * (1 + np.tanh(inner)) * b).astype(x.dtype)


MUTANTS = implementation(
    right,
    """
gate and up swapped
    - a, b = f32(x) @ f32(gate).T, f32(x) @ f32(up).T
    + b, a = f32(x) @ f32(gate).T, f32(x) @ f32(up).T
a sigmoid for tanh
    - np.float32(0.5) * a * (1 + np.tanh(inner))
    + a / (1 + np.exp(-np.float32(1.702) * a))
silu for gelu
    - np.float32(0.5) * a * (1 + np.tanh(inner))
    + a / (1 + np.exp(-a))
cubic term left out
    - (a + np.float32(0.044715) * a * a * a)
    + a
gate left out
    - np.float32(0.5) * a * (1 + np.tanh(inner)) * b
    + b
hidden layer in bfloat16
    - a, b = f32(x) @ f32(gate).T, f32(x) @ f32(up).T
    + a, b = bf16(f32(x) @ f32(gate).T), f32(x) @ f32(up).T
right up to 1,024 columns
    - f32(x) @ f32(up).T
    + f32(x)[:, :1024] @ f32(up)[:, :1024].T
right up to 64 vectors
    - a, b = f32(x) @ f32(gate).T, f32(x) @ f32(up).T
    + a, b = f32(x) @ f32(gate).T, f32(x[np.arange(len(x)) % 65]) @ f32(up).T
""",
    op="gelu_gated_linear",
)
