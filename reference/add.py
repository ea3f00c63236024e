"""The residual stream, to which each block adds (He et al., 2015, https://arxiv.org/abs/1512.03385).

    x <- x + f(x)

The vector x that passes from block to block is the residual stream. Each half of a block adds to it by a residual
connection, and never replaces it. So information and gradients can pass through all layers unchanged.
"""

import numpy as np
from jaxtyping import Float


def add(x: Float[np.ndarray, "*batch dim"], y: Float[np.ndarray, "*batch dim"]) -> Float[np.ndarray, "*batch dim"]:
    """Return x + y, in float64.

    >>> add(np.float32([1.0]), np.float32([1e-10]))
    array([1.])
    >>> add(np.float32([1.0]), np.float32([1e-10])) == 1
    array([False])
    """
    return x.astype(np.float64, copy=False) + y.astype(np.float64, copy=False)
