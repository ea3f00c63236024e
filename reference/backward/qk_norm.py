r"""Backward of the norms of queries and keys: the backward of RMSNorm, one head at a time.

All heads share a weight, so its gradient is a sum over heads and tokens.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.backward.rmsnorm import rmsnorm_backward


def qk_norm_backward(
    q: Float[np.ndarray, "*batch seq heads head_dim"],
    k: Float[np.ndarray, "*batch seq kv_heads head_dim"],
    q_weight: Float[np.ndarray, " head_dim"],
    k_weight: Float[np.ndarray, " head_dim"],
    dq: Float[np.ndarray, "*batch seq heads head_dim"],
    dk: Float[np.ndarray, "*batch seq kv_heads head_dim"],
    *,
    eps: float,
) -> tuple[
    Float[np.ndarray, "*batch seq heads head_dim"],
    Float[np.ndarray, "*batch seq kv_heads head_dim"],
    Float[np.ndarray, " head_dim"],
    Float[np.ndarray, " head_dim"],
]:
    """Compute the gradients of `reference.qk_norm.qk_norm` for q, k and their two weights, in float64.

    `dq` and `dk` are the gradients for the normalized q and k.

    >>> one = np.ones((1, 1, 1))
    >>> qk_norm_backward(one, one, np.ones(1), np.ones(1), one, 2 * one, eps=0.0)
    (array([[[0.]]]), array([[[0.]]]), array([1.]), array([2.]))
    """
    into_q, q_slope = rmsnorm_backward(q, q_weight, dq, eps=eps)
    into_k, k_slope = rmsnorm_backward(k, k_weight, dk, eps=eps)
    return into_q, into_k, q_slope, k_slope
