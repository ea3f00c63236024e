r"""Activations in fixed point, so that their products with integer weights are integer products.

The numbers of a group share an exponent e, and each is rounded to a multiple of 2^(e - bits):

    max_j |x_j| < 2^e        z_j = rint(2^(bits - e) x_j)        x_j ~ 2^(e - bits) z_j

(block floating point: Wilkinson, 1963; for networks Drumond et al., 2018, https://arxiv.org/abs/1804.01526.)
|z_j| is at most 2^bits. Matrix units multiply z_j in pieces of 8 bits. The sums of products with the codes of
weights are then exact in any order, and each is scaled once for its group.

Guaranteed:  |x_j - 2^(e - bits) z_j| <= 2^(e - bits - 1) <= 2^-bits max_j |x_j|

The second inequality holds because 2^(e - 1) <= max_j |x_j|. A number far below the largest one of its group keeps few
bits, or none. That is why groups are short.
"""

import numpy as np
from jaxtyping import Float, Integer, Shaped

from llamaspec.reference.quantizers.blocks import spread
from llamaspec.reference.quantizers.ops import gemv_quantized


def fixed_point(x: Float[np.ndarray, "*batch cols"], *, group: int, bits: int) -> Float[np.ndarray, "*batch cols"]:
    """Round `x` to fixed point, with an exponent for each `group` numbers of a row.

    Returns float64. `group` divides `cols`.

    >>> fixed_point(np.array([3.0, 0.3, -0.3, 0.3]), group=2, bits=3)
    array([ 3.    ,  0.5   , -0.3125,  0.3125])
    """
    x = x.astype(np.float64, copy=False)
    groups = x.reshape(*x.shape[:-1], -1, group)
    exponents = np.frexp(np.max(np.abs(groups), axis=-1))[1]  # the largest is below 2^e
    steps = spread(np.ldexp(1.0, exponents - bits), x.shape)
    return np.rint(x / steps) * steps


def gemv_fixed_point(
    x: Float[np.ndarray, " cols"],
    codes: Integer[np.ndarray, "rows cols"],
    scales: Shaped[np.ndarray, "rows groups"],
    *,
    scheme: str,
) -> Float[np.ndarray, " rows"]:
    """Compute `gemv_quantized`. This op is for kernels that round x to fixed point.

    The exact result is the same as for `gemv_quantized`, but a kernel may have a larger error.

    >>> scales = np.array([[0.5]], np.float32)
    >>> gemv_fixed_point(np.array([1.0, 2.0]), np.array([[4, -1]], np.int8), scales, scheme="q8")
    array([1.])
    """
    return gemv_quantized(x, codes, scales, scheme=scheme)
