"""The op `attend` in plain JAX: causal grouped-query attention over the part of the cache that is in use."""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from llamaspec.model.cache import LayerPages, LayerStore, from_int8
from llamaspec.model.ops.block import score_scale, sink_scores, transform_scores
from llamaspec.model.ops.paged_attention import attend_pages
from llamaspec.model.ops.table import Positions
from llamaspec.reference.config import Config


class CacheSpans(NamedTuple):
    """The spans of attention: the numbers of leading cache rows that attention can choose to read.

    The compiled program has a branch for each span. For one query, almost all the time goes into reading rows. So the
    spans for one query are close together, each twice as long as the one before, and few unused rows are read. With
    many queries, unused rows cost little compared with the products, so a prompt may have fewer spans.
    """

    smallest: int  # number of rows in the smallest span
    longest: int  # largest number of rows to read at once; a longer cache is read in blocks of this size
    growth: int  # factor between one span of a prompt and the next span

    def up_to(self, capacity: int, *, growth: int) -> list[int]:
        """Return the spans for a cache of `capacity` rows; the last span is the whole cache.

        Before the last span, each span is `growth` times as long as the one before it.
        """
        spans, span = [], self.smallest
        while 4 * span < 3 * capacity:
            spans.append(span)
            span *= growth
        return [*spans, capacity]


# A span of 4096 + 256 rows is a whole cache for the default context, with the padding of a prompt's last chunk.
SPANS = CacheSpans(smallest=64, longest=4096 + 256, growth=4)


@runtime_checkable
class Scores(Protocol):
    """A function that multiplies queries by cached keys. The score of a key that a query must not see is -inf.

    It reads as many leading rows of the cache as `visible` has.
    """

    def __call__(
        self,
        q: Float[Array, "batch kv_heads group seq head_dim"],
        k: Array,
        visible: Bool[Array, "batch 1 1 seq rows"],
        /,
    ) -> Float[Array, "batch kv_heads group seq rows"]: ...


