"""Attention while decoding, over a paged cache: sequences of different lengths take pages from a common pool.

A page has the keys of some consecutive positions of one sequence, for every key head. The page of v with the same
number has the values. A table lists the pages of each sequence in order (PagedAttention, Kwon et al., 2023,
https://arxiv.org/abs/2309.06180). Everything else is as in `attention_decode`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from llamaspec.pallas_kernels.parts.attention_parts import attend_in_parts, check_attention, choose_splits
from llamaspec.pallas_kernels.parts.compat import Target, current_target
from llamaspec.pallas_kernels.parts.key_ring import TILE
from llamaspec.pallas_kernels.unsupported import Unsupported


def attention_paged(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "pages kv_heads page head_dim"],
    v: Float[Array, "pages kv_heads page head_dim"],
    table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    *,
    window: int | None = None,
    splits: int | None = None,
) -> Float[Array, "batch width"]:
    """Attend like `attention_decode`, but to keys and values in pages of `page` rows.

    `table[sequence]` lists the sequence's pages. Position i of the sequence is in row i mod page of the page
    `table[sequence, i // page]`. A length is clamped to 0 ... max_pages * page, and page numbers to the existing ones.
    The kernel may read pages without visible positions, and ignores their content. Raises Unsupported unless a page has
    8, 16, 32 or a multiple of 64 rows, and in the cases of `attention_decode`.
    """
    op = "attention_paged"
    if k.ndim != 4 or not (k.shape[2] and (k.shape[2] % TILE == 0 or (TILE % k.shape[2] == 0 and k.shape[2] >= 8))):
        raise Unsupported(
            f"{op} takes k [pages, kv_heads, page, head_dim] with 8, 16, 32 or a multiple of 64 rows per page, "
            f"got {k.shape}"
        )
    if table.ndim != 2 or len(table) != len(q) or 0 in table.shape or table.dtype != np.dtype("int32"):
        raise ValueError(f"{op} takes a table [{len(q)}, max_pages] in int32, got {table.shape} in {table.dtype}")
    check_attention(op, q, k, v, lengths, window=window, splits=splits)
    target = current_target()
    splits = splits or choose_splits(len(q) * k.shape[1], table.shape[1] * k.shape[2], TILE, target.card)
    return _attention_paged(q, k, v, table, lengths, window=window, splits=splits, target=target)


@partial(jax.jit, static_argnames=("window", "splits", "target"))
def _attention_paged(q, k, v, table, lengths, *, window: int | None, splits: int, target: Target):
    pages, _, page, _ = k.shape
    rows = min(page, TILE)  # rows of a page that go into one tile

    def locate(ref, row, head, tile, table_ref):
        def piece(i):
            first = tile * TILE + i * rows
            number = table_ref[row, jnp.minimum(first // page, table.shape[1] - 1)]
            return ref.at[jnp.clip(number, 0, pages - 1), head, pl.ds(pl.multiple_of(lax.rem(first, page), rows), rows)]

        return [piece(i) for i in range(TILE // rows)]

    def locate_rows(ref, row, head, first, rows, table_ref):
        number = jnp.clip(table_ref[row, jnp.minimum(first // page, table.shape[1] - 1)], 0, pages - 1)
        return ref.at[number, head, pl.ds(pl.multiple_of(lax.rem(first, page), 8), rows)]

    return attend_in_parts(
        "attention_paged",
        locate,
        locate_rows,
        q,
        k,
        v,
        lengths,
        table,
        capacity=table.shape[1] * page,
        tile=TILE,
        pieces=TILE // rows,
        window=window,
        splits=splits,
        target=target,
    )
