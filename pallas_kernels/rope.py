r"""Rotary position embedding in halves: features i and i + head_dim/2 of each head turn by one angle.

    (a, b)  ->  (a cos - b sin,  b cos + a sin)

A thread block turns some heads of one token. In registers the first halves of its heads are one array and the second
halves another with the same layout. Both features of a pair are then in one thread, and cos and sin are loaded once.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.parts.compat import LANES, THREADS, WARPS, Target, current_target, store_in_pieces, tiled_layout
from pallas_kernels.parts.operands import check_operand
from pallas_kernels.parts.spans import Spans, check_rows
from pallas_kernels.unsupported import Unsupported

HEAD_DIMS = (64, 128, 256)
BLOCK = 2048  # pairs that a thread block turns


def rope(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float32[Array, "*batch pairs"],
    sin: Float32[Array, "*batch pairs"],
) -> Float[Array, "*batch heads head_dim"]:
    """Turn every head of `x` by the angles whose cosines and sines are given for each token; rounded once.

    Raises ValueError for cos or sin of another shape, and Unsupported unless `x` is float32 or bfloat16 with heads 64,
    128 or 256 wide. Reads and writes `x` once. Fewer than 4 heads are padded, which is a copy. If 128 threads hold more
    heads than divide their number (16 heads of 128 in bfloat16), a few heads are turned twice.
    """
    check_rows("rope", x)
    *batch, heads, head_dim = x.shape if x.ndim > 1 else (0, *x.shape)
    if head_dim not in HEAD_DIMS or not heads:
        raise Unsupported(f"rope takes [..., heads, head_dim] with heads of {HEAD_DIMS} features, got {list(x.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_operand("rope", name, table, (*batch, head_dim // 2), np.float32)
    return _rope(x, cos, sin, target=current_target())


@partial(jax.jit, static_argnames="target")
def _rope(x, cos, sin, *, target: Target):
    *batch, heads, head_dim = x.shape
    tokens, pairs = prod(batch), head_dim // 2
    halves = x.reshape(tokens, heads, 2, pairs)
    if heads < WARPS:
        halves = jnp.pad(halves, ((0, 0), (0, WARPS - heads), (0, 0), (0, 0)))
    padded = halves.shape[1]
    tile = _Tile.of(padded, pairs, x.dtype)
    spans = Spans(padded, tile.heads, max(tile.heads, min(BLOCK // pairs, padded) // tile.heads * tile.heads))

    def rope(
        x_ref,  # [tokens, padded, 2, pairs]
        cos_ref,  # [tokens, pairs]
        sin_ref,  # [tokens, pairs]
        y_ref,  # [tokens, padded, 2, pairs]
    ):
        token = lax.axis_index("token")
        target.wait_for_previous()
        target.let_next_start()
        cos, sin = (
            plgpu.load(ref.at[token], layout=tile.layout.reduce(0), optimized=False) for ref in (cos_ref, sin_ref)
        )

        def work(_, span):
            def load(half):
                ref = x_ref.at[token, span.slice, half]
                return plgpu.load(ref, layout=tile.layout, optimized=False).astype(jnp.float32)

            def over_heads(table):
                return lax.broadcast_in_dim(table, (span.size, pairs), (1,))

            a, b, c, s = load(0), load(1), over_heads(cos), over_heads(sin)
            for half, turned in enumerate((a * c - b * s, b * c + a * s)):
                store_in_pieces(y_ref.at[token, span.slice, half], turned.astype(x.dtype))

        spans.each(lax.axis_index("span"), work)

    kernel = target.kernel(
        rope,
        out_type=jax.ShapeDtypeStruct(halves.shape, x.dtype),
        grid=(spans.count, tokens),
        grid_names=("span", "token"),
    )
    return kernel(halves, cos.reshape(tokens, pairs), sin.reshape(tokens, pairs))[:, :heads].reshape(x.shape)


@dataclass(frozen=True)
class _Tile:
    """Halves of some heads: a vector of pairs for each of 128 threads."""

    heads: int
    pairs: int
    vector: int

    @classmethod
    def of(cls, heads: int, pairs: int, dtype: np.dtype) -> "_Tile":
        """Choose the widest vectors that need no more heads than there are; vectors for 4 heads always fit."""
        widest = 16 // dtype.itemsize
        vectors = [v for v in (1, 2, 4, 8) if pairs <= v * LANES and THREADS * v <= heads * pairs]
        vector = max(v for v in vectors if v <= widest)
        return cls(THREADS * vector // pairs, pairs, vector)

    @property
    def layout(self) -> Any:
        """Layout of [heads, pairs] in registers: some lanes go along the pairs of a head, the rest over heads."""
        a_warp = self.heads // WARPS
        tiling = ((self.heads, self.pairs), (a_warp, self.pairs), (1, self.vector))
        return tiled_layout(tiling, warps=-6, lanes=(-4, -3))
