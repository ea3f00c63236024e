r"""Attention over a cache of keys and values, in the three forms that a server needs.

A cache holds the keys and values of earlier positions, and room for later ones. With t positions in use,

    prefill   queries i = 0, 1, ... at positions t_0 + i, over the first t_0 + i + 1 positions
    decode    one query, at position t - 1, over the first t positions
    paged     decode, where position j lies at j % page of page table[j // page]

and each is `attention` with the mask that says so. Whatever the cache holds beyond is never read: not
multiplied by 0 either, since 0 times NaN is NaN.

Pages are to a cache what they are to an operating system's memory: sequences grow by a page at a time
from a common pool, so none has to reserve its longest length (Kwon et al., 2023, PagedAttention,
https://arxiv.org/abs/2309.06180).
"""

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.attention import attention, causal_mask


def attention_prefill(
    q: Float[np.ndarray, "batch queries heads head_dim"],
    k: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    v: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    offsets: Int[np.ndarray, " batch"],
    *,
    window: int | None,
) -> Float[np.ndarray, "batch queries heads head_dim"]:
    """Causal attention of a chunk of queries over a cache that holds their own keys already.

    Query i of a row is at position offset + i and sees the last `window` positions up to its own, or all of them.

    >>> q = np.zeros((1, 2, 1, 1))  # likes all keys alike
    >>> v = np.array([2.0, 4.0, 9.0, np.nan]).reshape(1, 4, 1, 1)
    >>> attention_prefill(q, v, v, np.array([1]), window=None).ravel()
    array([3., 5.])
    >>> attention_prefill(q, v, v, np.array([1]), window=1).ravel()
    array([4., 9.])
    """
    rows = []
    for one, keys, held, offset in zip(q, k, v, offsets.tolist(), strict=True):
        used = offset + len(one)
        mask = causal_mask(len(one), used, offset=offset, window=window)
        rows.append(attention(one, keys[:used], held[:used], mask))
    return np.stack(rows)


def attention_decode(
    q: Float[np.ndarray, "batch heads head_dim"],
    k: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    v: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    lengths: Int[np.ndarray, " batch"],
    *,
    window: int | None,
) -> Float[np.ndarray, "batch heads head_dim"]:
    """Attention of one query a row over the first `lengths` positions of its cache, or the last `window` of those.

    Over no positions at all the result is 0.

    >>> q = np.zeros((2, 1, 1))
    >>> v = np.array([[2.0, 4.0], [np.nan, np.nan]]).reshape(2, 2, 1, 1)
    >>> attention_decode(q, v, v, np.array([2, 0]), window=None).ravel()
    array([3., 0.])
    """
    rows = []
    for one, keys, held, length in zip(q, k, v, lengths.tolist(), strict=True):
        start = 0 if window is None else max(length - window, 0)
        rows.append(attention(one[None], keys[start:length], held[start:length], np.zeros((1, length - start)))[0])
    return np.stack(rows)


def attention_paged(
    q: Float[np.ndarray, "batch heads head_dim"],
    k_pages: Float[np.ndarray, "pages page kv_heads head_dim"],
    v_pages: Float[np.ndarray, "pages page kv_heads head_dim"],
    table: Int[np.ndarray, "batch blocks"],
    lengths: Int[np.ndarray, " batch"],
) -> Float[np.ndarray, "batch heads head_dim"]:
    """`attention_decode` over a cache in pages.

    Entries of the table beyond a row's length name some page all the same, which is never read.

    >>> pages = np.array([[2.0, 4.0], [9.0, np.nan]]).reshape(2, 2, 1, 1)
    >>> attention_paged(np.zeros((1, 1, 1)), pages, pages, np.array([[0, 1]]), np.array([3])).ravel()
    array([5.])
    """
    k, v = (pages[table].reshape(len(table), -1, *pages.shape[2:]) for pages in (k_pages, v_pages))
    return attention_decode(q, k, v, lengths, window=None)
