r"""Attention (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762), causal and grouped.

Query i of head h looks at every key j, and takes the mean of the values, weighted by

    p_ij = softmax_j(<q_ih, k_jg> / sqrt(d) + M_ij)        o_ih = sum_j p_ij v_jg        g = h kv_heads // heads

The mask M is 0 where i may see j and -inf elsewhere. A row that may see nothing gives 0.

Grouped-query attention (Ainslie et al., 2023, https://arxiv.org/abs/2305.13245) is the general
case: consecutive query heads share one key and value head. Multi-head attention has as many of
both, multi-query attention (https://arxiv.org/abs/1911.02150) a single key and value head.

While decoding, keys and values of earlier tokens come from a cache, so the first query is not at
position 0 but at `offset`.
"""

import numpy as np
from jaxtyping import Float

from reference.softmax import softmax


def causal_mask(
    queries: int, keys: int, *, offset: int = 0, window: int | None = None
) -> Float[np.ndarray, "queries keys"]:
    """M for `queries` at positions `offset`, `offset + 1`, ... over keys at positions 0, 1, ...

    Each query sees itself and what came before it; with a `window` (Mistral,
    https://arxiv.org/abs/2310.06825) the last `window` positions only, itself included.

    >>> causal_mask(2, 4, offset=1)
    array([[  0.,   0., -inf, -inf],
           [  0.,   0.,   0., -inf]])
    >>> causal_mask(2, 4, offset=1, window=2)
    array([[  0.,   0., -inf, -inf],
           [-inf,   0.,   0., -inf]])
    """
    i = offset + np.arange(queries)[:, None]
    j = np.arange(keys)
    seen = j <= i if window is None else (j <= i) & (j > i - window)
    return np.where(seen, 0.0, -np.inf)


def attention(
    q: Float[np.ndarray, "*batch queries heads head_dim"],
    k: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    v: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    mask: Float[np.ndarray, "*#batch queries keys"],
) -> Float[np.ndarray, "*batch queries heads head_dim"]:
    """Attend with every query to the keys that `mask` leaves, in float64.

    `heads` is a multiple of `kv_heads`; head h reads key and value head h // (heads / kv_heads).

    >>> q = np.zeros((1, 1, 2))  # one query, which likes both keys alike
    >>> k = v = np.array([[[1.0, 2.0]], [[3.0, 6.0]]])
    >>> attention(q, k, v, causal_mask(1, 2, offset=1))
    array([[[2., 4.]]])
    >>> attention(q, k, v, causal_mask(1, 2, offset=0))
    array([[[1., 2.]]])
    """
    q, k, v = (a.astype(np.float64, copy=False) for a in (q, k, v))
    *batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    # [*batch, kv_heads, group, queries, head_dim] against [*batch, kv_heads, 1, keys, head_dim]
    q = np.moveaxis(q, -2, -3).reshape(*batch, kv_heads, heads // kv_heads, queries, head_dim)
    k, v = (np.moveaxis(a, -2, -3)[..., :, None, :, :] for a in (k, v))
    scores = (q / np.sqrt(head_dim)) @ k.swapaxes(-1, -2) + mask[..., None, None, :, :]  # fewer to divide than scores
    outputs = softmax(scores) @ v  # [*batch, kv_heads, group, queries, head_dim]
    return np.moveaxis(outputs.reshape(*batch, heads, queries, head_dim), -3, -2)
