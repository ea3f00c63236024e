r"""GeGLU, the feed-forward layer's nonlinearity in Gemma (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    y_i = gelu(a_i) b_i        gelu(a) = a/2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3)))

with a = W_gate x and b = W_up x. This is the approximation of a Phi(a) that Hendrycks & Gimpel give (2016,
https://arxiv.org/abs/1606.08415), and the one that Gemma was trained with.
"""

import numpy as np
from jaxtyping import Float


def geglu(
    gate: Float[np.ndarray, "*batch ffn"],
    up: Float[np.ndarray, "*batch ffn"],
) -> Float[np.ndarray, "*batch ffn"]:
    """gelu(gate) * up, in float64.

    >>> geglu(np.array([0.0, 1.0, -1e4]), np.array([5.0, 2.0, 1.0])).round(4)
    array([ 0.    ,  1.6824, -0.    ])
    """
    gate, up = gate.astype(np.float64, copy=False), up.astype(np.float64, copy=False)
    # (1 + tanh(z)) / 2 is a sigmoid of 2 z, which keeps its digits where 1 + tanh(z) cancels.
    twice = 2 * np.sqrt(2 / np.pi) * gate * (1 + 0.044715 * gate**2)
    small = np.exp(-np.abs(twice))
    return gate * np.where(twice < 0, small, 1) / (1 + small) * up
