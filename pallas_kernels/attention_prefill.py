r"""Attention of many queries at once: a prompt, or a chunk of a prompt, over a cache.

    o_ih = sum_j softmax_j(<q_ih, k_jg> / sqrt(d)) v_jg        j <= offset + i,  g = h kv_heads // heads

This is flash attention (Dao, 2023, https://arxiv.org/abs/2307.08691): scores never leave the registers. The online
softmax processes one tile of keys after the other. It keeps the largest score so far, the sum of the weights, and the
weighted sum of values.

A thread block has 128 queries of one head. Two warpgroups compute 64 queries each, and a third one fills a ring of keys
and values. As in FlashAttention-3 (Shah et al., 2024, https://arxiv.org/abs/2407.08608), the two computing warpgroups
take turns: while one uses the tensor cores, the other computes its exponentials.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from llamaspec.pallas_kernels.parts.compat import Target, current_target
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.wgmma import WGMMA, accumulate, across, filled, matrices
from llamaspec.pallas_kernels.unsupported import Unsupported

WORKERS = 2  # warpgroups that compute
ROWS = 64  # queries of each computing warpgroup
BLOCK = WORKERS * ROWS
TILE = 128  # keys
LOWEST = float(np.finfo(np.float32).min)  # the maximum before the first score; finite, because -inf - -inf is NaN


def attention_prefill(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    offsets: Int[Array, " batch"],
    *,
    window: int | None = None,
) -> Float[Array, "batch seq width"]:
    """Attend from queries at positions offset, offset + 1, ... to the rows of a cache. width is heads x head_dim.

    The cache already contains the keys and values of these positions. Each query sees the rows up to its own position,
    or the last `window` of them. A query that sees no row, such as a query before position 0, gives zeros. Unseen rows
    may contain anything. An offset is clamped to -seq ... capacity.

    All arrays are bfloat16. Sums and exponentials are float32. The weights are rounded to bfloat16 before they multiply
    v, and the result is rounded once. Scores must stay below 2^31. Raises ValueError for shapes that do not fit
    together, and Unsupported for other dtypes, heads that are not 64 or 128 wide, and a capacity that is not a multiple
    of 8.

    The kernel takes 4 x seq x keys x head_dim operations per head, or half as many if the cache has only the keys of
    these queries. It reads q and writes the result once. It reads the keys and values once for every 128 queries of a
    head. If seq is not a multiple of 8, a padded copy of q is made first.
    """
    check_prefill(q, k, v, offsets, window=window)
    seq = q.shape[1]
    q = jnp.pad(q, ((0, 0), (0, -seq % 8), (0, 0), (0, 0)))  # copies by TMA need this alignment
    return _attention_prefill(q, k, v, offsets, seq=seq, window=window, target=current_target())


@partial(jax.jit, static_argnames=("seq", "window", "target"))
def _attention_prefill(q, k, v, offsets, *, seq: int, window: int | None, target: Target):
    batch, _, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    stages = 256 // head_dim

    def attention_prefill(q_ref, k_ref, v_ref, offsets_ref, o_ref, staged):
        head, row = lax.axis_index("heads"), lax.axis_index("batch")
        block = pl.cdiv(seq, BLOCK) - 1 - lax.axis_index("blocks")  # start with the most work
        target.let_next_start()
        target.wait_for_previous()
        offset = jnp.clip(offsets_ref[row], -seq, capacity)  # larger sums overflow
        queries = Queries(block * BLOCK, offset, jnp.clip(offset + seq, 0, capacity), window)
        ring = Ring(staged, stages)
        worker = lax.axis_index("worker")

        @pl.when(worker == WORKERS)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            key_head = head // (heads // kv_heads)
            ring.fill(k_ref.at[row, key_head], v_ref.at[row, key_head], queries.first_tile, queries.steps)

        @pl.when(worker < WORKERS)
        def _():
            plgpu.set_max_registers(240, action="increase")
            own_rows = pl.ds(queries.first + worker * ROWS, ROWS)
            attend(q_ref.at[row, own_rows, head], o_ref.at[row, own_rows, head], queries, ring, worker, staged, target)

    kernel = target.kernel(
        attention_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, pl.cdiv(seq, BLOCK), batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=WORKERS + 1,
        thread_name="worker",
        scratch_types={"staged": scratch(stages, head_dim, target)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(q, k, v, offsets)[:, :seq].reshape(batch, seq, -1)


def scratch(stages: int, head_dim: int, target: Target) -> dict[str, Any]:
    """Declare the shared memory and barriers of a thread block, by name."""
    tiles = matrices(stages, TILE, head_dim)
    filled_by_copy = plgpu.Barrier(num_barriers=stages)
    read_by_all = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages)
    return {
        "q": matrices(WORKERS, ROWS, head_dim),  # also the buffer for o, at the end
        "q_filled": plgpu.Barrier(num_barriers=WORKERS),
        "k": tiles,
        "k_filled": filled_by_copy,
        "k_read": read_by_all,
        "v": tiles,
        "v_filled": filled_by_copy,
        "v_read": read_by_all,
        "v_cleared": plgpu.Barrier(num_arrivals=WORKERS),
        "turn": plgpu.Barrier(num_arrivals=WORKERS),
        # The tensor cores read the weights from registers. The interpreter can only read them from shared memory.
        "p": matrices(WORKERS, ROWS, TILE) if target.interpret else None,
    }


@dataclass(frozen=True)
class Queries:
    """The queries of a thread block and the tiles of keys that they see."""

    first: Any  # the block's first query, in the sequence
    offset: Any  # position of the sequence's first query
    end: Any  # number of keys in the cache
    window: int | None

    @property
    def stop(self) -> Any:
        """Return the index of the last key that any query of the block sees, plus 1."""
        return jnp.clip(self.offset + self.first + BLOCK, 0, self.end)

    @property
    def start(self) -> Any:
        """Return the index of the first key that any query of the block sees."""
        return (
            jnp.int32(0) if self.window is None else jnp.clip(self.offset + self.first - self.window + 1, 0, self.stop)
        )

    @property
    def first_tile(self) -> Any:
        return self.start // TILE

    @property
    def steps(self) -> Any:
        return pl.cdiv(self.stop, TILE) - self.first_tile

    def unmasked(self, worker) -> tuple[Any, Any]:
        """Return the steps (first, last + 1) for which all 64 queries of a worker see every key of the tile."""
        position = self.offset + self.first + worker * ROWS
        last = jnp.clip(jnp.minimum(position + 1, self.stop) // TILE - self.first_tile, 0, self.steps)
        if self.window is None:
            return jnp.int32(0), last
        first = pl.cdiv(jnp.maximum(position + ROWS - self.window, self.start), TILE) - self.first_tile
        return jnp.minimum(first, last), last

    def seen(self, worker, step, shape: tuple[int, int]) -> Any:
        """Return a mask [queries, keys] that is True where a query of a worker sees a key of the step's tile."""
        query = self.offset + self.first + worker * ROWS + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        key = (self.first_tile + step) * TILE + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        seen = (key <= query) & (key < self.end)
        return seen if self.window is None else seen & (key > query - self.window)


