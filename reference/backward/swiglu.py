r"""Backward of SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    y = silu(a) b        db = dy silu(a)        da = dy b silu'(a)

With s = 1 / (1 + exp(-a)), silu(a) = a s and silu'(a) = s + a s (1 - s) = s (1 + a (1 - s)).
"""

import numpy as np
from jaxtyping import Float


def swiglu_backward(
    gate: Float[np.ndarray, "*batch ffn"],
    up: Float[np.ndarray, "*batch ffn"],
    dy: Float[np.ndarray, "*batch ffn"],
) -> tuple[Float[np.ndarray, "*batch ffn"], Float[np.ndarray, "*batch ffn"]]:
    """Compute the gradients of `reference.swiglu.swiglu` for gate and up, in float64.

    >>> swiglu_backward(np.array([0.0]), np.array([4.0]), np.array([1.0]))
    (array([2.]), array([0.]))
    """
    gate, up, dy = (a.astype(np.float64, copy=False) for a in (gate, up, dy))
    small = np.exp(-np.abs(gate))  # exp(-gate) overflows for large negative gates
    sigmoid = np.where(gate < 0, small, 1) / (1 + small)
    complement = np.where(gate < 0, 1, small) / (1 + small)  # 1 - sigmoid, without cancellation
    return dy * up * sigmoid * (1 + gate * complement), dy * gate * sigmoid
