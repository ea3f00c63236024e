"""RMSNorm, one product with the stacked [q; k; v], RoPE, and the append of k and v to the cache: one kernel.

    n_b = x_b g / rms(x_b)        [q; k; v]_b = W n_b (+ bias)        then RoPE rotates q and k

RoPE rotates numbers d and d + head_dim / 2 of a head as a pair, so a tile has 8 rows of the first half of a head and
the corresponding 8 rows of the second half. The kernel writes q to the output, and k and v directly into row `position`
of the cache, in pieces of 8 numbers. The loop is as in `gemv`.

W may be several stacked matrices, each of whole heads: a GGUF file may have q and k in one kind of codes and v in
another. Each matrix has separate thread blocks with their own loop, in the same kernel.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llamaspec.pallas_kernels.parts.compat import Target, current_target, store_in_pieces
from llamaspec.pallas_kernels.parts.matrix import MatrixOperand, ProductOf, products_beside, shares
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.staging import finish_reads, own_meetings
from llamaspec.pallas_kernels.parts.tile import Tile
from llamaspec.pallas_kernels.unsupported import Unsupported

PIECE = 8  # rows of W in a run; a tile has two runs, one in each half of a head
AHEAD = 4  # vectors for which positions and angles are read before the product; registers limit their number


class StackedPart(NamedTuple):
    """One of the stacked matrices of W: its loop, and the indices of its first thread block and its first head."""

    product: ProductOf
    first_block: int
    first_head: int
    head_dim: int

    @property
    def pieces(self) -> int:
        """Return the number of tiles of a head."""
        return self.head_dim // (2 * PIECE)

    def place(self, tile: Any) -> tuple[Any, Any]:
        """Return the head of a tile, and the index of the tile's first row in that head."""
        return self.first_head + lax.div(tile, self.pieces), lax.rem(tile, self.pieces) * PIECE

    def rows(self, tile: Any) -> list[Any]:
        """Return the first row of each half of a tile, counted in this matrix."""
        head, d = lax.div(tile, self.pieces), lax.rem(tile, self.pieces) * PIECE
        return [pl.multiple_of(head * self.head_dim + d + offset, PIECE) for offset in (0, self.head_dim // 2)]


def norm_qkv(
    w: MatrixOperand | Sequence[MatrixOperand],
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
    """Compute q of one new token for each of up to 8 sequences, and write k and v at `positions` of the cache.

    w has the rows of q, then k, then v, in one matrix or in several matrices of whole heads. The arrays have one dtype,
    float32 or bfloat16, with two exceptions: w may be `ScaledCodes` as in `gemv`, and cos and sin are always float32.
    cos and sin have the cosines and sines of the RoPE angles at each sequence's position. If the caller donates the
    caches, they are written in place. A position beyond the capacity is replaced by the last position.

    Raises the errors of `gemv`, and Unsupported unless head_dim is a multiple of 16.
    """
    batch, kv_heads, capacity, head_dim = k.shape
    if head_dim % (2 * PIECE):
        raise Unsupported(f"norm_qkv takes a head_dim that is a multiple of {2 * PIECE}, got {head_dim}")
    matrices = (w,) if isinstance(w, jax.Array | jax.ShapeDtypeStruct) or not isinstance(w, Sequence) else tuple(w)
    several = max((shares(matrix, len(x)) for matrix in matrices), key=len)
    how: dict[str, Any] = {"normed": True, "tile": tile, "runs": 2, "rows": PIECE}
    parts = tuple(_parts(products_beside("norm_qkv", matrices, x[i], **how), head_dim) for i in several)
    rows, cols = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    if any(matrix.shape[0] % head_dim for matrix in matrices):
        raise Unsupported(
            f"norm_qkv takes matrices with a multiple of head_dim = {head_dim} rows, got {[m.shape for m in matrices]}"
        )
    if rows != (heads + 2 * kv_heads) * head_dim:
        raise ValueError(
            f"norm_qkv takes W with {heads} + 2 x {kv_heads} heads of {head_dim} rows each, got {rows} rows"
        )
    if batch != len(x) or not capacity:
        raise ValueError(f"norm_qkv takes k with one sequence per vector ({len(x)}), got k {k.shape}")
    check_operand("norm_qkv", "norm", norm, (cols,), x.dtype)
    check_operand("norm_qkv", "bias", bias, (rows,), x.dtype)
    check_operand("norm_qkv", "k", k, k.shape, x.dtype)
    check_operand("norm_qkv", "v", v, k.shape, x.dtype)
    check_operand("norm_qkv", "positions", positions, (batch,), jnp.int32)
    for name, array in (("cos", cos), ("sin", sin)):
        check_operand("norm_qkv", name, array, (batch, head_dim // 2), jnp.float32)
    return _norm_qkv(
        matrices, x, norm, bias, k, v, positions, cos, sin, parts=parts, heads=heads, eps=eps, target=current_target()
    )


def _parts(products: Sequence[ProductOf], head_dim: int) -> tuple[StackedPart, ...]:
    parts, block, head = [], 0, 0
    for product in products:
        parts.append(StackedPart(product, block, head, head_dim))
        block += product.blocks
        head += product.tiles * product.rows * product.runs // head_dim
    return tuple(parts)


@partial(jax.jit, static_argnames=("parts", "heads", "eps", "target"))
def _norm_qkv(matrices, x, norm, bias, k, v, positions, cos, sin, *, parts, heads: int, eps: float, target: Target):
    k_ref, v_ref = jax.new_ref(k), jax.new_ref(v)
    launches, first, places = [], 0, (positions, cos, sin)
    fixed: dict[str, Any] = {"heads": heads, "eps": eps, "target": target}
    for launch_parts in parts:
        batch = launch_parts[0].product.batch
        some = x[first : first + batch]
        launches.append(_launched(launch_parts, first, matrices, some, norm, bias, k_ref, v_ref, *places, **fixed))
        first += batch
    return jnp.concatenate(launches), jax.freeze(k_ref), jax.freeze(v_ref)


def _launched(
    parts, base: int, matrices, x, norm, bias, k, v, positions, cos, sin, *, heads: int, eps: float, target: Target
):
    """Launch the kernel for the vectors x of the sequences `base`, `base` + 1, ...

    We pass small arrays whole: a slice would be a view, but a kernel's arrays must start at multiples of 256 bytes.
    """
    batch, (_, kv_heads, capacity, head_dim) = len(x), k.shape
    operands = [
        [*part.product.operands(w), part.product.view(x), part.product.view(norm)]
        for part, w in zip(parts, matrices, strict=True)
    ]
    optional = [] if bias is None else [bias]
    half = head_dim // 2

    def norm_qkv(*refs, staged=None):
        refs, block = list(refs), lax.axis_index("block")
        operand_refs = [[refs.pop(0) for _ in arrays] for arrays in operands]
        for part, part_refs in zip(parts, operand_refs, strict=True):
            if staged is not None:
                multiply(part, block, part_refs, refs, staged)
                continue

            # A block runs the loop of one part only, so the parts share its memory.
            @pl.when((block >= part.first_block) & (block < part.first_block + part.product.blocks))
            def _(part=part, part_refs=part_refs):
                def multiply_part(staged):
                    multiply(part, block - part.first_block, part_refs, refs, staged)
                    finish_reads(target)

                pl.run_scoped(multiply_part, staged=part.product.scratch(normed=True))

    def multiply(part, block, operand_refs, refs, staged):
        *weight_refs, x_ref, norm_ref = operand_refs
        k_ref, v_ref, at_ref, cos_ref, sin_ref, *bias_refs, q_ref = refs
        product, place, starts = part.product, part.place, part.rows

        def turn(tile, b):
            """Load the position of vector b, and the cosines and sines for the tile."""
            _, d = place(tile)
            rows = [ref.at[base + b, pl.ds(d, PIECE)] for ref in (cos_ref, sin_ref)]
            return jnp.clip(at_ref[base + b], 0, capacity - 1), *map(product.load_rows, rows)

        def read(tile):
            """Load the biases of both halves, and positions and angles of the first vectors."""
            head, d = place(tile)
            first = head * head_dim + d
            rows = [pl.ds(pl.multiple_of(first + offset, PIECE), PIECE) for offset in (0, half)]
            biases = [[product.load_rows(bias_ref.at[some]) for some in rows] for bias_ref in bias_refs]
            return biases, [turn(tile, b) for b in range(min(batch, AHEAD))]

        def finish(tile, dots, read):
            head, d = place(tile)
            turned = (head < heads + kv_heads).astype(jnp.float32)  # 0 for v, which RoPE does not turn
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

        ends: dict[str, Any] = {"ahead": read, "finish": finish}
        product.run(block, weight_refs, starts, x_ref, norm_ref, staged, target, eps=eps, **ends)

    scratch = {"staged": parts[0].product.scratch(normed=True)} if len(parts) == 1 else {}
    kernel = target.kernel(
        norm_qkv,
        out_type=jax.ShapeDtypeStruct((batch, heads, head_dim), x.dtype),
        grid=(sum(part.product.blocks for part in parts),),
        grid_names=("block",),
        compiler_params=own_meetings(),
        scratch_types=scratch,
    )
    return kernel(*chain(*operands), k, v, positions, cos, sin, *optional)
