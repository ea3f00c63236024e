"""RMSNorm, one product with the stacked [q; k; v], RoPE, and the append of k and v to the cache: one kernel.

    n_b = x_b g / rms(x_b)        [q; k; v]_b = W n_b (+ bias)        q, k turned by RoPE

RoPE turns the numbers d and d + head_dim / 2 of a head together, so a tile is 8 rows of the first half of a head and
the 8 rows of the second half that belong to them. Results of q go to the output, and those of k and v straight into row
`position` of the cache, in pieces of 8 numbers. The loop is that of `gemv`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.parts.compat import Target, current_target, store_in_pieces
from pallas_kernels.parts.matrix import MatrixOperand, product_of, shares
from pallas_kernels.parts.operands import check_operand
from pallas_kernels.parts.staging import own_meetings
from pallas_kernels.parts.tile import Tile
from pallas_kernels.unsupported import Unsupported

PIECE = 8  # rows of W of a run: numbers of a head in each half of a tile
AHEAD = 4  # vectors whose position and angles are read before the product; there are no registers for more


def norm_qkv(
    w: MatrixOperand,
    x: Float[Array, "batch cols"],
    norm: Float[Array, " cols"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    positions: Int[Array, " batch"],
    cos: Float[Array, "batch pairs"],
    sin: Float[Array, "batch pairs"],
    *,
    heads: int,
    eps: float,
    bias: Float[Array, " rows"] | None = None,
    tile: Tile | None = None,
) -> tuple[
    Float[Array, "batch heads head_dim"],
    Float[Array, "batch kv_heads capacity head_dim"],
    Float[Array, "batch kv_heads capacity head_dim"],
]:
    """Compute q of one new token for each of up to 8 sequences, and write its k and v at `positions` of the cache.

    w holds the rows of q, k and v. Arrays are all float32 or all bfloat16, except that w may be `ScaledCodes`, as in
    `gemv`, and that cos and sin, of each sequence's position, are always float32. The caches are written in place where
    the caller donates them. A position past the capacity is taken for the last one.

    Raises what `gemv` raises, and Unsupported unless head_dim is a multiple of 16.
    """
    batch, kv_heads, capacity, head_dim = k.shape
    if head_dim % (2 * PIECE):
        raise Unsupported(f"norm_qkv takes heads of a multiple of {2 * PIECE} numbers, got {head_dim}")
    several = shares(w, len(x))
    products = tuple(product_of("norm_qkv", w, x[i], normed=True, tile=tile, runs=2, rows=PIECE) for i in several)
    rows, cols = w.shape
    if rows != (heads + 2 * kv_heads) * head_dim:
        raise ValueError(f"norm_qkv takes W of {heads} + 2 x {kv_heads} heads of {head_dim} rows, got {rows} rows")
    if batch != len(x) or not capacity:
        raise ValueError(f"norm_qkv takes a cache for each of {len(x)} vectors, got k {k.shape}")
    check_operand("norm_qkv", "norm", norm, (cols,), x.dtype)
    check_operand("norm_qkv", "bias", bias, (rows,), x.dtype)
    check_operand("norm_qkv", "k", k, k.shape, x.dtype)
    check_operand("norm_qkv", "v", v, k.shape, x.dtype)
    check_operand("norm_qkv", "positions", positions, (batch,), jnp.int32)
    for name, array in (("cos", cos), ("sin", sin)):
        check_operand("norm_qkv", name, array, (batch, head_dim // 2), jnp.float32)
    return _norm_qkv(
        w, x, norm, bias, k, v, positions, cos, sin, products=products, heads=heads, eps=eps, target=current_target()
    )


@partial(jax.jit, static_argnames=("products", "heads", "eps", "target"))
def _norm_qkv(w, x, norm, bias, k, v, positions, cos, sin, *, products, heads: int, eps: float, target: Target):
    k_ref, v_ref = jax.new_ref(k), jax.new_ref(v)
    found, first, places = [], 0, (positions, cos, sin)
    for product in products:
        mine = x[first : first + product.batch]
        found.append(
            _launched(product, first, w, mine, norm, bias, k_ref, v_ref, *places, heads=heads, eps=eps, target=target)
        )
        first += product.batch
    return jnp.concatenate(found), jax.freeze(k_ref), jax.freeze(v_ref)


def _launched(
    product, base: int, w, x, norm, bias, k, v, positions, cos, sin, *, heads: int, eps: float, target: Target
):
    """Launch the kernel for some vectors, those of the sequences from `base` on.

    Small arrays are passed whole. A slice would be a view, but a kernel's arrays start at multiples of 256 bytes.
    """
    batch, (_, kv_heads, capacity, head_dim) = len(x), k.shape
    weight = product.operands(w)
    optional = [] if bias is None else [bias]
    pieces = head_dim // (2 * PIECE)  # tiles of a head
    half = head_dim // 2

    def norm_qkv(*refs, staged):
        weight_refs, refs = refs[: len(weight)], refs[len(weight) :]
        x_ref, norm_ref, k_ref, v_ref, at_ref, cos_ref, sin_ref, *bias_refs, q_ref = refs

        def place(tile):
            """Find the head of a tile, and its first number in the first half of that head."""
            return lax.div(tile, pieces), lax.rem(tile, pieces) * PIECE

        def starts(tile):
            head, d = place(tile)
            return [pl.multiple_of(head * head_dim + d + offset, PIECE) for offset in (0, half)]

        def turn(tile, b):
            """Load the position of vector b, and the cosines and sines of the tile."""
            _, d = place(tile)
            rows = [ref.at[base + b, pl.ds(d, PIECE)] for ref in (cos_ref, sin_ref)]
            return jnp.clip(at_ref[base + b], 0, capacity - 1), *map(product.load_rows, rows)

        def read(tile):
            """Load the biases of both halves, and the turns of the first vectors."""
            rows = [pl.ds(start, PIECE) for start in starts(tile)]
            biases = [[product.load_rows(bias_ref.at[some]) for some in rows] for bias_ref in bias_refs]
            return biases, [turn(tile, b) for b in range(min(batch, AHEAD))]

        def finish(tile, dots, read):
            head, d = place(tile)
            turned = (head < heads + kv_heads).astype(jnp.float32)  # 0 for v, which RoPE leaves as it is
            biases, turns = read
            for b, (first, second) in enumerate(dots):
                at, cos, sin = turns[b] if b < len(turns) else turn(tile, b)
                for first_bias, second_bias in biases:
                    first, second = first + first_bias, second + second_bias
                cos, sin = cos * turned + (1.0 - turned), sin * turned
                store(b, head, at, d, first * cos - second * sin)
                store(b, head, at, half + d, second * cos + first * sin)

        def store(b, head, at, d, y):
            numbers, y = pl.ds(pl.multiple_of(d, PIECE), PIECE), y.astype(x.dtype)

            @pl.when(head < heads)
            def _():
                store_in_pieces(q_ref.at[b, head, numbers], y)

            @pl.when(jnp.logical_and(head >= heads, head < heads + kv_heads))
            def _():
                store_in_pieces(k_ref.at[base + b, head - heads, at, numbers], y)

            @pl.when(head >= heads + kv_heads)
            def _():
                store_in_pieces(v_ref.at[base + b, head - heads - kv_heads, at, numbers], y)

        block = lax.axis_index("block")
        ends: dict[str, Any] = {"ahead": read, "finish": finish}
        product.run(block, weight_refs, starts, x_ref, norm_ref, staged, target, eps=eps, **ends)

    kernel = target.kernel(
        norm_qkv,
        out_type=jax.ShapeDtypeStruct((batch, heads, head_dim), x.dtype),
        grid=(product.blocks,),
        grid_names=("block",),
        compiler_params=own_meetings(),
        scratch_types={"staged": product.scratch(normed=True)},
    )
    return kernel(*weight, product.view(x), product.view(norm), k, v, positions, cos, sin, *optional)
