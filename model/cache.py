"""The KV cache: keys and values of every position so far, in arrays of a fixed capacity.

The shape never changes, so the compiled programs never do either; how much of it is in use is a
run-time value. Rows past `lengths` hold leftovers that no query sees.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from reference.config import Config


class LayerCache(NamedTuple):
    k: Float[Array, "batch kv_heads capacity head_dim"]  # after RoPE
    v: Float[Array, "batch kv_heads capacity head_dim"]


class Cache(NamedTuple):
    layers: Sequence[LayerCache]
    lengths: Int[Array, " batch"]  # positions in use, for each row


def empty_cache(config: Config, *, batch: int, capacity: int, dtype: np.dtype) -> Cache:
    """A cache of no positions, with room for `capacity`."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)

    def zeros() -> Array:
        return jax.device_put(np.zeros(shape, dtype))

    return Cache(
        [LayerCache(zeros(), zeros()) for _ in range(config.layers)], jax.device_put(np.zeros(batch, np.int32))
    )


def cache_bytes(config: Config, *, batch: int, capacity: int, dtype: np.dtype) -> int:
    """Bytes that `empty_cache` takes, and the table of RoPE's angles, which is as long."""
    rows = 2 * config.layers * batch * config.kv_heads * capacity * config.head_dim * dtype.itemsize
    return rows + capacity * config.head_dim * 4