@dataclass(frozen=True)
class Ring:
    """Tiles of K and V in shared memory. One warpgroup fills them, and the other two compute."""

    staged: dict[str, Any]
    stages: int

    def fill(self, k_ref, v_ref, first_tile, steps) -> None:
        """Do the work of the copying warpgroup: copy each tile to its slot after the slot's old tile has been read."""

        def wait_until_read(name: str, step) -> None:
            plgpu.barrier_wait(self.staged[f"{name}_read"].at[lax.rem(step, self.stages)])

        def copy(step, _):
            slot = lax.rem(step, self.stages)
            for name, ref in (("k", k_ref), ("v", v_ref)):
                pl.when(step >= self.stages)(partial(wait_until_read, name, step))
                tile = ref.at[pl.ds((first_tile + step) * TILE, TILE)]
                plgpu.copy_gmem_to_smem(tile, self.staged[name].at[slot], self.staged[f"{name}_filled"].at[slot])

        def drain(step, _):
            for name in ("k", "v"):
                wait_until_read(name, step)

        lax.fori_loop(0, steps, copy, None)
        lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, drain, None)

    def wait(self, name: str, step) -> Any:
        """Wait until this step's tile of K or V is in shared memory."""
        slot = lax.rem(step, self.stages)
        plgpu.barrier_wait(self.staged[f"{name}_filled"].at[slot])
        return self.staged[name].at[slot]

    def release(self, name: str, step) -> None:
        plgpu.barrier_arrive(self.staged[f"{name}_read"].at[lax.rem(step, self.stages)])


