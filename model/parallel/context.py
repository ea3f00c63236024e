"""Context parallelism: turns a table of ops into a table for a cache that is sharded by positions over all devices.

With n devices, position p is row p // n of the cache on device p mod n, so all devices hold equally many positions of a
sequence. A device appends the keys and values of its own positions, and attends to these positions. For its positions,
each device computes the largest score, the sum of exponentials and the weighted sum of values. We combine these numbers
to attention over all positions, as `reference.softmax.running_update` combines blocks.

Every device computes everything else completely. So it needs all weights, and a cache of `capacity / n` positions.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.cache import LayerCache, to_int8
from llamaspec.model.ops.attention import scores_by_dot, transform_visible, weighted_by_dot
from llamaspec.model.ops.block import score_scale, sink_scores
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.parallel.tensor import AXIS
from llamaspec.model.weights.params import Layer
from llamaspec.reference.config import Config


def context_parallel(ops: Ops) -> Ops:
    """Convert the table `ops` to a table for devices that each hold every n-th position of the cache."""

    def norm_qkv(
        x: Float[Array, "batch seq dim"], layer: Layer, cache: LayerCache, positions: Positions, *, config: Config
    ) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
        batch, seq = x.shape[:2]
        empty = jnp.zeros((batch, cache.k.shape[1], seq, config.head_dim), jnp.float32)
        from_start = positions._replace(at=positions.at - positions.at[:, :1])
        q, new = ops.norm_qkv(x, layer, LayerCache(empty, empty), from_start, config=config)
        return q, LayerCache(*(_own_rows(old, fresh, positions.at) for old, fresh in zip(cache, new, strict=True)))

    return ops._replace(norm_qkv=norm_qkv, attend=attend_across)


def _own_rows(rows: Array, new: Float[Array, "batch kv_heads seq head_dim"], at: Array) -> Array:
    """Write new keys or values into the cache rows of this device, if their positions `at` belong to this device.

    Keys and values of other devices get an index past the end, so XLA drops them. XLA would not drop a negative index,
    because a negative index counts from the end.
    """
    devices, device = lax.axis_size(AXIS), lax.axis_index(AXIS)
    index = jnp.where(at % devices == device, at // devices, rows.shape[2])  # [batch, seq]
    stored = to_int8(new) if rows.dtype == jnp.int8 else new.astype(rows.dtype)
    sequence = jnp.arange(rows.shape[0])[:, None]
    return rows.at[sequence, :, index].set(stored.swapaxes(1, 2), mode="drop")


def attend_across(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerCache,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq width"]:
    """Attend to the positions of all devices. `cache` has only the positions of this device (every n-th position)."""
    batch, seq = q.shape[:2]
    dtype, devices, device = q.dtype, lax.axis_size(AXIS), lax.axis_index(AXIS)
    q = q.reshape(batch, seq, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
    q = q.transpose(0, 2, 3, 1, 4).astype(jnp.float32) * score_scale(config)
    row = jnp.arange(cache.k.shape[2]) * devices + device  # the position in each row of the cache
    at = positions.at[:, None, None, :, None]
    visible = row <= at if window is None else (row <= at) & (row > at - window)
    scores = transform_visible(scores_by_dot(q, cache.k, visible), visible, config)
    largest = lax.pmax(jnp.max(scores, axis=-1, keepdims=True), AXIS)
    z = None if sinks is None else sink_scores(sinks, config)
    largest = largest if z is None else jnp.maximum(largest, z)
    p = jnp.exp(scores - largest)  # a query attends to itself, so the largest score is finite
    total = lax.psum(jnp.sum(p, axis=-1, keepdims=True), AXIS)
    total = total if z is None else total + jnp.exp(z - largest)  # after the sum, so that each sink is added once
    h = lax.psum(weighted_by_dot(p, cache.v), AXIS) / total  # [batch, kv_heads, group, seq, head_dim]
    return h.transpose(0, 3, 1, 2, 4).reshape(batch, seq, -1).astype(dtype)
