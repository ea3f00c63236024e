r"""Squared ReLU: the nonlinearity in Nemotron, where the feed-forward layer has no gate.

    y_i = max(a_i, 0)^2

A search over many nonlinearities found it (So et al., 2021, Primer, https://arxiv.org/abs/2109.08668). Like a gated
layer, it grows with the square of its input. Most of its outputs are 0.
"""

import numpy as np
from jaxtyping import Float


def squared_relu(x: Float[np.ndarray, "*batch ffn"]) -> Float[np.ndarray, "*batch ffn"]:
    """Return max(x, 0)^2, in float64.

    >>> squared_relu(np.array([-2.0, 0.0, 3.0]))
    array([0., 0., 9.])
    """
    return np.maximum(x.astype(np.float64, copy=False), 0.0) ** 2
