r"""GELU by tanh: the nonlinearity in Starcoder 2, where the feed-forward layer has no gate.

    gelu(a) = a/2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3)))

The exact GELU is a Phi(a), where Phi(a) is the probability that a standard normal number is below a. This is the
approximation by Hendrycks & Gimpel (2016, https://arxiv.org/abs/1606.08415). GPT-2, Gemma and Starcoder 2 were trained
with it.
"""

import numpy as np
from jaxtyping import Float


def gelu(x: Float[np.ndarray, "*batch ffn"]) -> Float[np.ndarray, "*batch ffn"]:
    """Return gelu(x), in float64.

    >>> gelu(np.array([0.0, 1.0, -1e4])).round(4)
    array([ 0.    ,  0.8412, -0.    ])
    """
    x = x.astype(np.float64, copy=False)
    # (1 + tanh(z)) / 2 = sigmoid(2 z), which stays accurate where 1 + tanh(z) cancels.
    twice = 2 * np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x**2)
    small = np.exp(-np.abs(twice))
    return x * np.where(twice < 0, small, 1) / (1 + small)
