r"""The linear layer. Every learned matrix of a Llama is one.

    y = W x + b        W is [rows, cols]

Each row of W gives one number of y. With one vector x, this is a general matrix-vector product (GEMV), which spends
most of its time reading W. With many vectors, it is a matrix-matrix product (GEMM), which spends most of its time on
arithmetic. Decoding uses GEMVs and prefill uses GEMMs; this is the main difference between them. Llama has no biases;
Qwen2 has them in q, k and v.
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
    """Multiply one vector by the weight, W x, without a bias.

    >>> gemv(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [0.0, 3.0]]))
    array([3., 6.])
    """
    return linear(x, weight)


def gemm(x: Float[np.ndarray, "batch cols"], weight: Float[np.ndarray, "rows cols"]) -> Float[np.ndarray, "batch rows"]:
    """Multiply several vectors by the weight, x W^T, without a bias.

    >>> gemm(np.array([[1.0, 2.0], [1.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 3.0]]))
    array([[3., 6.],
           [1., 0.]])
    """
    return linear(x, weight)
