"""Exact attention over a KV cache, and an error bound for kernels that round attention weights to bfloat16."""

from typing import Any

import ml_dtypes
import numpy as np

from llamaspec.reference.attention import causal_mask
from llamaspec.verify.bounds.running_error import Approx, attended, exactly, rounded
from tests.support.strategies import assert_within, roundoff

BFLOAT16: Any = ml_dtypes.bfloat16
LARGEST = 2e4  # largest score, positive or negative


def pointed(heads: int, keys: int, head_dim: int, *, dtype: Any = BFLOAT16) -> tuple[np.ndarray, np.ndarray]:
    """Draw q [heads, head_dim] and keys [keys, head_dim] with scores from -2e4 to 2e4.

    exp overflows unless the kernel subtracts the maximum. The attention weights are 0 or 1. Even heads attend to the
    last key, odd heads to the first.
    """
    q, k = np.zeros((heads, head_dim), dtype), np.zeros((keys, head_dim), dtype)
    most = np.sqrt(LARGEST * np.sqrt(head_dim))
    q[:, 0] = most * (-1) ** np.arange(heads)
    k[:, 0] = np.linspace(-most, most, keys)
    return q, k


def assert_attends(actual, q, k, v, offset: int, *, stop: int, window: int | None, tile: int) -> None:
    """Compare `actual` [seq, heads * head_dim] with exact attention of q [seq, heads, head_dim] over k and v.

    The queries are at positions `offset`, `offset` + 1, ...; keys and values are the first `stop` rows of k and v
    [kv_heads, capacity, head_dim]. The bound allows for an online softmax over tiles of `tile` keys. Rows that no query
    sees are ignored.
    """
    seq, heads, head_dim = q.shape
    mask = causal_mask(seq, stop, offset=offset, window=window)
    seen = np.isfinite(mask).any(axis=0)
    if not seen.any():
        np.testing.assert_array_equal(actual, np.zeros((seq, heads * head_dim)))
        return
    mask = mask[:, seen]
    k, v = (exactly(a[:, :stop][:, seen].swapaxes(0, 1)) for a in (k, v))
    # Each tile rescales once, and joining the parts rescales once more.
    o = attended(exactly(q), k, v, mask, blocks=mask.shape[1] // tile + 3)
    if q.dtype != np.float32:  # rounded before the product with v, but not in their own sum
        weighted = attended(exactly(q), k, Approx(np.abs(v.value), v.error), mask).value
        o = Approx(o.value, o.error + roundoff(q.dtype) * (weighted + o.error))
    o = rounded(o.map(lambda part: part.reshape(seq, -1)), 0.0 if q.dtype == np.float32 else roundoff(q.dtype))
    assert_within(actual, o.value, o.error)
