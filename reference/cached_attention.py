r"""Attention over a cache of keys and values, in the three forms that a server needs.

A cache holds the keys and values of earlier positions, and has room for later ones. With t positions in use, t_0 of
them before the queries of a prefill,

    prefill   queries i = 0, 1, ... at positions t_0 + i, over the first t_0 + i + 1 positions
    decode    one query, at position t - 1, over the first t positions
    paged     decode, where position j lies at j % page of page table[j // page]

Each form is `attention` with the corresponding mask. The rest of the cache is never read. It is not
multiplied by 0 either, because 0 times NaN is NaN.

Pages work as in an operating system's memory: a sequence grows one page at a time from a common pool,
so it need not reserve space for its maximum length (Kwon et al., 2023, PagedAttention,
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
    """Attend causally from a chunk of queries to a cache.

    The cache already has the keys and values at the queries' positions.

    Query i of a row is at position offset + i. It sees its own position and all earlier ones. With a `window`, it sees
    only the last `window` of these.

    >>> q = np.zeros((1, 2, 1, 1))  # equal scores for all keys
    >>> v = np.array([2.0, 4.0, 9.0, np.nan]).reshape(1, 4, 1, 1)
    >>> attention_prefill(q, v, v, np.array([1]), window=None).ravel()
    array([3., 5.])
    >>> attention_prefill(q, v, v, np.array([1]), window=1).ravel()
    array([4., 9.])
    """
    rows = []
    for query, keys, values, offset in zip(q, k, v, offsets.tolist(), strict=True):
        used = offset + len(query)
        mask = causal_mask(len(query), used, offset=offset, window=window)
        rows.append(attention(query, keys[:used], values[:used], mask))
    return np.stack(rows)


def attention_decode(
    q: Float[np.ndarray, "batch heads head_dim"],
    k: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    v: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    lengths: Int[np.ndarray, " batch"],
    *,
    window: int | None,
) -> Float[np.ndarray, "batch heads head_dim"]:
    """Attend from one query per row to the first `length` positions of its cache, or to the last `window` of these.

    A row with a length of 0 gives zeros.

    >>> q = np.zeros((2, 1, 1))
    >>> v = np.array([[2.0, 4.0], [np.nan, np.nan]]).reshape(2, 2, 1, 1)
    >>> attention_decode(q, v, v, np.array([2, 0]), window=None).ravel()
    array([3., 0.])
    """
    rows = []
    for query, keys, values, length in zip(q, k, v, lengths.tolist(), strict=True):
        start = 0 if window is None else max(length - window, 0)
        rows.append(attention(query[None], keys[start:length], values[start:length], np.zeros((1, length - start)))[0])
    return np.stack(rows)


def attention_paged(
    q: Float[np.ndarray, "batch heads head_dim"],
    k_pages: Float[np.ndarray, "pages page kv_heads head_dim"],
    v_pages: Float[np.ndarray, "pages page kv_heads head_dim"],
    table: Int[np.ndarray, "batch blocks"],
    lengths: Int[np.ndarray, " batch"],
) -> Float[np.ndarray, "batch heads head_dim"]:
    """Compute `attention_decode` over a cache in pages.

    Table entries beyond a row's length must be valid page numbers, but these pages are never read.

    >>> pages = np.array([[2.0, 4.0], [9.0, np.nan]]).reshape(2, 2, 1, 1)
    >>> attention_paged(np.zeros((1, 1, 1)), pages, pages, np.array([[0, 1]]), np.array([3])).ravel()
    array([5.])
    """
    k, v = (pages[table].reshape(len(table), -1, *pages.shape[2:]) for pages in (k_pages, v_pages))
    return attention_decode(q, k, v, lengths, window=None)
