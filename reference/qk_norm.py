r"""Normalized queries and keys, one head at a time, as in Qwen3 (https://arxiv.org/abs/2505.09388).

    q_h = RMSNorm(q_h, g_q)        k_h = RMSNorm(k_h, g_k)        for every head h, before RoPE

The weights g_q and g_k have head_dim numbers each, and are the same for all heads. After the norm, the lengths of q and
k no longer depend on the activations. So scores cannot grow during a long training, which could make it diverge. The
idea comes from Henry et al., 2020 (https://arxiv.org/abs/2010.04245), who divide by the Euclidean norm and learn a
single scale.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.layernorm import layernorm
from llamaspec.reference.rmsnorm import rmsnorm


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
    """Normalize every head of `q` and of `k`, in float64.

    >>> q, k = np.array([[[3.0, 4.0]]]), np.array([[[0.0, 2.0]]])
    >>> [a.round(4).tolist() for a in qk_norm(q, k, np.ones(2), np.ones(2), eps=0.0)]
    [[[[0.8485, 1.1314]]], [[[0.0, 1.4142]]]]
    """
    return rmsnorm(q, q_weight, eps=eps), rmsnorm(k, k_weight, eps=eps)


def wide_qk_norm(
    q: Float[np.ndarray, "*batch seq heads head_dim"],
    k: Float[np.ndarray, "*batch seq kv_heads head_dim"],
    q_weight: Float[np.ndarray, " q_width"],
    k_weight: Float[np.ndarray, " k_width"],
    *,
    eps: float,
) -> tuple[
    Float[np.ndarray, "*batch seq heads head_dim"],
    Float[np.ndarray, "*batch seq kv_heads head_dim"],
]:
    """Normalize all heads of `q` as one vector, and likewise `k`, as in OLMo 2 (https://arxiv.org/abs/2501.00656).

    >>> q = np.array([[[3.0, 4.0], [0.0, 5.0]]])
    >>> wide_qk_norm(q, q[:, :1], np.ones(4), np.ones(2), eps=0.0)[0].round(4).tolist()
    [[[0.8485, 1.1314], [0.0, 1.4142]]]
    """
    wide = (rmsnorm(a.reshape(*a.shape[:-2], -1), w, eps=eps) for a, w in ((q, q_weight), (k, k_weight)))
    q_normed, k_normed = wide
    return q_normed.reshape(q.shape), k_normed.reshape(k.shape)


def head_qk_norm(
    q: Float[np.ndarray, "*batch seq heads head_dim"],
    k: Float[np.ndarray, "*batch seq kv_heads head_dim"],
    q_weight: Float[np.ndarray, " q_width"],
    k_weight: Float[np.ndarray, " k_width"],
    *,
    eps: float,
) -> tuple[
    Float[np.ndarray, "*batch seq heads head_dim"],
    Float[np.ndarray, "*batch seq kv_heads head_dim"],
]:
    """Normalize every head by its own LayerNorm, as in StableLM 2 12B (https://arxiv.org/abs/2402.17834).

    >>> q = np.array([[[3.0, 5.0], [0.0, 8.0]]])
    >>> head_qk_norm(q, q[:, :1], np.array([1.0, 1.0, 2.0, 2.0]), np.ones(2), eps=0.0)[0].tolist()
    [[[-1.0, 1.0], [-2.0, 2.0]]]
    """
    q_weight, k_weight = q_weight.reshape(q.shape[-2:]), k_weight.reshape(k.shape[-2:])
    return layernorm(q, q_weight, None, eps=eps), layernorm(k, k_weight, None, eps=eps)
