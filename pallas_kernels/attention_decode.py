r"""Attention while decoding: one query a head, over a cache whose length is known only at run time.

    o_h = sum_j softmax_j(<q_h, k_jg> / sqrt(d)) v_jg        j < length,  g = h kv_heads // heads

`reference.attention` for the last of `length` positions. All that matters is to read keys and values once, at the
speed of the memory: `key_ring` says which of them a thread block reads, `attention_split` what it does with them
(in float32 `attention_split_float32`), and `attention_combine` how the blocks' parts become one output.
"""

from functools import partial

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.parts.attention_parts import attend_in_parts, check_attention, choose_splits, keys_of_a_tile
from pallas_kernels.parts.compat import Target, current_target
from pallas_kernels.unsupported import Unsupported


def attention_decode(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    lengths: Int[Array, " batch"],
    *,
    window: int | None = None,
    splits: int | None = None,
) -> Float[Array, "batch width"]:
    """Attention of the query at position length - 1 to all keys up to its own, heads side by side.

    With a `window`, to the last `window` of them. A length is clamped to 0 ... capacity; one of 0 gives zeros. What
    the cache holds elsewhere, NaN included, does not matter. `splits`, the thread blocks that share a head's keys (1
    or a multiple of 4), are as many as `choose_splits` says unless given.

    q, k and v are all float32 or all bfloat16; sums and exponentials are float32, and the result is rounded once. In
    bfloat16 the weights are rounded before they multiply v, too. Raises ValueError where shapes or dtypes do not fit,
    for heads that are not 64 or 128 wide, a capacity that is no multiple of 8, and more than 8 heads a key head (in
    bfloat16, more that are no multiple of 8).

    Reads the visible keys and values once; writes and reads heads x head_dim float32 for each split but a single one,
    where a key head with less than 8 query heads writes as much as one with 8, in bfloat16.
    """
    check_attention("attention_decode", q, k, v, lengths, window=window, splits=splits)
    if len(k) != len(q):
        raise ValueError(f"attention_decode takes a cache for each of {len(q)} queries, got k {k.shape}")
    if k.shape[2] % 8:
        raise Unsupported(f"attention_decode takes a capacity in multiples of 8, got {k.shape[2]}")
    batch, kv_heads, capacity, head_dim = k.shape
    heads, seen = batch * kv_heads, min(capacity, window or capacity)
    keys = keys_of_a_tile(heads, q.shape[1] // kv_heads, head_dim, k.dtype, seen)
    splits = splits or choose_splits(heads, capacity, keys)
    return _attention_decode(q, k, v, lengths, window=window, keys=keys, splits=splits, target=current_target())


@partial(jax.jit, static_argnames=("window", "keys", "splits", "target"))
def _attention_decode(q, k, v, lengths, *, window: int | None, keys: int, splits: int, target: Target):
    def locate(ref, row, head, tile):
        return [ref.at[row, head, pl.ds(tile * keys, keys)]]

    return attend_in_parts(
        "attention_decode",
        locate,
        q,
        k,
        v,
        lengths,
        capacity=k.shape[2],
        tile=keys,
        pieces=1,
        window=window,
        splits=splits,
        target=target,
    )
