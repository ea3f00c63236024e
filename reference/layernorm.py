r"""Layer normalization (Ba, Kiros & Hinton, 2016, https://arxiv.org/abs/1607.06450).

Subtract the vector's mean, divide by its standard deviation, then scale and shift each feature:

    y_i = g_i (x_i - m) / sqrt(mean_j((x_j - m)^2) + eps) + b_i        m = mean_j(x_j)

RMSNorm is the same without m and b. Compute the variance as the mean of (x - m)^2. The expression mean(x^2) - m^2 is
mathematically equal, but it loses digits by cancellation if m is much larger than the differences x - m. Nemotron
stores g - 1 (its LayerNorm1P), so we add 1 when we read its files.
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
    """Normalize `x` over its last axis, in float64. The bias may be None.

    >>> layernorm(np.array([3.0, 7.0]), np.array([1.0, 10.0]), np.array([0.5, 0.0]), eps=0.0)
    array([-0.5, 10. ])
    """
    x, weight = x.astype(np.float64, copy=False), weight.astype(np.float64, copy=False)
    centered = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centered**2, axis=-1, keepdims=True)  # [*batch, 1]
    y = weight * centered / np.sqrt(variance + eps)
    return y if bias is None else y + bias.astype(np.float64, copy=False)
