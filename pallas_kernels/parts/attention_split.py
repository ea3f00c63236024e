r"""A thread block's part of attention while decoding, in bfloat16: the queries of one key head, and some of its keys.

The online softmax (Milakov & Gimelshein, 2018, https://arxiv.org/abs/1805.02867) runs over tiles of keys:

    s = K q        m' = max(m, max s)        p = 2^(c (s - m'))        c = log2(e) / sqrt(d)
    total <- total 2^(c (m - m')) + sum p        o <- o 2^(c (m - m')) + V^T p

The group of a key head consists of the query heads that use it. There are many keys and few queries. So the tensor
cores get K and V^T as the matrices with 64 or more rows, and the queries of the group as 8 columns. In the usual order,
q K^T, queries would be padded to 64 rows. The heads of a group share each load of K and V. A thread computes four
exponentials per 64 keys. We multiply the difference s - m' by c. If we computed c s - c m' instead, a compiler might
use one fused instruction with a single rounding, and then equal large scores would not cancel.

Unseen rows may contain anything. We mask their scores, and clear their rows of V in shared memory, because 0 NaN is
NaN. Only the first and the last tile of a sequence have such rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.pallas_kernels.parts.compat import store_in_pieces
from llamaspec.pallas_kernels.parts.key_ring import KeyRing, OpenRing
from llamaspec.pallas_kernels.parts.wgmma import TURNED, WGMMA, down, filled, matrices, product

UNUSED = 5 * 1024  # bytes of a block with heads of 128; two blocks then fit on an SM (`row_tiles.even_share`)
LOWEST = float(np.finfo(np.float32).min)  # the maximum before the first score; finite, because -inf - -inf is NaN


@dataclass(frozen=True)
class SplitAttention:
    """Attention of the queries of a group to the keys that come through the ring.

    With one split, the output is final. With several splits, the kernel writes each split's output before the division
    by the split's total, and also writes the split's c m and total.
    """

    group: int  # query heads of a key head
    ring: KeyRing

    @property
    def columns(self) -> int:
        """Return the number of columns of the tensor cores' product: the queries, padded to a multiple of 8."""
        return -(-self.group // 8) * 8

    @property
    def _scale(self) -> float:
        return math.log2(math.e) / math.sqrt(self.ring.head_dim)

    def scratch(self) -> dict[str, Any]:
        staged = {
            "ring": self.ring.scratch(),
            "q": matrices(self.columns, self.ring.head_dim),
            "q_filled": plgpu.Barrier(num_arrivals=1),
            "p": matrices(self.columns, self.ring.tile),
        }
        if self.ring.splits > 1 and self.ring.head_dim == 128:
            staged["unused"] = plgpu.SMEM((UNUSED,), jnp.int8)
        if self.ring.splits == 1:
            staged["o"] = plgpu.SMEM((self.columns, self.ring.head_dim), jnp.bfloat16)
        return staged

    def run(self, q_ref, ring: OpenRing, o_ref, stats_ref, staged: dict[str, Any]) -> None:
        """Attend from q [group, head_dim], and write o [columns, head_dim] and stats [2, columns].

        For one split, stats_ref is None, and o has the same number of rows as q.
        """
        # The box has 8 rows, and a group may have fewer. Beyond them, TMA reads zeros and writes nothing.
        box = pl.ds(0 * ring.split, self.columns)
        plgpu.copy_gmem_to_smem(q_ref.at[box], staged["q"], staged["q_filled"])
        ring.fill()
        plgpu.barrier_wait(staged["q_filled"])
        o, m, total = self._attend(ring, staged["q"], staged["p"])
        if stats_ref is not None:
            for place, statistic in enumerate((m * self._scale, total)):
                store_in_pieces(stats_ref.at[place], statistic)
            store_in_pieces(o_ref.T, plgpu.layout_cast(o, TURNED))
            return
        o = o * down(jnp.where(total == 0, 0.0, 1 / total), self.ring.head_dim)
        staged["o"].T[...] = plgpu.layout_cast(o.astype(jnp.bfloat16), TURNED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged["o"], o_ref.at[box])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _attend(self, ring: OpenRing, q_smem, p_smem) -> tuple[Any, Any, Any]:
        """Compute o^T [head_dim, columns], m and the total [columns]."""
        head_dim, columns, tile = self.ring.head_dim, self.columns, self.ring.tile

        def step(i, running):
            o, m, total = running
            first_key = ring.first_key(i)

            scores = product(ring.wait("k", i), q_smem.T)
            ring.release("k", i)
            key = first_key + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA)
            scores = jnp.where((key >= ring.start) & (key < ring.stop), scores, -jnp.inf)
            larger = jnp.maximum(m, jnp.max(scores, axis=0))
            rescale = jnp.exp2((m - larger) * self._scale)
            p = jnp.exp2((scores - down(larger, tile)) * self._scale)
            total = total * down(rescale, tile) + p  # one total per row of the tile, to be summed at the end
            # Computing the maximum has synchronized the warps, so no warp still multiplies by the previous p.
            p_smem.T[...] = plgpu.layout_cast(p.astype(jnp.bfloat16), TURNED)

            v_smem = ring.wait("v", i)

            @pl.when((first_key < ring.start) | (first_key + tile > ring.stop))
            def _():
                _clear_outside(v_smem, ring.start - first_key, ring.stop - first_key)

            plgpu.commit_smem()
            o = o * down(rescale, head_dim) + product(v_smem.T, p_smem.T)
            ring.release("v", i)
            return o, larger, total

        o, m, total = lax.fori_loop(
            0,
            ring.steps,
            step,
            (
                filled(0.0, head_dim, columns),
                filled(LOWEST, columns, layout=WGMMA.reduce(0)),
                filled(0.0, tile, columns),
            ),
        )
        return o, m, jnp.sum(total, axis=0)


def _clear_outside(v_smem, start, stop) -> None:
    """Clear the rows of a tile before `start` and from `stop` on."""
    v = plgpu.load(v_smem, layout=WGMMA, optimized=False)
    row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA)
    v_smem[...] = jnp.where((row >= start) & (row < stop), v, jnp.zeros((), v.dtype))
