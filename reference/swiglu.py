r"""SwiGLU, the feed-forward layer's nonlinearity (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    y_i = silu(a_i) b_i        silu(a) = a / (1 + exp(-a))

Here a = W_gate x and b = W_up x. silu(a_i) decides how much of feature b_i passes.
"""

import numpy as np
from jaxtyping import Float


def swiglu(
    gate: Float[np.ndarray, "*batch ffn"],
    up: Float[np.ndarray, "*batch ffn"],
) -> Float[np.ndarray, "*batch ffn"]:
    """Return silu(gate) * up, in float64.

    >>> swiglu(np.array([0.0, np.log(3.0), -1e4]), np.array([5.0, 4.0, 1.0])).round(4)
    array([ 0.    ,  3.2958, -0.    ])
    """
    gate, up = gate.astype(np.float64, copy=False), up.astype(np.float64, copy=False)
    small = np.exp(-np.abs(gate))  # exp(-gate) overflows for large negative gates
    sigmoid = np.where(gate < 0, small, 1) / (1 + small)
    return gate * sigmoid * up
