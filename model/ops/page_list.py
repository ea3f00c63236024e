"""Attention over a cache in pages for XLA on a CPU, with one query for each row of a batch.

In `paged_attention`, a loop over the pages of one row has operations that are too small for a second core. In this
module, one loop runs over a list of the pages of all rows. One step of the loop processes several pages, which may
belong to different rows, and computes a partial softmax for each page. Then a second loop joins the partial results of
each row in order. A partial result depends only on its page and query, so a row gets the same results in any batch.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from llamaspec.model.cache import LayerPages
from llamaspec.model.ops.attention import Scores, transform_visible
from llamaspec.model.ops.block import score_scale, sink_scores
from llamaspec.reference.config import Config

AT_ONCE = 8  # number of pages in one step
SUMMED = 16  # largest number of values of a page in a partial sum


def attend_listed_pages(
    q: Float[Array, "batch 1 heads head_dim"],
    cache: LayerPages,
    at: Int[Array, "batch 1"],
    *,
    window: int | None,
    config: Config,
    scores: Scores,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch 1 width"]:
    """Compute `paged_attention.attend_pages` for one query per row.

    `scores` computes the scores for the pages of one step. Every query head must have its own keys, and the cache must
    hold floats.
    """
    (batch, _, heads, width), (k, v, table) = q.shape, cache
    page, last = k.shape[2], at[:, 0]
    queries = q.reshape(batch, heads, 1, 1, width).astype(jnp.float32) * score_scale(config)
    begin = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0) // page
    counts = jnp.where(last < 0, 0, last // page + 1 - begin)
    ends = jnp.cumsum(counts)
    starts = ends - counts
    listed = jnp.arange(-(-table.size // AT_ONCE) * AT_ONCE, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends <= listed[:, None], axis=1), batch - 1)  # items after the last page get any row
    block = jnp.clip(begin[row] + listed - starts[row], 0, table.shape[1] - 1)
    numbers = table[row, block]

    def step(i: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rows, blocks, pages = (lax.dynamic_slice_in_dim(a, i * AT_ONCE, AT_ONCE) for a in (row, block, numbers))
        read, upto = blocks[:, None] * page + jnp.arange(page), last[rows][:, None]
        visible = read <= upto if window is None else (read <= upto) & (read > upto - window)
        # Without the barrier, XLA would compute the page's index and the mask again for every number of the page.
        pages, visible = lax.optimization_barrier((pages, visible[:, None, None, None]))
        visible_scores = transform_visible(scores(queries[rows], k[pages], visible), visible, config)
        maximum = jnp.max(visible_scores, axis=-1, keepdims=True)
        p = jnp.exp(visible_scores - maximum)
        h = _weighted(p[:, :, 0, 0], v, pages, visible[:, 0, 0, 0])
        part = (new.reshape(AT_ONCE, heads, -1) for new in (maximum, jnp.sum(p, axis=-1), h))
        return _pairwise(partial(lax.dynamic_update_slice_in_dim, start_index=i * AT_ONCE, axis=0), parts, part)

    zeros = jnp.zeros((len(listed), heads, 1))
    empty = (zeros, zeros, jnp.zeros((len(listed), heads, width)))
    parts = lax.fori_loop(0, -(-ends[-1] // AT_ONCE), step, empty)

    def join(i: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Join the i-th partial result of each row by the online softmax of `reference.softmax`.

        Rows with fewer partial results stay unchanged.
        """
        (maximum, total, h), has = running, (i < counts)[:, None, None]
        m, t, more = (part[jnp.minimum(starts + i, len(listed) - 1)] for part in parts)
        larger = jnp.maximum(maximum, m)
        before, now = jnp.exp(maximum - larger), jnp.exp(m - larger)
        joined = larger, total * before + t * now, h * before + more * now
        return _pairwise(partial(jnp.where, has), joined, running)

    lowest, zeros = jnp.full((batch, heads, 1), -jnp.inf), jnp.zeros((batch, heads, 1))
    if sinks is not None:
        lowest, zeros = jnp.broadcast_to(sink_scores(sinks, config)[:, 0, 0], lowest.shape), zeros + 1
    start = (lowest, zeros, jnp.zeros((batch, heads, width)))
    _, total, h = lax.fori_loop(0, jnp.max(counts), join, start)
    return (h / jnp.where(total == 0, 1, total)).reshape(batch, 1, -1).astype(q.dtype)


def _pairwise(change: Callable[[Array, Array], Array], some: Iterable[Array], partners: Iterable[Array]) -> Any:
    """Apply `change` to each array in `some` and the array at the same place in `partners`."""
    return tuple(map(change, some, partners))


def _weighted(
    p: Float[Array, "pages heads page"],
    v: Float[Array, "all heads page head_dim"],
    numbers: Int[Array, " pages"],
    visible: Bool[Array, "pages page"],
) -> Float[Array, "pages heads head_dim"]:
    """Sum the visible values of each page in `numbers`, weighted by `p`, in partial sums of up to `SUMMED` values."""
    summed = math.gcd(v.shape[2], SUMMED)
    p = lax.optimization_barrier(p).reshape(*p.shape[:2], -1, summed, 1)  # [pages, heads, sums, values, 1]
    v = v.reshape(*v.shape[:2], -1, summed, v.shape[-1])

    def values(i: int) -> Float[Array, "pages heads sums head_dim"]:
        # An invisible value may be another sequence's NaN, and 0 * NaN is NaN.
        return jnp.where(visible[:, None, i::summed, None], v[numbers, :, :, i].astype(jnp.float32), 0)

    partial_sums = lax.optimization_barrier(sum(values(i) * p[:, :, :, i] for i in range(summed)))
    # We add the partial sums by a dot with ones, which runs on one core: starting a second core for such a short sum
    # would take longer than the sum.
    ones = jnp.ones(partial_sums.shape[:3])
    return jnp.einsum("bks,bksd->bkd", ones, partial_sums, precision=lax.Precision.HIGHEST)