def attend(q_ref, o_ref, queries: Queries, ring: Ring, worker, staged: dict[str, Any], target: Target) -> None:
    """Do the work of a computing warpgroup: attend from its 64 queries to all tiles, and write o [64, head_dim]."""
    q_smem = staged["q"].at[worker]
    head_dim = q_smem.shape[1]
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def change_turns() -> None:
        plgpu.barrier_arrive(staged["turn"])
        plgpu.barrier_wait(staged["turn"])

    def step(i, running, *, masked: bool):
        o, m, total = running
        k_smem = ring.wait("k", i)

        def multiply(accumulator):
            plgpu.wgmma(accumulator, q_smem, k_smem.T)
            change_turns()
            return accumulator[...]

        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, TILE), jnp.float32))
        ring.release("k", i)
        if masked:
            scores = jnp.where(queries.seen(worker, i, scores.shape), scores, -jnp.inf)
        larger = jnp.maximum(m, jnp.max(scores, axis=1) * scale)
        rescale = jnp.exp2(m - larger)
        p = jnp.exp2(scores * scale - across(larger, TILE))
        total = total * rescale + jnp.sum(p, axis=1)
        o = o * across(rescale, head_dim)
        p = p.astype(jnp.bfloat16)
        if staged["p"] is not None:
            staged["p"][worker] = p
            plgpu.commit_smem()
            p = staged["p"].at[worker]

        plgpu.barrier_arrive(staged["turn"])
        v_smem = ring.wait("v", i)
        if masked:
            _clear_invisible(v_smem, queries, i, worker, staged["v_cleared"])
        plgpu.barrier_wait(staged["turn"])
        o = accumulate(o, p, v_smem, target)
        ring.release("v", i)
        return o, larger, total

    def loop(start, stop, running, *, masked: bool):
        return lax.fori_loop(start, stop, partial(step, masked=masked), running)

    plgpu.copy_gmem_to_smem(q_ref, q_smem, staged["q_filled"].at[worker])
    plgpu.barrier_wait(staged["q_filled"].at[worker])
    rows = WGMMA.reduce(1)
    running = filled(0.0, ROWS, head_dim), filled(LOWEST, ROWS, layout=rows), filled(0.0, ROWS, layout=rows)
    first, last = queries.unmasked(worker)
    pl.when(worker == 1)(change_turns)
    if queries.window is not None:
        running = loop(0, first, running, masked=True)
    running = loop(first, last, running, masked=False)
    o, _, total = loop(last, queries.steps, running, masked=True)
    pl.when(worker == 0)(change_turns)
    o = o * across(jnp.where(total == 0, 0.0, 1 / total), head_dim)
    q_smem[...] = o.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem, o_ref)
    plgpu.wait_smem_to_gmem(0)


def _clear_invisible(v_smem, queries: Queries, step, worker, cleared) -> None:
    """Clear the rows of V that no query of the block sees, because 0 times NaN is NaN.

    Each worker clears half a tile.
    """
    first = (queries.first_tile + step) * TILE

    @pl.when((first < queries.start) | (first + TILE > queries.stop))
    def _():
        half = pl.ds(worker * ROWS, ROWS)
        v = plgpu.load(v_smem.at[half], layout=WGMMA, optimized=False)
        key = first + worker * ROWS + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA)
        seen = (key >= queries.start) & (key < queries.stop)
        v_smem[half] = jnp.where(seen, v, jnp.zeros((), v.dtype))
        plgpu.commit_smem()
        plgpu.barrier_arrive(cleared)
        plgpu.barrier_wait(cleared)


def check_prefill(q: Array, k: Array, v: Array, offsets: Array, *, window: int | None) -> None:
    """Raise ValueError for shapes that do not fit together, and Unsupported for unsupported arguments."""
    op = "attention_prefill"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or k.shape[::3] != q.shape[::3] or 0 in q.shape + k.shape:
        raise ValueError(
            f"{op} takes q [batch, seq, heads, head_dim] and k and v [batch, kv_heads, capacity, head_dim], got "
            f"{q.shape}, {k.shape} and {v.shape}"
        )
    current_target().require_wgmma(op)
    if q.dtype != np.dtype("bfloat16") or not q.dtype == k.dtype == v.dtype:
        raise Unsupported(f"{op} takes q, k and v in bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}")
    batch, _, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    if head_dim not in (64, 128):
        raise Unsupported(f"{op} takes a head_dim of 64 or 128, got {head_dim}")
    if heads % kv_heads:
        raise ValueError(
            f"{op} takes a number of query heads that is a multiple of the key heads, got {heads} and {kv_heads}"
        )
    if capacity % 8:
        raise Unsupported(f"{op} takes a capacity in multiples of 8, got {capacity}")
    check_operand(op, "offsets", offsets, (batch,), np.int32)
    if window is not None and window < 1:
        raise ValueError(f"{op} takes a window of 1 or more, got {window}")
