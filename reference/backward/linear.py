r"""Backward of the linear layer: two products, each with a transposed factor of the forward product.

    y = W x + b        dx = W^T dy        dW = sum over the vectors of dy x^T        db = sum dy

An entry of W multiplies one feature of every vector x of a batch, so its gradient is a sum over all vectors. For this
reason we can cut a batch into parts, and add the gradients of the parts.
"""

import numpy as np
from jaxtyping import Float


def linear_backward(
    x: Float[np.ndarray, "*batch cols"],
    weight: Float[np.ndarray, "rows cols"],
    dy: Float[np.ndarray, "*batch rows"],
) -> tuple[Float[np.ndarray, "*batch cols"], Float[np.ndarray, "rows cols"], Float[np.ndarray, " rows"]]:
    """Compute the gradients of `reference.linear.linear` for x, the weight and the bias, in float64.

    >>> linear_backward(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]), np.array([[10.0]]))
    (array([[30., 40.]]), array([[10., 20.]]), array([10.]))
    """
    x, weight, dy = (a.astype(np.float64, copy=False) for a in (x, weight, dy))
    rows_of_dy = dy.reshape(-1, dy.shape[-1])  # [vectors, rows]
    return dy @ weight, rows_of_dy.T @ x.reshape(-1, x.shape[-1]), rows_of_dy.sum(axis=0)