@runtime_checkable
class Weighted(Protocol):
    """A function that sums the values of the cache, weighted by the probabilities `p`.

    It reads as many leading rows of the cache as `p` has.
    """

    def __call__(
        self, p: Float[Array, "batch kv_heads group seq rows"], v: Array, /
    ) -> Float[Array, "batch kv_heads group seq head_dim"]: ...


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerStore,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    sinks: Float[Array, " heads"] | None = None,
    spans: CacheSpans = SPANS,
    scores: Scores | None = None,
    weighted: Weighted | None = None,
) -> Float[Array, "batch seq width"]:
    """Attend to the rows of the cache up to each query's position; with `window`, only to the last `window` of them.

    A switch inside the program selects the shortest of `spans` that covers the rows in use. `scores` multiplies queries
    by the keys of a span, and `weighted` sums the values of a span. If one of them is None, XLA's dot replaces it. For
    a cache in pages, this function calls `attend_pages`.
    """
    if isinstance(cache, LayerPages):
        return attend_pages(q, cache, positions.at, window=window, config=config, sinks=sinks)
    batch, seq = q.shape[:2]
    capacity, dtype = cache.k.shape[2], q.dtype
    scores, weighted = scores or scores_by_dot, weighted or weighted_by_dot
    q = q.reshape(batch, seq, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
    q = q.transpose(0, 2, 3, 1, 4).astype(jnp.float32) * score_scale(config)
    z = None if sinks is None else sink_scores(sinks, config)

    def over(span: int):
        def branch(q: Array, k: Array, v: Array, at: Array) -> Array:
            visible = _visible(at, jnp.arange(span), window)
            visible_scores = transform_visible(scores(q, k, visible), visible, config)
            largest = jnp.max(visible_scores, axis=-1, keepdims=True)
            largest = largest if z is None else jnp.maximum(largest, z)
            p = jnp.exp(visible_scores - largest)
            total = jnp.sum(p, axis=-1, keepdims=True)
            # Dividing the results costs less than dividing the probabilities, which are more numbers.
            return weighted(p, v) / (total if z is None else total + jnp.exp(z - largest))

        return branch

    lengths = spans.up_to(min(capacity, spans.longest), growth=2 if seq == 1 else spans.growth)
    branches = [over(span) for span in lengths]
    if capacity > spans.longest:
        branches.append(partial(_attend_in_blocks, z=z, block=spans.longest, window=window, config=config))
    used = jnp.max(positions.at) + 1
    first = jnp.sum(jnp.asarray(lengths[: len(branches) - 1], jnp.int32) < used)  # index of the span to read
    h = lax.switch(first, branches, q, cache.k, cache.v, positions.at)  # [batch, kv_heads, group, seq, head_dim]
    return h.transpose(0, 3, 1, 2, 4).reshape(batch, seq, -1).astype(dtype)


def _attend_in_blocks(
    q: Array, k: Array, v: Array, at: Array, *, z: Array | None, block: int, window: int | None, config: Config
) -> Array:
    """Attend to `block` rows of the cache at a time, with the online softmax of `reference.softmax`.

    `z` has the scores of attention sinks, with which the online softmax begins; None: the model has no sinks.
    """
    *rows, head_dim = q.shape
    capacity = k.shape[2]

    def step(i: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, h = running
        start = jnp.minimum(i * block, capacity - block)  # the last block overlaps the previous block
        read = start + jnp.arange(block)
        keys, values = (lax.dynamic_slice_in_dim(a, start, block, axis=2) for a in (k, v))
        visible = _visible(at, read, window) & (read >= i * block)
        scores = transform_visible(scores_by_dot(q, keys, visible), visible, config)
        larger = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
        shift = jnp.where(larger == -jnp.inf, 0, larger)  # -inf - -inf would be NaN
        p, rescale = jnp.exp(scores - shift), jnp.exp(maximum - shift)
        return larger, total * rescale + jnp.sum(p, axis=-1, keepdims=True), h * rescale + weighted_by_dot(p, values)

    lowest, zeros = jnp.full((*rows, 1), -jnp.inf), jnp.zeros((*rows, 1))
    lowest, zeros = (lowest, zeros) if z is None else (jnp.broadcast_to(z, lowest.shape), zeros + 1)
    start = (lowest, zeros, jnp.zeros((*rows, head_dim)))
    blocks = jnp.max(at) // block + 1
    _, total, h = lax.fori_loop(0, blocks, step, start)
    return h / total


def transform_visible(
    scores: Float[Array, "*heads seq rows"], visible: Bool[Array, "*#heads seq rows"], config: Config
) -> Float[Array, "*heads seq rows"]:
    """Apply `block.transform_scores` to the scores of `visible` keys; all other scores remain -inf."""
    transformed = transform_scores(scores, config)
    return scores if transformed is scores else jnp.where(visible, transformed, -jnp.inf)


def scores_by_dot(q: Array, k: Array, visible: Array) -> Float[Array, "batch kv_heads group seq rows"]:
    """Compute `Scores` with XLA's dot. q and scores have the same order of axes, so XLA does not transpose scores."""
    k, scales = _scaled(k[:, :, : visible.shape[-1]])
    scores = jnp.einsum("bkgsd,bktd->bkgst", q, k, precision=lax.Precision.HIGHEST)
    if scales is not None:
        scores = scores * scales
    return jnp.where(visible, scores, -jnp.inf)


def weighted_by_dot(p: Array, v: Array) -> Float[Array, "batch kv_heads group seq head_dim"]:
    """Compute `Weighted` with XLA's dot."""
    v, scales = _scaled(v[:, :, : p.shape[-1]])
    return jnp.einsum("bkgst,bktd->bkgsd", p if scales is None else p * scales, v, precision=lax.Precision.HIGHEST)


def _scaled(rows: Array) -> tuple[Float[Array, "batch kv_heads rows head_dim"], Array | None]:
    """Convert keys or values to float32. For a cache of int8, return also the scales [batch, kv_heads, 1, 1, rows]."""
    if rows.dtype != jnp.int8:
        return rows.astype(jnp.float32), None
    codes, scales = from_int8(rows)
    return codes, scales[:, :, None, None]


def _visible(
    at: Int[Array, "batch seq"], rows: Int[Array, " rows"], window: int | None
) -> Bool[Array, "batch 1 1 seq rows"]:
    i = at[:, None, None, :, None]
    return rows <= i if window is None else (rows <= i) & (rows > i - window)
