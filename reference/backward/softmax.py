r"""Backward of softmax.

From p_i = exp(x_i) / sum_j exp(x_j) we get d p_i / d x_j = p_i (1[i = j] - p_j), and so

    dx_i = p_i (dp_i - sum_j p_j dp_j)

The gradients dx_i of a row add up to 0, because adding a constant to all scores changes no probability. The sum over j
is one number per row. FlashAttention (https://arxiv.org/abs/2205.14135, appendix B.2) computes this number from the
output of attention, sum_j p_j dp_j = <o, do>, so it need not store a whole row of p.
"""

import numpy as np
from jaxtyping import Float


def softmax_backward(
    p: Float[np.ndarray, "*batch n"], dp: Float[np.ndarray, "*batch n"]
) -> Float[np.ndarray, "*batch n"]:
    """Compute the gradient of `reference.softmax.softmax` for the scores from its output `p`, in float64.

    A score of -inf has a probability of 0 and a gradient of 0.

    >>> softmax_backward(np.array([0.25, 0.75, 0.0]), np.array([4.0, 0.0, 9.0]))
    array([ 0.75, -0.75,  0.  ])
    """
    p, dp = p.astype(np.float64, copy=False), dp.astype(np.float64, copy=False)
    return p * (dp - np.sum(p * dp, axis=-1, keepdims=True))
