r"""Squared ReLU, the nonlinearity of a feed-forward layer without a gate in Nemotron.

    y_i = max(a_i, 0)^2

A search among many nonlinearities found it (So et al., 2021, Primer, https://arxiv.org/abs/2109.08668). It grows as a
gated layer does, with the square of its input, and most of its outputs are 0.
"""

import numpy as np
from jaxtyping import Float


def squared_relu(x: Float[np.ndarray, "*batch ffn"]) -> Float[np.ndarray, "*batch ffn"]:
    """max(x, 0)^2, in float64.

    >>> squared_relu(np.array([-2.0, 0.0, 3.0]))
    array([0., 0., 9.])
    """
    return np.maximum(x.astype(np.float64, copy=False), 0.0) ** 2
