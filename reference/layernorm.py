r"""Layer normalization (Ba, Kiros & Hinton, 2016, https://arxiv.org/abs/1607.06450).

Each vector is centered on its own mean and divided by its own standard deviation, then scaled and shifted per feature:

    y_i = g_i (x_i - m) / sqrt(mean_j((x_j - m)^2) + eps) + b_i        m = mean_j(x_j)

RMSNorm is this without m and b. The variance is a mean of squares of differences; mean(x^2) - m^2 is the same number on
paper, and cancels where m is large beside the differences. Nemotron stores g - 1 (its LayerNorm1P), to which a reader
of its files adds 1.
"""

import numpy as np
from jaxtyping import Float


def layernorm(
    x: Float[np.ndarray, "*batch dim"],
    weight: Float[np.ndarray, "*heads dim"],
    bias: Float[np.ndarray, " dim"] | None,
    *,
    eps: float,
) -> Float[np.ndarray, "*batch dim"]:
    """Normalize `x` over its last axis, in float64 whatever the inputs' dtypes; no bias adds nothing.

    >>> layernorm(np.array([3.0, 7.0]), np.array([1.0, 10.0]), np.array([0.5, 0.0]), eps=0.0)
    array([-0.5, 10. ])
    """
    x, weight = x.astype(np.float64, copy=False), weight.astype(np.float64, copy=False)
    centered = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centered**2, axis=-1, keepdims=True)  # [*batch, 1]
    y = weight * centered / np.sqrt(variance + eps)
    return y if bias is None else y + bias.astype(np.float64, copy=False)
