"""The ops of a block, in plain JAX: five that every Llama has, one for experts, one after the last block.

Inside an op numbers are float32; what leaves it is rounded once to the dtype of the residual stream
(and so is a vector that goes into a product: that is what matrix units take). A table `Ops` holds
one implementation of each: `XLA` runs anywhere; `CPU` differs in its products, which are shaped for
XLA's CPU compiler. Both take quantized matrices where they take arrays, so no op knows of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from model.cache import LayerCache, append, from_int8
from model.weights.codes import LANES, PAIR, ROW, QuantizedMatrix
from model.weights.params import Experts, FeedForward, Layer, Linear, Matrix, Params
from reference.config import Config

SMALLEST_SPAN = 64  # rows of the cache that attention reads at once
LONGEST_SPAN = 4096 + 256  # the same: all of a cache of the default context and a prompt's last chunk
SMALLEST_CPU_SPAN = 128  # the same, of a prompt on a CPU: as many as the first chunk is of tokens
LONGEST_CPU_SPAN = 512  # what is multiplied stays in its caches
MOST_DECODED = 1 << 24  # weights of a quantized matrix in float32 at once: 64 MB
MOST_CPU_DECODED = 1 << 20  # the same on a CPU: 4 MB
FEWEST_ROWS = 16  # decoded at once, or it would be a loop over single rows
SUMMED = 16  # values of the cache in a partial sum, at most: each is an operation more to compile
SECOND_CORE = 1 << 19  # bytes read and written by a loop that XLA for CPUs gives a second core, whatever it computes


class Positions(NamedTuple):
    """Where the new tokens stand, and how far RoPE turns them there."""

    at: Int[Array, "batch seq"]  # consecutive along seq
    cos: Float[Array, "batch seq pairs"]
    sin: Float[Array, "batch seq pairs"]


# x [*batch cols] and weight [rows cols] to x times the transpose of weight, accumulated and returned in float32.
Product = Callable[[Array, Matrix], Array]


def norm_qkv(
    x: Float[Array, "batch seq dim"],
    layer: Layer,
    cache: LayerCache,
    positions: Positions,
    *,
    config: Config,
    product: Product,
) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
    """RMSNorm, q, k and v, their norms where the model has them, RoPE; k and v are appended to the cache."""
    n = rmsnorm(x, layer.attention_norm, eps=config.eps).astype(x.dtype)
    qkv = _linear(n, layer.qkv, product).reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(qkv, [config.heads, config.heads + config.kv_heads], axis=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rmsnorm(q, layer.q_norm, eps=config.eps)
        k = rmsnorm(k, layer.k_norm, eps=config.eps)
    q, k = rope(q, positions), rope(k, positions)
    start = positions.at[:, 0]
    return q.astype(x.dtype), LayerCache(append(cache.k, k, start), append(cache.v, v, start))


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerCache,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    smallest: int = SMALLEST_SPAN,
    longest: int = LONGEST_SPAN,
    growth: int = 4,
    scores: Callable[[Array, Array, Array], Array] | None = None,
    weighted: Callable[[Array, Array], Array] | None = None,
) -> Float[Array, "batch seq width"]:
    """Causal grouped-query attention over the part of the cache that is in use.

    Up to `longest` rows are read at once, in spans of a few lengths from `smallest` on, each `growth` times the one
    before; of a longer cache, so many at a time.
    `scores` and `weighted` are the two products of a span, left to XLA by default.
    """
    batch, seq = q.shape[:2]
    capacity, dtype = cache.k.shape[2], q.dtype
    scores, weighted = scores or _scores, weighted or _weighted
    q = q.reshape(batch, seq, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
    q = q.transpose(0, 2, 3, 1, 4).astype(jnp.float32) * config.head_dim**-0.5

    def over(span: int):
        def branch(q: Array, k: Array, v: Array, at: Array) -> Array:
            found = scores(q, k, _visible(at, jnp.arange(span), window))
            p = jnp.exp(found - jnp.max(found, axis=-1, keepdims=True))
            return weighted(p, v) / jnp.sum(p, axis=-1, keepdims=True)  # fewer to divide than the probabilities are

        return branch

    # A single query is as slow as what it reads; for many, the rows too many are little beside the products.
    spans = _spans(smallest, min(capacity, longest), growth=2 if seq == 1 else growth)
    branches = [over(span) for span in spans]
    if capacity > longest:
        branches.append(partial(_attend_in_blocks, block=longest, window=window))
    used = jnp.max(positions.at) + 1
    first = jnp.sum(jnp.asarray(spans[: len(branches) - 1], jnp.int32) < used)  # that covers the rows in use
    h = lax.switch(first, branches, q, cache.k, cache.v, positions.at)  # [batch, kv_heads, group, seq, head_dim]
    return h.transpose(0, 3, 1, 2, 4).reshape(batch, seq, -1).astype(dtype)


def cpu_attend(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerCache,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
) -> Float[Array, "batch seq width"]:
    """`attend`, which for a prompt reads few rows at once: then none but those in use, and they stay in a CPU's caches.

    Of one token, where each head has keys of its own, they are multiplied where they lie: a dot has them copied first.
    """
    fixed = {"window": window, "config": config}
    if q.shape[1] > 1:
        return attend(q, cache, positions, **fixed, smallest=SMALLEST_CPU_SPAN, longest=LONGEST_CPU_SPAN, growth=2)
    if config.heads > config.kv_heads:
        return attend(q, cache, positions, **fixed)
    smallest = _smallest_span(cache.k.size // cache.k.shape[2], config.head_dim, cache.k.dtype)
    return attend(q, cache, positions, **fixed, smallest=smallest, scores=_scores_of_one, weighted=_weighted_by_one)


def _smallest_span(numbers: int, head_dim: int, dtype: np.dtype) -> int:
    """The rows, of so many numbers each, that one query reads at least.

    Both cores read twice as many in the time that one takes, and are then both awake for the product that follows.
    """
    for rows in (SMALLEST_SPAN, 2 * SMALLEST_SPAN):
        if all(_summed(rows * numbers, dtype, most=most) for most in (head_dim // LANES, SUMMED)):
            return rows
    return SMALLEST_SPAN


def _summed(numbers: int, dtype: np.dtype, *, most: int) -> int | None:
    """How many of so many numbers to put into a partial sum, for XLA to give the loop over them to both cores.

    As many as `most`, or the largest divisor of it that does. Of small loops XLA does so if there are more operations
    than bytes, or enough bytes: the shorter the sums, the more are written.
    """
    for summed in range(most, 0, -1):
        bytes_ = numbers * dtype.itemsize + 4 * numbers // summed
        operations = numbers * (2 - 1 / summed + (dtype != np.float32))  # products, sums, and what widens
        if most % summed == 0 and (operations > bytes_ or bytes_ >= SECOND_CORE):
            return summed
    return None


def _attend_in_blocks(q: Array, k: Array, v: Array, at: Array, *, block: int, window: int | None) -> Array:
    """Attention with the online softmax of `reference.softmax`, over `block` rows of the cache at a time."""
    *rows, head_dim = q.shape
    capacity = k.shape[2]

    def step(i: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, h = running
        start = jnp.minimum(i * block, capacity - block)  # the last block overlaps the one before
        read = start + jnp.arange(block)
        keys, values = (lax.dynamic_slice_in_dim(a, start, block, axis=2) for a in (k, v))
        scores = _scores(q, keys, _visible(at, read, window) & (read >= i * block))
        larger = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
        shift = jnp.where(larger == -jnp.inf, 0, larger)  # -inf - -inf would be NaN
        p, rescale = jnp.exp(scores - shift), jnp.exp(maximum - shift)
        return larger, total * rescale + jnp.sum(p, axis=-1, keepdims=True), h * rescale + _weighted(p, values)

    start = (jnp.full((*rows, 1), -jnp.inf), jnp.zeros((*rows, 1)), jnp.zeros((*rows, head_dim)))
    blocks = jnp.max(at) // block + 1
    _, total, h = lax.fori_loop(0, blocks, step, start)
    return h / total


def _scores(q: Array, k: Array, visible: Array) -> Float[Array, "batch kv_heads group seq rows"]:
    """Of q [batch, kv_heads, group, seq, head_dim] with the first of the keys, as many as there are in `visible`.

    As q is laid out like the scores, they are what a dot writes; otherwise they would be transposed in memory.
    """
    k, scales = _scaled(k[:, :, : visible.shape[-1]])
    scores = jnp.einsum("bkgsd,bktd->bkgst", q, k, precision=lax.Precision.HIGHEST)
    if scales is not None:
        scores = scores * scales
    return jnp.where(visible, scores, -jnp.inf)


def _weighted(p: Array, v: Array) -> Float[Array, "batch kv_heads group seq head_dim"]:
    """The sum of the first of the values, as many as there are in `p`."""
    v, scales = _scaled(v[:, :, : p.shape[-1]])
    return jnp.einsum("bkgst,bktd->bkgsd", p if scales is None else p * scales, v, precision=lax.Precision.HIGHEST)


def _scores_of_one(q: Array, k: Array, visible: Array) -> Float[Array, "batch kv_heads 1 1 rows"]:
    """`_scores` of one query a key, as `_plain_sums` of keys."""
    if k.dtype == jnp.int8 or q.shape[-1] % LANES:
        return _scores(q, k, visible)
    q = lax.optimization_barrier(q)[:, :, 0]  # [batch, kv_heads, 1, head_dim]
    k = k[:, :, : visible.shape[-1]]
    most = q.shape[-1] // LANES
    lanes = q.shape[-1] // (_summed(k.size, k.dtype, most=most) or most)
    scores = _last_sum(_lane_sums(k, q, lanes=lanes))
    return jnp.where(visible, scores[:, :, None, None], -jnp.inf)


def _weighted_by_one(p: Array, v: Array) -> Float[Array, "batch kv_heads 1 1 head_dim"]:
    """`_weighted` of one row of probabilities a head: each partial sum is of up to `SUMMED` values.

    They are sliced out of all there are in one step, or XLA makes a copy of those in use.
    """
    rows = p.shape[-1]
    if v.dtype == jnp.int8 or rows % SUMMED:
        return _weighted(p, v)
    summed = _summed(v.size // v.shape[2] * rows, v.dtype, most=SUMMED) or SUMMED
    p = lax.optimization_barrier(p).reshape(*v.shape[:2], -1, summed, 1)  # [batch, kv_heads, sums, values, 1]
    values = (v[:, :, i:rows:summed].astype(jnp.float32) for i in range(summed))
    partial_sums = lax.optimization_barrier(sum(value * p[:, :, :, i] for i, value in enumerate(values)))
    # As in `_last_sum`: a sum of so few would take XLA longer to hand to both cores than to take.
    ones = jnp.ones(partial_sums.shape[:3])
    return jnp.einsum("bks,bksd->bkd", ones, partial_sums, precision=lax.Precision.HIGHEST)[:, :, None, None]


def _scaled(rows: Array) -> tuple[Float[Array, "batch kv_heads rows head_dim"], Array | None]:
    """Keys or values of the cache in float32, and of int8 what each is still to be multiplied by."""
    if rows.dtype != jnp.int8:
        return rows.astype(jnp.float32), None
    codes, scales = from_int8(rows)
    return codes, scales[:, :, None, None]  # [batch, kv_heads, 1, 1, rows]


def project_add(
    h: Float[Array, "batch seq width"], layer: Layer, x: Float[Array, "batch seq dim"], *, product: Product
) -> Float[Array, "batch seq dim"]:
    """The output projection, added to the residual stream."""
    return (x.astype(jnp.float32) + _linear(h, layer.o, product)).astype(x.dtype)


def norm_gate_up(
    x: Float[Array, "batch seq dim"], layer: Layer, *, config: Config, product: Product
) -> Float[Array, "batch seq ffn"]:
    """RMSNorm, gate and up, SwiGLU."""
    assert isinstance(layer.ffn, FeedForward)
    n = rmsnorm(x, layer.ffn_norm, eps=config.eps).astype(x.dtype)
    return _swiglu(_linear(n, layer.ffn.gate_up, product)).astype(x.dtype)


def down_add(
    g: Float[Array, "batch seq ffn"], layer: Layer, x: Float[Array, "batch seq dim"], *, product: Product
) -> Float[Array, "batch seq dim"]:
    """The down projection, added to the residual stream."""
    assert isinstance(layer.ffn, FeedForward)
    return (x.astype(jnp.float32) + _linear(g, layer.ffn.down, product)).astype(x.dtype)


def moe_add(
    x: Float[Array, "batch seq dim"], layer: Layer, *, config: Config, product: Product
) -> Float[Array, "batch seq dim"]:
    """RMSNorm, the experts that the router chooses, weighted; added to the residual stream.

    For one token only the chosen experts are read. For more, all are, and those that a token did not
    choose count 0 for it: among many tokens most experts are chosen by some.
    """
    assert isinstance(layer.ffn, Experts)
    n = rmsnorm(x, layer.ffn_norm, eps=config.eps).astype(x.dtype)
    p = jax.nn.softmax(product(n, layer.ffn.router), axis=-1)  # [batch, seq, experts]
    weights, chosen = lax.top_k(p, config.experts_per_token)
    if config.renormalize_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)  # [batch, seq, experts_per_token]

    def expert(ffn: FeedForward):
        return lambda n: product(_swiglu(product(n, ffn.gate_up.weight)).astype(x.dtype), ffn.down.weight)

    experts = [expert(ffn) for ffn in layer.ffn.experts]
    y = x.astype(jnp.float32)
    if x.shape[0] * x.shape[1] == 1:
        for rank in range(config.experts_per_token):
            y = y + weights[..., rank, None] * lax.switch(chosen[0, 0, rank], experts, n)
    else:
        shares = jnp.sum(jax.nn.one_hot(chosen, config.experts) * weights[..., None], axis=-2)  # [batch, seq, experts]
        for e in range(config.experts):
            y = y + shares[..., e, None] * experts[e](n)
    return y.astype(x.dtype)


def norm_logits(
    x: Float[Array, "*batch dim"], params: Params, *, config: Config, product: Product
) -> Float[Array, "*batch vocab"]:
    """The last RMSNorm and one logit per token of the vocabulary, in float32."""
    return product(rmsnorm(x, params.norm, eps=config.eps).astype(x.dtype), params.head)


def rmsnorm(x: Float[Array, "*batch n"], weight: Float[Array, " n"], *, eps: float) -> Float[Array, "*batch n"]:
    """`reference.rmsnorm` in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def rope(x: Float[Array, "batch seq heads head_dim"], positions: Positions) -> Float[Array, "batch seq heads head_dim"]:
    """`reference.rope.rope_halves` in float32."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = positions.cos[:, :, None], positions.sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _linear(x: Float[Array, "batch seq cols"], linear: Linear, product: Product) -> Float[Array, "batch seq rows"]:
    y = product(x, linear.weight)
    return y if linear.bias is None else y + linear.bias.astype(jnp.float32)


def _swiglu(gate_up: Float[Array, "*batch gate_up"]) -> Float[Array, "*batch ffn"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _visible(
    at: Int[Array, "batch seq"], rows: Int[Array, " rows"], window: int | None
) -> Bool[Array, "batch 1 1 seq rows"]:
    i = at[:, None, None, :, None]
    return rows <= i if window is None else (rows <= i) & (rows > i - window)


def _spans(smallest: int, capacity: int, *, growth: int) -> list[int]:
    """What attention may read of a cache: each span costs a branch of the program, and memory to compile it."""
    spans = []
    span = smallest
    while 4 * span < 3 * capacity:
        spans.append(span)
        span *= growth
    return [*spans, capacity]


def dot(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """A `Product` that leaves everything to XLA. HIGHEST keeps a GPU from rounding float32 to TF32."""
    if isinstance(weight, QuantizedMatrix):
        return _decoded_dot(x, weight, most=MOST_DECODED)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _decoded_dot(x: Float[Array, "*batch cols"], weight: QuantizedMatrix, *, most: int) -> Float[Array, "*batch rows"]:
    """So many rows are decoded at a time that at most `most` weights are there in float32 at once."""
    x = _padded(x.astype(jnp.float32), weight)
    rows = len(weight.codes)
    block = max((size for size in range(1, rows + 1) if rows % size == 0 and size * weight.cols <= most), default=1)
    if block == rows or block < FEWEST_ROWS:
        return dot(x, weight.weights())
    blocks = jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), weight)
    y = lax.map(lambda part: dot(x, part.weights()), blocks)  # [blocks, *batch, block]
    return jnp.moveaxis(y, 0, -2).reshape(*x.shape[:-1], rows)


def cpu_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """A `Product` for XLA's CPU compiler, which multiplies one vector at memory speed only if it sees no dot.

    As a sum of 16-lane slices the product is elementwise, which becomes one vectorized loop over
    both cores; the barrier keeps the last, small sum out of it. A narrow weight is widened, or decoded, in
    registers there, where a dot would widen the whole matrix in memory first.
    """
    if x.size != x.shape[-1] or not (block := _block(weight)):
        return _dot_of_many(x, weight)
    v = x.reshape(-1).astype(jnp.float32)
    y = _quantized_sums(v, weight, block) if isinstance(weight, QuantizedMatrix) else _plain_sums(v, weight, block)
    return y.reshape(*x.shape[:-1], -1)


def _dot_of_many(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """A quantized matrix is decoded in two parts at least, in a loop: without one, XLA decodes those of all layers
    before the first is multiplied, and keeps them all in memory."""
    if not isinstance(weight, QuantizedMatrix):
        return dot(x, weight)
    return _decoded_dot(x, weight, most=min(MOST_CPU_DECODED, len(weight.codes) * weight.cols // 2))


def _block(weight: Any) -> int | None:
    """How many columns of a row to multiply in one loop, if it can be cut so.

    As many as 64 slices, since more are slow; of codes that take long to decode, fewer.
    """
    if isinstance(weight, QuantizedMatrix):
        cols, step = weight.cols, max(weight.group, PAIR) if weight.group < weight.cols else ROW
        most = max(step, weight.slices * LANES)
    else:
        cols, step, most = weight.shape[1], LANES, 64 * LANES
    return max((size for size in range(step, min(cols, most) + 1, step) if cols % size == 0), default=None)


def partial_sums(weight: Any) -> int:
    """Numbers of float32 that `cpu_product` leaves in memory before it takes the last sum: 16 a block.

    `weight` is a `Matrix`, or the shapes of one.
    """
    block = _block(weight)
    rows, cols = (len(weight.codes), weight.cols) if isinstance(weight, QuantizedMatrix) else weight.shape
    return rows * (cols // block) * LANES if block else 0


def _plain_sums(x: Float[Array, " cols"], weight: Float[Array, "rows cols"], block: int) -> Float[Array, " rows"]:
    w = weight.reshape(len(weight), -1, block)
    v = lax.optimization_barrier(x).reshape(-1, block)
    return _last_sum(_lane_sums(w, v).reshape(len(w), -1))


def _lane_sums(
    w: Float[Array, "*rows n"], v: Float[Array, "*some n"], lanes: int = LANES
) -> Float[Array, "*rows lanes"]:
    """Of each row of w the products with v, of which every 16th is in the same sum, or those `lanes` apart."""
    slices = (slice(i, i + lanes) for i in range(0, w.shape[-1], lanes))
    return lax.optimization_barrier(sum(w[..., s].astype(jnp.float32) * v[..., s] for s in slices))


def _last_sum(partial_sums: Float[Array, "*rows n"]) -> Float[Array, " *rows"]:
    """A dot with ones: XLA's own sums of many short rows take several times as long."""
    return jnp.dot(partial_sums, jnp.ones(partial_sums.shape[-1]), precision=lax.Precision.HIGHEST)


