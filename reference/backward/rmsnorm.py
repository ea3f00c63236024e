r"""Backward of RMSNorm (Zhang & Sennrich, 2019, https://arxiv.org/abs/1910.07467, section 4).

With r = 1 / sqrt(mean(x^2) + eps) and n = r x, the layer is y = g n. The gradients of this product are

    dg = sum over the vectors of dy n        dn = g dy

n depends on x directly and through r, with dr / dx_i = -r^3 x_i / d for vectors of d features. So

    dx = r (dn - n mean(dn n))

For eps = 0, the second term removes the component of dn in the direction of x. The reason is that a longer x has the
same n, so the gradient has no component in that direction. The forward pass can save r, one number per vector, for the
backward kernel.
"""

import numpy as np
from jaxtyping import Float


def rmsnorm_backward(
    x: Float[np.ndarray, "*batch dim"],
    weight: Float[np.ndarray, " dim"],
    dy: Float[np.ndarray, "*batch dim"],
    *,
    eps: float,
) -> tuple[Float[np.ndarray, "*batch dim"], Float[np.ndarray, " dim"]]:
    """Compute the gradients of `reference.rmsnorm.rmsnorm` for x and the weight, in float64.

    >>> dx, dg = rmsnorm_backward(np.array([3.0, 4.0]), np.array([1.0, 1.0]), np.array([1.0, 0.0]), eps=0.0)
    >>> dx.round(4), dg.round(4)
    (array([ 0.181 , -0.1358]), array([0.8485, 0.    ]))
    """
    x, weight, dy = (a.astype(np.float64, copy=False) for a in (x, weight, dy))
    r = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)  # [*batch, 1]
    n, dn = x * r, dy * weight
    dx = r * (dn - n * np.mean(dn * n, axis=-1, keepdims=True))
    return dx, np.sum((dy * n).reshape(-1, x.shape[-1]), axis=0)
