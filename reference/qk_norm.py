r"""Normalised queries and keys, one head at a time (Henry et al., 2020, https://arxiv.org/abs/2010.04245; Qwen3).

    q_h = RMSNorm(q_h, g_q)        k_h = RMSNorm(k_h, g_k)        for every head h, before RoPE

All heads share one weight of head_dim numbers. With unit-sized q and k a score cannot grow with the
size of the activations, which is what makes long trainings diverge.
"""

import numpy as np
from jaxtyping import Float

from reference.rmsnorm import rmsnorm


def qk_norm(
    q: Float[np.ndarray, "*batch seq heads head_dim"],
    k: Float[np.ndarray, "*batch seq kv_heads head_dim"],
    q_weight: Float[np.ndarray, " head_dim"],
    k_weight: Float[np.ndarray, " head_dim"],
    *,
    eps: float,
) -> tuple[
    Float[np.ndarray, "*batch seq heads head_dim"],
    Float[np.ndarray, "*batch seq kv_heads head_dim"],
]:
    """Normalise every head of `q` and of `k`, in float64.

    >>> q, k = np.array([[[3.0, 4.0]]]), np.array([[[0.0, 2.0]]])
    >>> [a.round(4).tolist() for a in qk_norm(q, k, np.ones(2), np.ones(2), eps=0.0)]
    [[[[0.8485, 1.1314]]], [[[0.0, 1.4142]]]]
    """
    return rmsnorm(q, q_weight, eps=eps), rmsnorm(k, k_weight, eps=eps)