def _quantized_sums(x: Float[Array, " cols"], weight: QuantizedMatrix, block: int) -> Float[Array, " rows"]:
    """A group's scale is multiplied once for its 16 partial sums, a row's once for all.

    A group's minimum is multiplied by 16 partial sums of x; adding it to each weight would take two thirds longer. So
    rounding errors are those of levels times scales and of minima, which may cancel.
    """
    v = lax.optimization_barrier(_padded(x, weight) * weight.unit).reshape(-1, block)
    rows, grouped = len(weight.codes), weight.group < weight.cols or weight.cols == block
    group = weight.group if grouped else block
    in_loop = grouped or weight.minima is not None  # whether scales are multiplied there

    def of_group(a: Array, g: int) -> Array:
        """What belongs to one group of each block, or to the row."""
        return a.reshape(rows, -1, block // group, 1)[:, :, g] if grouped else a[..., None]

    def sums(g: int) -> Float[Array, "rows blocks lanes"]:
        """Of one group of each block."""
        pieces = weight.pieces(block, g * group, (g + 1) * group)
        if weight.zeros is not None:
            zeros = of_group(weight.zeros, g).astype(jnp.float32)
            pieces = ((column, levels - zeros) for column, levels in pieces)
        total = jnp.asarray(sum(levels * v[:, column : column + LANES] for column, levels in pieces))
        if in_loop:
            total = total * weight.real_scales(of_group(weight.scales, g))
        if weight.minima is not None:
            inputs = sum(v[:, column : column + LANES] for column in range(g * group, (g + 1) * group, LANES))
            total = total + inputs * of_group(weight.minima, g)
        return total

    partial_sums = lax.optimization_barrier(sum(sums(g) for g in range(block // group)))
    y = _last_sum(partial_sums.reshape(rows, -1))
    return y if in_loop else y * weight.real_scales(weight.scales[:, 0])


def _padded(x: Float[Array, "*batch cols"], weight: QuantizedMatrix) -> Float[Array, "*batch padded"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, weight.cols - x.shape[-1])])


class Ops(NamedTuple):
    """One implementation of every op; the functions of this module say what each one does."""

    norm_qkv: Callable[..., tuple[Array, LayerCache]]
    attend: Callable[..., Array]
    project_add: Callable[..., Array]
    norm_gate_up: Callable[..., Array]
    down_add: Callable[..., Array]
    moe_add: Callable[..., Array]
    norm_logits: Callable[..., Array]


def plain(product: Product) -> Ops:
    """The table whose products are all `product`."""
    return Ops(
        norm_qkv=partial(norm_qkv, product=product),
        attend=attend,
        project_add=partial(project_add, product=product),
        norm_gate_up=partial(norm_gate_up, product=product),
        down_add=partial(down_add, product=product),
        moe_add=partial(moe_add, product=product),
        norm_logits=partial(norm_logits, product=product),
    )


XLA = plain(dot)
CPU = plain(cpu_product)._replace(attend=cpu_attend)
