r"""Attention while decoding: one query per head, over a cache with a length that is only known at run time.

    o_h = sum_j softmax_j(<q_h, k_jg> / sqrt(d)) v_jg        j < length,  g = h kv_heads // heads

This is `reference.attention` for the last of `length` positions. The time to read all keys and values once limits the
speed. `parts/key_ring.py` decides which keys a thread block reads. `parts/attention_split.py` computes the block's part
of the result (for float32: `parts/attention_split_float32.py`). `parts/attention_combine.py` combines the parts.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llamaspec.pallas_kernels.parts.attention_parts import (
    attend_in_parts,
    check_attention,
    choose_splits,
    keys_of_a_tile,
)
from llamaspec.pallas_kernels.parts.compat import Target, current_target
from llamaspec.pallas_kernels.unsupported import Unsupported


def attention_decode(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    lengths: Int[Array, " batch"],
    *,
    window: int | None = None,
    splits: int | None = None,
) -> Float[Array, "batch width"]:
    """Attend from the query at position length - 1 to the first `length` keys. width is heads x head_dim.

    With a `window`, the query sees only the last `window` keys. A length is clamped to 0 ... capacity, and 0 gives
    zeros. Unseen rows of the cache may contain anything, including NaN. `splits` is the number of thread blocks per key
    head: 1 or a multiple of 4. If it is None, `choose_splits` chooses it.

    q, k and v are all float32 or all bfloat16. Sums and exponentials are float32, and the result is rounded once. In
    bfloat16 the weights are also rounded before they multiply v. Raises ValueError for shapes that do not fit together.
    Raises Unsupported for other dtypes, heads that are not 64 or 128 wide, a capacity that is not a multiple of 8,
    and more than 8 query heads per key head (bfloat16 also supports 16, 24, ... 64).

    The kernel reads the visible keys and values once. With several splits, each split writes heads x head_dim float32
    numbers, and a second kernel reads them. In bfloat16, these numbers include padding: the query heads of each key
    head are padded to a multiple of 8.
    """
    check_attention("attention_decode", q, k, v, lengths, window=window, splits=splits)
    if len(k) != len(q):
        raise ValueError(f"attention_decode takes k with one sequence per query ({len(q)}), got k {k.shape}")
    if k.shape[2] % 8:
        raise Unsupported(f"attention_decode takes a capacity in multiples of 8, got {k.shape[2]}")
    batch, kv_heads, capacity, head_dim = k.shape
    heads, seen, target = batch * kv_heads, min(capacity, window or capacity), current_target()
    keys = keys_of_a_tile(heads, q.shape[1] // kv_heads, head_dim, k.dtype, seen, target.card)
    splits = splits or choose_splits(heads, capacity, keys, target.card)
    return _attention_decode(q, k, v, lengths, window=window, keys=keys, splits=splits, target=target)


@partial(jax.jit, static_argnames=("window", "keys", "splits", "target"))
def _attention_decode(q, k, v, lengths, *, window: int | None, keys: int, splits: int, target: Target):
    def locate(ref, row, head, tile):
        return [ref.at[row, head, pl.ds(tile * keys, keys)]]

    def locate_rows(ref, row, head, first, rows):
        return ref.at[row, head, pl.ds(pl.multiple_of(jnp.minimum(first, k.shape[2] - rows), 8), rows)]

    whole = target.card.wgmma or k.shape[2] % keys == 0  # TMA reads zeros beyond the last key
    return attend_in_parts(
        "attention_decode",
        locate,
        locate_rows,
        q,
        k,
        v,
        lengths,
        capacity=k.shape[2],
        tile=keys,
        pieces=1 if whole else keys // 8,
        window=window,
        splits=splits,
        target=target,
    )
