"""Attention while decoding, for all sequences and heads.

Each thread block attends to a part of the keys of one key head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from llamaspec.pallas_kernels.parts.attention_combine import attention_combine
from llamaspec.pallas_kernels.parts.attention_split import SplitAttention
from llamaspec.pallas_kernels.parts.attention_split_float32 import SplitAttentionFloat32
from llamaspec.pallas_kernels.parts.attention_split_registers import SplitAttentionRegisters
from llamaspec.pallas_kernels.parts.card import Card
from llamaspec.pallas_kernels.parts.compat import Target
from llamaspec.pallas_kernels.parts.inline import read_past_first_cache
from llamaspec.pallas_kernels.parts.key_ring import TILE, KeyRing, OpenRing, visible_keys
from llamaspec.pallas_kernels.parts.key_rows import KeyRows
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.staging import own_meetings
from llamaspec.pallas_kernels.unsupported import Unsupported

RING_BYTES = 32 * 1024  # bytes of a block's ring, unless two tiles take more; the rest is for the next kernel's blocks
AT_ONCE = 2048  # maximum number of keys of a head if each block has one tile

# A function that finds the pieces of a tile, given an array of keys or values, a sequence, a key head, the tile and the
# tables.
Locate = Callable[..., Sequence[Any]]
# A function that finds adjacent rows, given an array of keys or values, a sequence, a key head, the first key, the
# number of rows, and the tables. See `key_rows.RowsAt`.
LocateRows = Callable[..., Any]


def attend_in_parts(
    name: str,
    locate: Locate,
    locate_rows: LocateRows,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *tables: Array,
    capacity: int,
    tile: int,
    pieces: int,
    window: int | None,
    splits: int,
    target: Target,
) -> Array:
    """Attend from q [batch, heads, head_dim] to the keys of a cache. Returns [batch, heads * head_dim].

    `locate` finds the keys to copy to shared memory, and `locate_rows` finds the keys to load to registers. The keys of
    a tile are in `pieces` separate places in memory.
    """
    batch, heads, head_dim = q.shape
    group = heads // k.shape[1]
    ring = None
    if target.card.wgmma:
        ring = KeyRing(head_dim, np.dtype(k.dtype), splits, tile, ring_stages(tile, head_dim, k.dtype), pieces)
    in_registers = ring is None and q.dtype == np.dtype("bfloat16")
    shares = max(1, group // 8) if in_registers else 1  # of a group, each with separate thread blocks
    kv_heads, group = k.shape[1] * shares, group // shares
    if q.dtype != np.dtype("bfloat16"):
        part: Any = SplitAttentionFloat32(group, head_dim, ring)
    else:
        part = SplitAttentionRegisters(group, head_dim) if ring is None else SplitAttention(group, ring)

    def body(q_ref, k_ref, v_ref, lengths_ref, *refs, staged):
        split, head, row = (lax.axis_index(axis) for axis in ("splits", "kv_heads", "batch"))
        table_refs, out_refs = refs[: len(tables)], refs[len(tables) :]
        key_head = head if shares == 1 else lax.div(head, shares)

        def ring_for(length):
            assert ring is not None
            return OpenRing(
                ring,
                {"k": k_ref, "v": v_ref},
                lambda ref, tile: locate(ref, row, key_head, tile, *table_refs),
                split,
                *visible_keys(length, capacity, window),
                staged["ring"],
                target,
            )

        def rows_for(length):
            return KeyRows(
                tile,
                splits,
                split,
                *visible_keys(length, capacity, window),
                {"k": k_ref, "v": v_ref},
                lambda ref, first, rows: locate_rows(ref, row, key_head, first, rows, *table_refs),
                tile // pieces,
                target,
            )

        target.let_next_start()
        if target.overlaps and ring is not None and not tables:
            # We may read an old length here, and the newest keys may not be written yet. Both are harmless, because we
            # only prefetch keys to the L2 cache. With pages we would have to read the table first.
            ring_for(read_past_first_cache(lengths_ref.at[pl.ds(row, 1)])).ask_ahead()
        target.wait_for_previous()
        opened = (rows_for if ring is None else ring_for)(lengths_ref[row])
        if splits == 1:
            part.run(q_ref.at[row, head], opened, out_refs[0].at[row, head], None, staged)
        else:
            o_ref, stats_ref = (ref.at[row, head, split] for ref in out_refs)
            part.run(q_ref.at[row, head], opened, o_ref, stats_ref, staged)

    body.__name__ = name
    rows = part.columns if in_registers else group  # of o; a register has numbers of two queries
    output_shape = jax.ShapeDtypeStruct((batch, kv_heads, rows, head_dim), q.dtype)
    parts = (
        jax.ShapeDtypeStruct((batch, kv_heads, splits, part.columns, head_dim), np.float32),
        jax.ShapeDtypeStruct((batch, kv_heads, splits, 2, part.columns), np.float32),
    )
    kernel = target.kernel(
        body,
        out_type=output_shape if splits == 1 else parts,
        grid=(splits, kv_heads, batch),
        grid_names=("splits", "kv_heads", "batch"),
        scratch_types={"staged": part.scratch()},
        compiler_params=own_meetings(approx_math=True, reduction_scratch_bytes=16384 if in_registers else 4096),
    )
    outputs = kernel(q.reshape(batch, kv_heads, group, head_dim), k, v, lengths, *tables)
    if splits == 1:
        return (outputs[:, :, :group] if in_registers else outputs).reshape(batch, -1)
    return attention_combine(*outputs, group=group, out=np.dtype(q.dtype), target=target)


def keys_of_a_tile(heads: int, group: int, head_dim: int, dtype: np.dtype, seen: int, card: Card) -> int:
    """Choose the number of keys of a tile: 64 or 128.

    The result is 128 for few small heads in bfloat16, if a thread block would have several tiles of 64 keys.

    With tiles of 128 keys, half as many thread blocks read the same number of keys at once, and leave more room for the
    next kernels. But a block with only one tile takes longer for 128 keys than for 64 (docs/lessons-gpu.md). `heads` is
    the number of key heads in all sequences, and `group` the number of query heads per key head. Groups above 8 get 64
    keys, because a thread has too few registers for 128. `seen` is the number of keys that a query sees. Without a
    ring, tiles always have 64 keys.

    >>> from llamaspec.pallas_kernels.parts.card import H200
    >>> bfloat16 = jax.dtypes.canonicalize_dtype("bfloat16")
    >>> [keys_of_a_tile(heads, 8, 64, bfloat16, seen, H200) for heads, seen in ((4, 8192), (4, 2048), (12, 8192))]
    [128, 64, 64]
    """
    small = card.wgmma and group <= 8 and head_dim == 64 and dtype == np.dtype("bfloat16")
    few = heads * AT_ONCE // TILE <= 2 * card.processors
    return 2 * TILE if small and few and seen > AT_ONCE else TILE


def ring_stages(tile: int, head_dim: int, dtype: np.dtype) -> int:
    """Return the number of tiles in the ring of keys. The ring of values has the same number."""
    return max(2, RING_BYTES // (2 * tile * head_dim * dtype.itemsize))


def choose_splits(heads: int, capacity: int, tile: int, card: Card) -> int:
    """Choose the number of blocks per key head: 1 or a multiple of 4. `heads` counts the key heads of all sequences.

    If the GPU has room for a block per tile of keys, each tile gets a block. Otherwise the number is a power of 2. With
    64 tiles, for example, each of 16 blocks has 4 tiles. 20 blocks are slower, because some of them would also have 4
    tiles (docs/lessons-gpu.md).

    >>> from llamaspec.pallas_kernels.parts.card import H200
    >>> [choose_splits(heads, 4096, tile, H200) for heads, tile in ((4, 64), (4, 128), (12, 64), (40, 64))]
    [32, 16, 16, 4]
    >>> [choose_splits(heads, capacity, 64, H200) for heads, capacity in ((12, 1280), (4, 1800), (4, 256))]
    [20, 32, 4]
    """
    tiles = -(-capacity // tile)
    blocks = (2 if card.wgmma else 4) * card.processors  # that run at once
    if heads >= blocks // 2 or tiles == 1:
        return 1
    fill = min(blocks // heads, AT_ONCE // tile)
    return max(4, 1 << (fill.bit_length() - 1) if tiles > fill else -(-tiles // 4) * 4)


def check_attention(
    op: str, q: Array, k: Array, v: Array, lengths: Array, *, window: int | None, splits: int | None
) -> None:
    """Raise ValueError for shapes that do not fit together, and Unsupported for arguments that are not supported."""
    if q.ndim != 3 or k.ndim != 4 or k.shape != v.shape or k.shape[3] != q.shape[2] or 0 in q.shape or 0 in k.shape:
        raise ValueError(
            f"{op} takes q [batch, heads, head_dim] and k and v of equal shapes [..., rows, head_dim], got "
            f"{q.shape}, {k.shape} and {v.shape}"
        )
    batch, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if q.dtype not in (np.dtype("float32"), np.dtype("bfloat16")) or not q.dtype == k.dtype == v.dtype:
        raise Unsupported(
            f"{op} takes q, k and v all in float32 or all in bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if head_dim not in (64, 128):
        raise Unsupported(f"{op} takes a head_dim of 64 or 128, got {head_dim}")
    if heads % kv_heads:
        raise ValueError(
            f"{op} takes a number of query heads that is a multiple of the key heads, got {heads} and {kv_heads}"
        )
    group = heads // kv_heads
    if group > 8 and (group > 64 or group % 8 or q.dtype == np.dtype("float32")):
        more = "" if q.dtype == np.dtype("float32") else ", or 16, 24, ... 64"
        raise Unsupported(f"{op} takes 1 to 8 query heads per key head{more} in {q.dtype}, got {group}")
    check_operand(op, "lengths", lengths, (batch,), np.int32)
    if window is not None and window < 1:
        raise ValueError(f"{op} takes a window of 1 or more, got {window}")
    if splits is not None and splits != 1 and (splits < 1 or splits % 4):
        raise Unsupported(f"{op} takes 1 split or a multiple of 4, got {splits}")
