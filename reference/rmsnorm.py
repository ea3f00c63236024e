r"""Root-mean-square normalization (Zhang & Sennrich, 2019, https://arxiv.org/abs/1910.07467).

Each vector is divided by its own root mean square, then scaled per feature:

    y_i = g_i x_i / sqrt(mean_j(x_j^2) + eps)

This is LayerNorm without the mean and the bias. `eps` is inside the square root. Here nothing is rounded between the
division and the product with g. Hugging Face rounds x / rms to the dtype of x before it multiplies by g, which gives a
different result in bfloat16.
"""

import numpy as np
from jaxtyping import Float


def rmsnorm(
    x: Float[np.ndarray, "*batch dim"],
    weight: Float[np.ndarray, " dim"],
    *,
    eps: float,
) -> Float[np.ndarray, "*batch dim"]:
    """Normalize `x` over its last axis, in float64.

    >>> rmsnorm(np.array([3.0, 4.0]), np.array([1.0, 10.0]), eps=0.0).round(4)
    array([ 0.8485, 11.3137])
    """
    x, weight = x.astype(np.float64, copy=False), weight.astype(np.float64, copy=False)
    mean_square = np.mean(x**2, axis=-1, keepdims=True)  # [*batch, 1]
    return weight * x / np.sqrt(mean_square + eps)
