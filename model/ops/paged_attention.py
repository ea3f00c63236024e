"""Attention over a cache in pages, in plain JAX: each row of a batch reads only its own pages, in order.

So a row adds the same terms in the same order in any batch. `attention.attend` instead reads the same number of
positions for every row, as many as the longest row needs. This is faster if all rows have similar lengths, but the
longest row then affects how the results of other rows are rounded.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import LayerPages, from_int8
from llamaspec.model.ops.block import score_scale, sink_scores, transform_scores
from llamaspec.reference.config import Config

# XLA on a CPU runs independent loops at the same time, each on one core.
LOOPS = 2


def attend_pages(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerPages,
    at: Int[Array, "batch seq"],
    *,
    window: int | None,
    config: Config,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq width"]:
    """Compute `reference.cached_attention.attention_paged`, also for several queries per row.

    `at` has the position p of each query. A query sees the positions up to p; with `window`, only the last `window` of
    these positions. A query with p = -1 sees no position, and its result is 0. The loop for a row has one step for each
    of the row's pages.
    """
    batch, seq = q.shape[:2]
    rows = q.reshape(batch, seq, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).astype(jnp.float32) * score_scale(config)

    z = None if sinks is None else sink_scores(sinks, config)

    def attend_row(row: tuple[Array, Array, Array]) -> Array:
        return _attend_row(*row, cache, z, window=window, config=config)

    size = -(-batch // min(LOOPS, batch))
    parts = [slice(start, start + size) for start in range(0, batch, size)]
    h = jnp.concatenate([lax.map(attend_row, (rows[part], at[part], cache.table[part])) for part in parts])
    return h.transpose(0, 3, 1, 2, 4).reshape(batch, seq, -1).astype(q.dtype)


def _attend_row(
    q: Array, at: Array, table: Array, cache: LayerPages, z: Array | None, *, window: int | None, config: Config
) -> Array:
    """Attend for one row with the online softmax of `reference.softmax`; q is [kv_heads, group, seq, head_dim].

    `z` has the scores of attention sinks, with which the online softmax begins; None: the model has no sinks.
    """
    page = cache.k.shape[2]
    last = jnp.max(at)
    first = jnp.min(jnp.where(at < 0, last, at))

    def step(i: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, h = running
        k, k_scales = _page(cache.k, table[i])
        v, v_scales = _page(cache.v, table[i])
        read = i * page + jnp.arange(page)
        v = jnp.where((read <= last)[:, None], v, 0)  # values beyond `last` may be old NaNs, and 0 * NaN is NaN
        scores = jnp.einsum("kgsd,ktd->kgst", q, k, precision=lax.Precision.HIGHEST)
        scores = scores if k_scales is None else scores * k_scales
        visible = read <= at[:, None] if window is None else (read <= at[:, None]) & (read > at[:, None] - window)
        scores = jnp.where(visible, transform_scores(scores, config), -jnp.inf)
        larger = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
        shift = jnp.where(larger == -jnp.inf, 0, larger)  # -inf - -inf would be NaN
        p, rescale = jnp.exp(scores - shift), jnp.exp(maximum - shift)
        total = total * rescale + jnp.sum(p, axis=-1, keepdims=True)
        p = p if v_scales is None else p * jnp.where(read <= last, v_scales, 0)
        h = h * rescale + jnp.einsum("kgst,ktd->kgsd", p, v, precision=lax.Precision.HIGHEST)
        return larger, total, h

    *shape, _ = q.shape
    lowest, zeros = jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1))
    lowest, zeros = (lowest, zeros) if z is None else (jnp.broadcast_to(z, lowest.shape), zeros + 1)
    start = (lowest, zeros, jnp.zeros(q.shape))
    begin = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0) // page
    _, total, h = lax.fori_loop(begin, last // page + 1, step, start)
    return h / jnp.where(total == 0, 1, total)


def _page(pages: Array, number: Array) -> tuple[Float[Array, "kv_heads page head_dim"], Array | None]:
    """Read the keys or values of a page in float32; for an int8 cache, also return scales [kv_heads, 1, 1, page]."""
    rows = lax.dynamic_index_in_dim(pages, number, keepdims=False)
    if rows.dtype != jnp.int8:
        return rows.astype(jnp.float32), None
    codes, scales = from_int8(rows)
    return codes, scales[:, None, None]
