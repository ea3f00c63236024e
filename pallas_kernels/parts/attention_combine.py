r"""Combine the results of attention over separate parts of the keys: the second half of attention while decoding.

    m = max_s m_s        o = sum_s o_s 2^(m_s - m) / sum_s t_s 2^(m_s - m)

Part s of the keys has the largest score m_s. o_s is the sum of its values, weighted by 2^(score - m_s), and t_s is the
sum of these weights. A part without keys has t_s = 0 and is ignored. If no part has keys, o = 0, as in
`reference.attention`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts.compat import LANES, WARPS, Target, store_in_pieces, tiled_layout
from llamaspec.pallas_kernels.parts.staging import own_meetings


def attention_combine(
    parts: Float[Array, "batch kv_heads splits columns head_dim"],
    stats: Float[Array, "batch kv_heads splits 2 columns"],
    *,
    group: int,
    out: np.dtype,
    target: Target,
) -> Float[Array, "batch width"]:
    """Combine parts of o, with m and t in `stats`, and round once to `out`.

    `splits` is a multiple of 4. The first `group` columns are queries, and the other columns are padding. The caller
    launches the kernel for the parts and this kernel in one traced function. This kernel reads each part once and
    writes o, with one thread block per head. Each warp handles one part after the other.
    """
    batch, kv_heads, _, _, head_dim = parts.shape
    vector = head_dim // LANES
    layout = tiled_layout(((WARPS, head_dim), (1, vector)), warps=-4, lanes=-3)

    def attention_combine(parts_ref, stats_ref, o_ref):
        row, head, query = (lax.axis_index(name) for name in ("batch", "kv_heads", "group"))

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        target.let_next_start()
        target.wait_for_previous()
        o = load(parts_ref.at[row, head, :, query], layout)  # [splits, head_dim]
        m, total = (load(stats_ref.at[row, head, :, i, query], layout.reduce(1)) for i in range(2))  # [splits]
        weight = jnp.exp2(m - jnp.max(m))
        total = jnp.sum(weight * total)
        o = jnp.sum(o * lax.broadcast_in_dim(weight, o.shape, (0,)), axis=0)
        store_in_pieces(o_ref.at[row, head, query], (o * jnp.where(total == 0, 0.0, 1 / total)).astype(out))

    kernel = target.kernel(
        attention_combine,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), out),
        grid=(group, kv_heads, batch),
        grid_names=("group", "kv_heads", "batch"),
        compiler_params=own_meetings(approx_math=True, reduction_scratch_bytes=4096),
    )
    return kernel(parts, stats).reshape(batch, -1)
