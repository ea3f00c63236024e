r"""A thread block's part of attention while decoding, in float32: like `attention_split`, but without tensor cores.

Tensor cores would round to TF32. Instead, the warps multiply 8 rows (keys) of a tile at a time, in registers. Row r
of the registers holds the keys r, r + 8, r + 16, ... of a tile, one after the other. Each row of registers has its own
online softmax over its keys, for each query of the group:

    s = <k, q> log2(e) / sqrt(d)        m' = max(m, s)        p = 2^(s - m')
    total <- total 2^(m - m') + p        o <- o 2^(m - m') + p v

Only the sum <k, q> over a row needs several threads. At the end, we combine the softmaxes of the 8 rows, as
`attention_combine` does for parts of the keys.

Without a ring, 8 rows at a time go from memory to registers.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.pallas_kernels.parts.compat import LANES, WARPS, store_in_pieces, tiled_layout
from llamaspec.pallas_kernels.parts.inline import stream
from llamaspec.pallas_kernels.parts.key_ring import KeyRing, OpenRing
from llamaspec.pallas_kernels.parts.key_rows import KeyRows
from llamaspec.pallas_kernels.parts.wgmma import filled

ROWS = 8  # rows of a tile at a time, as swizzled shared memory is divided
VECTOR = 4  # numbers per load of a thread: 16 bytes
LOWEST = float(np.finfo(np.float32).min)  # the maximum before the first score; finite, because -inf - -inf is NaN


@dataclass(frozen=True)
class SplitAttentionFloat32:
    """`attention_split.SplitAttention` for float32."""

    group: int
    head_dim: int
    ring: KeyRing | None  # None: rows go from memory to registers, without a ring

    @property
    def columns(self) -> int:
        return 8

    @property
    def layout(self) -> Any:
        """The layout of [ROWS, head_dim] in registers: rows over warps, head_dim over as many lanes as needed."""
        head_dim = self.head_dim
        rows = LANES * VECTOR // head_dim  # rows that a warp processes at once
        return tiled_layout(((WARPS * rows, head_dim), (rows, head_dim), (1, VECTOR)), warps=-6, lanes=(-4, -3))

    def scratch(self) -> dict[str, Any]:
        return {} if self.ring is None else {"ring": self.ring.scratch()}

    def run(self, q_ref, keys: OpenRing | KeyRows, o_ref, stats_ref, staged: dict[str, Any]) -> None:
        """Attend from q [group, head_dim], and write the rows of o, and stats [2, columns] (None for one split)."""
        if isinstance(keys, OpenRing):
            keys.fill()
        for query, (o, m, total) in enumerate(self._attend(q_ref, keys)):
            largest = jnp.max(m)
            weight = jnp.exp2(m - largest)
            total = jnp.sum(total * weight)
            o = jnp.sum(o * self._across(weight), axis=0)
            if stats_ref is None:
                o = o * jnp.where(total == 0, 0.0, 1 / total)
            else:
                stats_ref[0, query] = largest
                stats_ref[1, query] = total
            store_in_pieces(o_ref.at[query], o)

    def _attend(self, q_ref, keys: OpenRing | KeyRows) -> Any:
        """Compute o [ROWS, head_dim], m and total [ROWS] for each query."""
        scale = math.log2(math.e) / math.sqrt(self.head_dim)
        shape = (ROWS, self.head_dim)
        queries = [
            plgpu.load(q_ref.at[query], layout=self.layout.reduce(0), optimized=False) * scale
            for query in range(self.group)
        ]

        def multiply(j, running, k, v, first_key):
            key = first_key + j * ROWS + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.layout)
            v = jnp.where((key >= keys.start) & (key < keys.stop), v, 0.0)
            key = first_key + j * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=self.layout.reduce(1))
            seen = (key >= keys.start) & (key < keys.stop)
            after = []
            for q, (o, m, total) in zip(queries, running, strict=True):
                score = jnp.where(seen, jnp.sum(k * lax.broadcast_in_dim(q, shape, (1,)), axis=1), -jnp.inf)
                larger = jnp.maximum(m, score)
                rescale = jnp.exp2(m - larger)
                p = jnp.exp2(score - larger)
                after.append((o * self._across(rescale) + v * self._across(p), larger, total * rescale + p))
            return after

        rows = self.layout.reduce(1)
        zero = (
            filled(0.0, *shape, layout=self.layout),
            filled(LOWEST, ROWS, layout=rows),
            filled(0.0, ROWS, layout=rows),
        )
        state = [zero] * self.group
        if isinstance(keys, OpenRing):
            return self._walk_ring(keys, multiply, state)
        return self._walk_rows(keys, multiply, state)

    def _walk_ring(self, ring: OpenRing, multiply: Any, state: Any) -> Any:
        """Multiply all rows of the tiles in a ring. `multiply` is the function of `_attend`."""

        def rows_step(j, running, k_smem, v_smem, first_key):
            rows = pl.ds(pl.multiple_of(j * ROWS, ROWS), ROWS)
            k, v = (plgpu.load(ref.at[rows], layout=self.layout, optimized=False) for ref in (k_smem, v_smem))
            return multiply(j, running, k, v, first_key)

        def step(i, running):
            k_smem, v_smem, first_key = ring.wait("k", i), ring.wait("v", i), ring.first_key(i)
            running = lax.fori_loop(
                0, ring.ring.tile // ROWS, lambda j, running: rows_step(j, running, k_smem, v_smem, first_key), running
            )
            ring.release("k", i)
            ring.release("v", i)
            return running

        return lax.fori_loop(0, ring.steps, step, state)

    def _walk_rows(self, keys: KeyRows, multiply: Any, state: Any) -> Any:
        """Multiply all rows in memory. `multiply` is the function of `_attend`.

        A turn of the loop multiplies two times 8 rows, for the reason that `RowTiles.walk_in_registers` explains.
        """
        turns = keys.tile // ROWS  # times 8 rows of a tile

        def load(turn):
            return tuple(stream(keys.octet(name, turn), self.layout, keys.target, written=True) for name in ("k", "v"))

        def add(turn, k, v, running):
            return multiply(lax.rem(turn, turns), running, k, v, keys.first_key(lax.div(turn, turns)))

        def walk_two(i, state):
            (k, v), running = state
            second_k, second_v = load(2 * i + 1)
            running = add(2 * i, k, v, running)
            next_pair = load(jnp.minimum(2 * i + 2, keys.steps * turns - 1))
            return next_pair, add(2 * i + 1, second_k, second_v, running)

        return lax.fori_loop(0, keys.steps * turns // 2, walk_two, (load(jnp.int32(0)), state))[1]

    def _across(self, x):
        return lax.broadcast_in_dim(x, (ROWS, self.head_dim), (0,))
