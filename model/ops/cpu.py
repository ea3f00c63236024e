"""`CPU`, the table of ops for XLA's CPU compiler.

Its products work on slices of columns (`products.cpu_product`), and its attention reads few unused rows of the cache.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.cache import LayerPages, LayerStore
from llamaspec.model.ops.attention import SPANS, CacheSpans, attend, scores_by_dot, weighted_by_dot
from llamaspec.model.ops.page_list import attend_listed_pages
from llamaspec.model.ops.products import cpu_product, lane_sums, last_sum
from llamaspec.model.ops.table import Positions
from llamaspec.model.ops.xla import plain
from llamaspec.model.weights.groups import LANES
from llamaspec.reference.config import Config

# The first chunk of a prompt has 128 tokens. 512 rows of keys and values stay in a CPU's caches.
PROMPT_SPANS = CacheSpans(smallest=128, longest=512, growth=2)
SUMMED = 16  # largest number of values in a partial sum; each value is one more operation to compile
SECOND_CORE = 1 << 19  # XLA runs a loop on two cores if the loop reads and writes at least this number of bytes


def cpu_attend(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerStore,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq width"]:
    """Call `attend` with spans and products for a CPU.

    For a prompt, we use more and shorter spans than `attend` does by default. So attention reads few unused rows, and
    the rows that it reads stay in a CPU's caches.

    For a single token, if each query head has its own kv head, we do not use XLA's dot for scores, because the dot
    would first copy the keys. In this case, a batch with a float cache in pages uses `attend_listed_pages`.
    """
    products: dict[str, Any] = {"scores": _scores_of_one, "weighted": _weighted_by_one}
    if isinstance(cache, LayerPages):
        single_query = q.shape[1] == 1 < len(q) and config.heads == config.kv_heads and cache.k.dtype != jnp.int8
        if not single_query:
            return attend(q, cache, positions, window=window, config=config, sinks=sinks)
        return attend_listed_pages(
            q, cache, positions.at, window=window, config=config, sinks=sinks, scores=_scores_of_one
        )
    if q.shape[1] > 1:
        return attend(q, cache, positions, window=window, config=config, sinks=sinks, spans=PROMPT_SPANS)
    if config.heads > config.kv_heads:
        return attend(q, cache, positions, window=window, config=config, sinks=sinks)
    smallest = _smallest_span(cache.k.size // cache.k.shape[2], config.head_dim, cache.k.dtype)
    spans = SPANS._replace(smallest=smallest)
    return attend(q, cache, positions, window=window, config=config, sinks=sinks, spans=spans, **products)


def _smallest_span(numbers: int, head_dim: int, dtype: np.dtype) -> int:
    """Choose the smallest span, in rows of the cache, for one query. A row has `numbers` elements.

    XLA runs a small loop on one core. If it would run a loop over `SPANS.smallest` rows on one core, but a loop over
    twice as many rows on two cores, we choose twice as many rows: this takes no longer, and the second core is then
    ready for the next product.
    """
    for rows in (SPANS.smallest, 2 * SPANS.smallest):
        if all(_summed(rows * numbers, dtype, most=most) for most in (head_dim // LANES, SUMMED)):
            return rows
    return SPANS.smallest


def _summed(numbers: int, dtype: np.dtype, *, most: int) -> int | None:
    """Choose how many products to add in a partial sum, so that XLA runs a loop of `numbers` products on two cores.

    Returns the largest divisor of `most` that works; None if no divisor works. XLA uses a second core if the loop has
    more operations than bytes, or if it reads and writes at least `SECOND_CORE` bytes. With shorter sums, the loop
    writes more bytes.
    """
    for summed in range(most, 0, -1):
        bytes_ = numbers * dtype.itemsize + 4 * numbers // summed
        operations = numbers * (2 - 1 / summed + (dtype != np.float32))  # products, sums, and conversions to float32
        if most % summed == 0 and (operations > bytes_ or bytes_ >= SECOND_CORE):
            return summed
    return None


def _scores_of_one(q: Array, k: Array, visible: Array) -> Float[Array, "batch kv_heads 1 1 rows"]:
    """Compute `Scores` for one query per kv head, with `products.lane_sums` instead of a dot.

    For an int8 cache, or if head_dim is not a multiple of 16, we use a dot.
    """
    if k.dtype == jnp.int8 or q.shape[-1] % LANES:
        return scores_by_dot(q, k, visible)
    q = lax.optimization_barrier(q)[:, :, 0]  # [batch, kv_heads, 1, head_dim]
    k = k[:, :, : visible.shape[-1]]
    most = q.shape[-1] // LANES
    lanes = q.shape[-1] // (_summed(k.size, k.dtype, most=most) or most)
    scores = last_sum(lane_sums(k, q, lanes=lanes))
    return jnp.where(visible, scores[:, :, None, None], -jnp.inf)


def _weighted_by_one(p: Array, v: Array) -> Float[Array, "batch kv_heads 1 1 head_dim"]:
    """Compute `Weighted` for one query per kv head, in partial sums of up to `SUMMED` values.

    A single slice takes every n-th of the rows in use from the cache. If we sliced all rows in use first, XLA would
    copy them.
    """
    rows = p.shape[-1]
    if v.dtype == jnp.int8 or rows % SUMMED:
        return weighted_by_dot(p, v)
    summed = _summed(v.size // v.shape[2] * rows, v.dtype, most=SUMMED) or SUMMED
    p = lax.optimization_barrier(p).reshape(*v.shape[:2], -1, summed, 1)  # [batch, kv_heads, sums, values, 1]
    values = (v[:, :, i:rows:summed].astype(jnp.float32) for i in range(summed))
    partial_sums = lax.optimization_barrier(sum(value * p[:, :, :, i] for i, value in enumerate(values)))
    # We add the partial sums by a dot with ones, which runs on one core: starting a second core for such a short sum
    # would take longer than the sum.
    ones = jnp.ones(partial_sums.shape[:3])
    return jnp.einsum("bks,bksd->bkd", ones, partial_sums, precision=lax.Precision.HIGHEST)[:, :, None, None]


CPU = plain(cpu_product)._replace(attend=cpu_attend)
