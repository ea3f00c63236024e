r"""Low-rank adapters: LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685).

Fine-tuning keeps the matrix W, and learns two small matrices, A [r, cols] and B [rows, r]:

    W' = W + s B A        y = W' x = W x + s B (A x)

alpha is a hyperparameter. With s = alpha / r, the size of s B A does not grow with the rank r. With s = alpha /
sqrt(r), adapters of a large rank also learn well (rsLoRA, https://arxiv.org/abs/2312.03732). The chain rule gives

    dA = s B^T dW' = s (B^T dy) x^T        dB = s dW' A^T = s dy (A x)^T        dx = W^T dy + s A^T (B^T dy)

Training begins with B = 0, so the adapted model is the original one, and dA = 0 in the first step.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.backward.linear import linear_backward
from llamaspec.reference.linear import linear


def lora(
    x: Float[np.ndarray, "*batch cols"],
    weight: Float[np.ndarray, "rows cols"],
    a: Float[np.ndarray, "rank cols"],
    b: Float[np.ndarray, "rows rank"],
    *,
    scale: float,
) -> Float[np.ndarray, "*batch rows"]:
    """Multiply each vector of `x` by W and by the adapter, and add the results, in float64.

    >>> lora(np.array([1.0, 2.0]), np.eye(2), np.array([[1.0, 1.0]]), np.array([[1.0], [0.0]]), scale=0.5)
    array([2.5, 2. ])
    """
    return linear(x, weight) + linear(scale * linear(x, a), b)


def lora_merged(
    weight: Float[np.ndarray, "rows cols"],
    a: Float[np.ndarray, "rank cols"],
    b: Float[np.ndarray, "rows rank"],
    *,
    scale: float,
) -> Float[np.ndarray, "rows cols"]:
    """Compute the matrix W' = W + s B A, in float64.

    >>> lora_merged(np.eye(2), np.array([[1.0, 1.0]]), np.array([[1.0], [0.0]]), scale=0.5)
    array([[1.5, 0.5],
           [0. , 1. ]])
    """
    return weight.astype(np.float64) + scale * b.astype(np.float64) @ a.astype(np.float64)


def lora_backward(
    x: Float[np.ndarray, "*batch cols"],
    weight: Float[np.ndarray, "rows cols"],
    a: Float[np.ndarray, "rank cols"],
    b: Float[np.ndarray, "rows rank"],
    dy: Float[np.ndarray, "*batch rows"],
    *,
    scale: float,
) -> tuple[Float[np.ndarray, "*batch cols"], Float[np.ndarray, "rank cols"], Float[np.ndarray, "rows rank"]]:
    """Compute the gradients of `lora` for x, A and B, in float64. W gets none: training does not change W.

    >>> a, b = np.array([[1.0, 1.0]]), np.array([[0.0], [0.0]])
    >>> dx, da, db = lora_backward(np.array([1.0, 2.0]), np.eye(2), a, b, np.array([1.0, 0.0]), scale=0.5)
    >>> dx.tolist(), da.tolist(), db.tolist()
    ([1.0, 0.0], [[0.0, 0.0]], [[1.5], [0.0]])
    """
    scaled_dy = scale * dy.astype(np.float64)
    dhidden, db, _ = linear_backward(linear(x, a), b, scaled_dy)
    dx, da, _ = linear_backward(x, a, dhidden)
    return linear(dy, weight.T) + dx, da, db
