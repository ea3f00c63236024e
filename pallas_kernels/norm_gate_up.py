"""RMSNorm, one product with the stacked [gate; up], SwiGLU: the first half of a feed-forward layer, in one kernel.

    n_b = x_b g / rms(x_b)        y_b = silu(gate n_b) * (up n_b)

A thread block owns 8 rows of gate and the 8 rows of up that belong to them, so the two meet in registers and only
their product is written. The loop, and what it costs, is that of `gemv.py`: 2 x ffn x dim weights, read once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.compat import Target, current_target
from pallas_kernels.gemv import RowProduct, check_operand, check_product
from pallas_kernels.tile import Tile, tile_for


def norm_gate_up(
    w: Float[Array, "gate_up cols"],
    x: Float[Array, "batch cols"],
    norm: Float[Array, " cols"],
    *,
    eps: float,
    bias: Float[Array, " gate_up"] | None = None,
    tile: Tile | None = None,
) -> Float[Array, "batch ffn"]:
    """silu(gate) * up for each of up to 8 vectors, where w holds the rows of gate and then those of up.

    All in float32 or all in bfloat16; summed, and SwiGLU taken, in float32. Raises ValueError where `gemv` would, with
    ffn = gate_up / 2 in the place of its rows.
    """
    tile = tile or tile_for("norm_gate_up", w.shape[0], w.shape[-1], w.dtype)
    if len(w) % 2:
        raise ValueError(f"norm_gate_up takes as many rows of gate as of up, got {len(w)} in all")
    half = tile._replace(rows=tile.rows // 2)
    check_product("norm_gate_up", w[: len(w) // 2], x, tile=half)
    check_operand("norm_gate_up", "norm", norm, (w.shape[1],), w.dtype)
    check_operand("norm_gate_up", "bias", bias, (len(w),), w.dtype)
    return _norm_gate_up(w, x, norm, bias, eps=eps, tile=half, target=current_target())


@partial(jax.jit, static_argnames=("eps", "tile", "target"))
def _norm_gate_up(w, x, norm, bias, *, eps: float, tile: Tile, target: Target):
    ffn, batch = len(w) // 2, len(x)
    product = RowProduct(rows=tile.rows, runs=2, cols=w.shape[1], batch=batch, stages=tile.stages, dtype=w.dtype)

    def norm_gate_up(w_ref, x_ref, norm_ref, *refs, staged, y_smem):
        (bias_ref,), (y_ref,) = (refs[:1], refs[1:]) if bias is not None else ((None,), refs)
        start = pl.multiple_of(lax.axis_index("rows") * tile.rows, 8)
        starts = [start, pl.multiple_of(ffn + start, 8)]
        dots = product.run(w_ref, starts, x_ref, norm_ref, staged, target, eps=eps)
        target.let_next_start()
        for b, (gate, up) in enumerate(dots):
            if bias_ref is not None:
                gate, up = (
                    y + product.load_rows(bias_ref.at[pl.ds(s, tile.rows)])
                    for y, s in zip((gate, up), starts, strict=True)
                )
            y_smem[b][...] = (gate / (1.0 + jnp.exp(-gate)) * up).astype(x.dtype)
        plgpu.commit_smem()
        for b in range(batch):
            plgpu.copy_smem_to_gmem(y_smem[b], y_ref.at[b, pl.ds(start, tile.rows)])
        plgpu.wait_smem_to_gmem(0)

    kernel = target.kernel(
        norm_gate_up,
        out_type=jax.ShapeDtypeStruct((batch, ffn), x.dtype),
        grid=(ffn // tile.rows,),
        grid_names=("rows",),
        scratch_types={
            "staged": product.scratch(normed=True),
            "y_smem": [plgpu.SMEM((tile.rows,), x.dtype) for _ in range(batch)],
        },
    )
    return kernel(w, x, norm, *([] if bias is None else [bias]))
