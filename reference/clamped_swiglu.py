r"""Clamped SwiGLU, the experts' nonlinearity in gpt-oss (OpenAI, 2025, https://arxiv.org/abs/2508.10925).

    y_i = g_i sigmoid(1.702 g_i) (u_i + 1)        g = min(a, 7)        u = max(-7, min(b, 7))

Here a = W_gate x and b = W_up x. g sigmoid(1.702 g) approximates the GELU (Hendrycks & Gimpel, 2016,
https://arxiv.org/abs/1606.08415). The limits keep a single feature of an expert from growing without bound. The gate
needs only an upper limit, because for negative g the sigmoid approaches 0. Because of the + 1, an expert with W_up = 0
still has the output g sigmoid(1.702 g). The model card describes the limits and the + 1. The numbers 1.702 and 7 come
from OpenAI's code.
"""

import numpy as np
from jaxtyping import Float

SLOPE = 1.702  # factor of the gate in its sigmoid
LIMIT = 7.0


def clamped_swiglu(
    gate: Float[np.ndarray, "*batch ffn"],
    up: Float[np.ndarray, "*batch ffn"],
) -> Float[np.ndarray, "*batch ffn"]:
    """Return min(gate, 7) sigmoid(1.702 min(gate, 7)) (up + 1), with up clamped to -7 and 7, in float64.

    >>> clamped_swiglu(np.array([0.0, 1.0, 9.0, -1e4]), np.array([5.0, 2.0, -9.0, 1.0])).round(4)
    array([  0.    ,   2.5374, -41.9997,  -0.    ])
    """
    gate = np.minimum(gate.astype(np.float64, copy=False), LIMIT)
    up = np.clip(up.astype(np.float64, copy=False), -LIMIT, LIMIT)
    small = np.exp(-SLOPE * np.abs(gate))  # exp(-gate) overflows for large negative gates
    return gate * np.where(gate < 0, small, 1) / (1 + small) * (up + 1)
