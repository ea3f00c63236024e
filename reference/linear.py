r"""The linear layer: every learned matrix of a Llama is one of these.

    y = W x + b        W is [rows, cols]

A row of W makes one number of y. With one vector x this is a GEMV, a general matrix-vector product, and the time goes
into reading W once. With many it is a GEMM, a product of two matrices, and the time goes into arithmetic. That is the
whole difference between decoding and prefill. Llama has no biases; Qwen2 has them on q, k and v.
"""

import numpy as np
from jaxtyping import Float


def linear(
    x: Float[np.ndarray, "*batch cols"],
    weight: Float[np.ndarray, "rows cols"],
    bias: Float[np.ndarray, " rows"] | None = None,
) -> Float[np.ndarray, "*batch rows"]:
    """Multiply every vector of `x` by `weight` and add `bias`, in float64.

    >>> linear(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [0.0, 3.0]]), np.array([0.5, 0.0]))
    array([3.5, 6. ])
    """
    y = x.astype(np.float64, copy=False) @ weight.astype(np.float64, copy=False).T
    return y if bias is None else y + bias.astype(np.float64)


def gemv(x: Float[np.ndarray, " cols"], weight: Float[np.ndarray, "rows cols"]) -> Float[np.ndarray, " rows"]:
    """W x for one vector, without a bias.

    >>> gemv(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [0.0, 3.0]]))
    array([3., 6.])
    """
    return linear(x, weight)


def gemm(x: Float[np.ndarray, "batch cols"], weight: Float[np.ndarray, "rows cols"]) -> Float[np.ndarray, "batch rows"]:
    """x W^T for several vectors, without a bias.

    >>> gemm(np.array([[1.0, 2.0], [1.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 3.0]]))
    array([[3., 6.],
           [1., 0.]])
    """
    return linear(x, weight)
