r"""Backward of attention (FlashAttention-2, Dao, 2023, https://arxiv.org/abs/2307.08691, section 2.3).

With scores s = q k^T / sqrt(d) + M, probabilities p = softmax(s) and outputs o = p v, every step is a product or a
softmax. So the gradients are:

    dv = p^T do        dp = do v^T        ds = p (dp - sum(p dp))
    dq = ds k / sqrt(d)                   dk = ds^T q / sqrt(d)

A masked score has p = 0 and therefore ds = 0: no gradient flows to unseen keys. Query heads with a common key and value
head add up their dk and dv. A kernel keeps one number per row from the forward pass, the logarithm of the sum of
exponentials. With it, the kernel recomputes p one tile at a time. This definition stores all of p.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.backward.softmax import softmax_backward
from llamaspec.reference.softmax import softmax


def attention_backward(
    q: Float[np.ndarray, "*batch queries heads head_dim"],
    k: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    v: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    mask: Float[np.ndarray, "*#batch queries keys"],
    do: Float[np.ndarray, "*batch queries heads head_dim"],
) -> tuple[
    Float[np.ndarray, "*batch queries heads head_dim"],
    Float[np.ndarray, "*batch keys kv_heads head_dim"],
    Float[np.ndarray, "*batch keys kv_heads head_dim"],
]:
    """Compute the gradients of `reference.attention.attention` for q, k and v, in float64.

    >>> q, k, v, do = (np.array(a).reshape(-1, 1, 1) for a in ([0.0], [1.0, 3.0], [2.0, 6.0], [1.0]))
    >>> dq, dk, dv = attention_backward(q, k, v, np.zeros((1, 2)), do)  # p is 1/2 for both keys
    >>> dq.ravel(), dk.ravel(), dv.ravel()  # dp = (2, 6), so ds = (-1, 1)
    (array([2.]), array([0., 0.]), array([0.5, 0.5]))
    """
    q, k, v, do = (a.astype(np.float64, copy=False) for a in (q, k, v, do))
    heads, (kv_heads, head_dim) = q.shape[-2], k.shape[-2:]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")

    def by_group(a: np.ndarray) -> np.ndarray:  # [*batch, kv_heads, group, queries, head_dim]
        return np.moveaxis(a, -2, -3).reshape(*a.shape[:-3], kv_heads, heads // kv_heads, a.shape[-3], head_dim)

    def by_token(a: np.ndarray) -> np.ndarray:  # the inverse of `by_group`
        return np.moveaxis(a.reshape(*a.shape[:-4], heads, *a.shape[-2:]), -3, -2)

    q, do = by_group(q), by_group(do)
    k, v = (np.moveaxis(a, -2, -3)[..., :, None, :, :] for a in (k, v))  # [*batch, kv_heads, 1, keys, head_dim]
    p = softmax((q / np.sqrt(head_dim)) @ k.swapaxes(-1, -2) + mask[..., None, None, :, :])
    ds = softmax_backward(p, do @ v.swapaxes(-1, -2)) / np.sqrt(head_dim)
    dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do  # [*batch, kv_heads, group, keys, head_dim]
    dk, dv = (np.moveaxis(a.sum(axis=-3), -3, -2) for a in (dk, dv))  # [*batch, keys, kv_heads, head_dim]
    return by_token(ds @ k), dk, dv
