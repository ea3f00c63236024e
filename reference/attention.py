r"""Attention (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762), causal and grouped.

For query i of head h, the output o_ih is a mean of the values v_j, with the weights p_hij:

    p_hij = softmax_j(<q_ih, k_jg> / sqrt(head_dim) + M_ij)       o_ih = sum_j p_hij v_jg       g = h kv_heads // heads

    q, o  [queries, heads, head_dim]        k, v  [keys, kv_heads, head_dim]        p  [heads, queries, keys]

The mask M is 0 if query i may see key j, and -inf otherwise. A query that sees no key gives 0.

The score s_hij is the argument of the softmax. In place of 1 / sqrt(head_dim), Gemma 2 multiplies <q_ih, k_jg> by a
different factor. It then limits the result by `capped`, and adds M.

With attention sinks (gpt-oss, https://arxiv.org/abs/2508.10925; Xiao et al., 2023, https://arxiv.org/abs/2309.17453)
each head has one additional score, the learned number z_h. Its value vector is 0:

    p_hij = exp(s_hij) / (exp(z_h) + sum_j exp(s_hij))

So a head can give little weight to all keys.

While decoding, the keys and values of earlier tokens come from a cache. The first query is then at position `offset`,
not at 0.

Grouped-query attention (GQA; Ainslie et al., 2023, https://arxiv.org/abs/2305.13245) is the general case: consecutive
query heads share a key and value head. Multi-head attention (MHA) has one key and value head per query head.
Multi-query attention (MQA; Shazeer, 2019, https://arxiv.org/abs/1911.02150) has a single one. Sharing makes the cache
smaller. A decoding step reads the whole cache of every text. With the 32 layers and 32 heads of 128 numbers in Llama 3
8B, a position takes 2 * 32 * 128 * kv_heads numbers, of 2 bytes each in bfloat16:

           kv_heads    a position    8,192 positions    W_k and W_v of all layers
    MHA    32          512 KiB       4 GiB              2.1 GB
    GQA    8           128 KiB       1 GiB              0.54 GB      Llama 3
    MQA    1           16 KiB        128 MiB            0.067 GB

The weights of Llama 3 8B take 16 GB. So with MHA, the cache of 4 texts of 8,192 tokens would be as large as the
weights. With GQA, this is true of 16 texts. The arithmetic of attention stays the same: every query head computes its
own scores.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.capped import capped
from llamaspec.reference.softmax import softmax


def causal_mask(
    queries: int, keys: int, *, offset: int = 0, window: int | None = None
) -> Float[np.ndarray, "queries keys"]:
    """Make the mask M for `queries` at positions `offset`, `offset + 1`, ... over keys at positions 0, 1, ...

    Each query sees its own position and all earlier ones. With a `window` (Mistral,
    https://arxiv.org/abs/2310.06825) it sees only the last `window` positions, its own included.

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


def attention_weights(
    q: Float[np.ndarray, "*batch queries heads head_dim"],
    k: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    mask: Float[np.ndarray, "*#batch queries keys"],
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Float[np.ndarray, " heads"] | None = None,
) -> Float[np.ndarray, "*batch heads queries keys"]:
    """Compute p, the weight of each key for each query, in float64.

    We multiply the products of q and k by `scale` (None: 1 / sqrt(head_dim)), then apply the soft `cap`, if any, and
    then add the mask. The weights of a query sum to 1, or to 0 if it sees no key. With `sinks`, the sum is less than 1.
    Head h reads key head h // (heads / kv_heads). Raises ValueError unless `heads` is a multiple of `kv_heads`.

    >>> q = np.zeros((2, 1, 2))  # two queries with equal scores for both keys
    >>> k = np.array([[[1.0, 2.0]], [[3.0, 6.0]]])
    >>> attention_weights(q, k, causal_mask(2, 2))
    array([[[1. , 0. ],
            [0.5, 0.5]]])
    >>> attention_weights(q, k, causal_mask(2, 2), sinks=np.array([np.log(2.0)])).round(4)
    array([[[0.3333, 0.    ],
            [0.25  , 0.25  ]]])
    """
    q, k = (a.astype(np.float64, copy=False) for a in (q, k))
    *batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    # [*batch, kv_heads, group, queries, head_dim] against [*batch, kv_heads, 1, head_dim, keys]
    q = np.moveaxis(q, -2, -3).reshape(*batch, kv_heads, heads // kv_heads, queries, head_dim)
    k = np.moveaxis(k, -2, -3)[..., :, None, :, :].swapaxes(-1, -2)
    scores = (q / np.sqrt(head_dim) if scale is None else q * scale) @ k  # fewer divisions than for scores
    scores = (scores if cap is None else capped(scores, cap=cap)) + mask[..., None, None, :, :]
    if sinks is None:
        return softmax(scores).reshape(*batch, heads, queries, scores.shape[-1])
    z = sinks.astype(np.float64, copy=False).reshape(kv_heads, -1, 1, 1)
    with_sink = np.concatenate([scores, np.broadcast_to(z, (*scores.shape[:-1], 1))], axis=-1)
    return softmax(with_sink)[..., :-1].reshape(*batch, heads, queries, scores.shape[-1])


def attention(
    q: Float[np.ndarray, "*batch queries heads head_dim"],
    k: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    v: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    mask: Float[np.ndarray, "*#batch queries keys"],
) -> Float[np.ndarray, "*batch queries heads head_dim"]:
    """Attend with every query to the keys that `mask` allows, in float64, with weights from `attention_weights`.

    `heads` is a multiple of `kv_heads`; head h reads key and value head h // (heads / kv_heads).

    >>> q = np.zeros((1, 1, 2))  # one query with equal scores for both keys
    >>> k = v = np.array([[[1.0, 2.0]], [[3.0, 6.0]]])
    >>> attention(q, k, v, causal_mask(1, 2, offset=1))
    array([[[2., 4.]]])
    >>> attention(q, k, v, causal_mask(1, 2, offset=0))
    array([[[1., 2.]]])
    """
    return weighted(attention_weights(q, k, mask), v)


def sink_attention(
    q: Float[np.ndarray, "*batch queries heads head_dim"],
    k: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    v: Float[np.ndarray, "*batch keys kv_heads head_dim"],
    sinks: Float[np.ndarray, " heads"],
    mask: Float[np.ndarray, "*#batch queries keys"],
) -> Float[np.ndarray, "*batch queries heads head_dim"]:
    """Attend like `attention`, with a sink for each head, in float64.

    >>> q = np.zeros((1, 1, 2))  # one query with equal scores for both keys and the sink
    >>> k = v = np.array([[[1.0, 2.0]], [[3.0, 6.0]]])
    >>> sink_attention(q, k, v, np.array([0.0]), causal_mask(1, 2, offset=1)).round(4)
    array([[[1.3333, 2.6667]]])
    """
    return weighted(attention_weights(q, k, mask, sinks=sinks), v)


def weighted(
    p: Float[np.ndarray, "*batch heads queries keys"], v: Float[np.ndarray, "*batch keys kv_heads head_dim"]
) -> Float[np.ndarray, "*batch queries heads head_dim"]:
    """Compute the mean of the values for each query and head, weighted by p, in float64.

    >>> weighted(np.array([[[0.25, 0.75]]]), np.array([[[4.0]], [[8.0]]]))
    array([[[7.]]])
    """
    *batch, heads, queries, keys = p.shape
    kv_heads = v.shape[-2]
    # [*batch, kv_heads, group, queries, keys] times [*batch, kv_heads, 1, keys, head_dim]
    v = np.moveaxis(v.astype(np.float64, copy=False), -2, -3)[..., :, None, :, :]
    outputs = p.reshape(*batch, kv_heads, heads // kv_heads, queries, keys) @ v
    return np.moveaxis(outputs.reshape(*batch, heads, queries, v.shape[-1]), -3, -2)
