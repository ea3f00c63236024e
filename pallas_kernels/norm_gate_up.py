"""RMSNorm, one product with the stacked [gate; up], and SwiGLU: half of a feed-forward layer in one kernel.

    n_b = x_b g / rms(x_b)        y_b = silu(gate n_b) * (up n_b)

A thread block has rows of gate and the corresponding rows of up, so it combines both in registers and writes only the
result. The loop and the cost are as in `gemv`: the kernel reads 2 x ffn x dim weights once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts.compat import Target, current_target, store_in_pieces
from llamaspec.pallas_kernels.parts.matrix import MatrixOperand, product_of, shares
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.staging import own_meetings
from llamaspec.pallas_kernels.parts.tile import Tile


def norm_gate_up(
    w: MatrixOperand,
    x: Float[Array, "batch cols"],
    norm: Float[Array, " cols"],
    *,
    eps: float,
    bias: Float[Array, " gate_up"] | None = None,
    tile: Tile | None = None,
) -> Float[Array, "batch ffn"]:
    """Compute silu(gate) * up for each of up to 8 vectors. w has the rows of gate, then the rows of up.

    x, norm and bias have one dtype, float32 or bfloat16. w has the same dtype, or it is `ScaledCodes` as in `gemv`.
    Sums and SwiGLU are float32, and the result is rounded once. Raises the errors of `gemv`, and Unsupported unless
    `gate_up` is a multiple of 16.
    """
    if len(several := shares(w, len(x))) > 1:
        fixed: dict[str, Any] = {"eps": eps, "bias": bias, "tile": tile}
        return jnp.concatenate([norm_gate_up(w, x[share], norm, **fixed) for share in several])
    product = product_of("norm_gate_up", w, x, normed=True, tile=tile, runs=2)
    gate_up, cols = w.shape
    check_operand("norm_gate_up", "norm", norm, (cols,), x.dtype)
    check_operand("norm_gate_up", "bias", bias, (gate_up,), x.dtype)
    return _norm_gate_up(w, x, norm, bias, product=product, eps=eps, target=current_target())


@partial(jax.jit, static_argnames=("product", "eps", "target"))
def _norm_gate_up(w, x, norm, bias, *, product, eps: float, target: Target):
    ffn, batch = w.shape[0] // 2, len(x)
    weight = product.operands(w)
    optional = [] if bias is None else [bias]

    def norm_gate_up(*refs, staged):
        weight_refs, (x_ref, norm_ref, *refs) = refs[: len(weight)], refs[len(weight) :]
        (*bias_refs, y_ref) = refs

        def starts(tile):
            first = tile * product.rows
            return [pl.multiple_of(first, 8), pl.multiple_of(ffn + first, 8)]

        def biases(tile):
            own_rows = [pl.ds(start, product.rows) for start in starts(tile)]
            return [[product.load_rows(bias_ref.at[rows]) for rows in own_rows] for bias_ref in bias_refs]

        def finish(tile, dots, read):
            for b, (gate, up) in enumerate(dots):
                for gate_bias, up_bias in read:
                    gate, up = gate + gate_bias, up + up_bias
                y = gate / (1.0 + jnp.exp(-gate)) * up
                store_in_pieces(y_ref.at[b, pl.ds(starts(tile)[0], product.rows)], y.astype(x.dtype))

        block = lax.axis_index("block")
        ends: dict[str, Any] = {"ahead": biases, "finish": finish}
        product.run(block, weight_refs, starts, x_ref, norm_ref, staged, target, eps=eps, **ends)

    kernel = target.kernel(
        norm_gate_up,
        out_type=jax.ShapeDtypeStruct((batch, ffn), x.dtype),
        grid=(product.blocks,),
        grid_names=("block",),
        # The block takes only what it needs: with a kilobyte more, fewer blocks may fit on an SM.
        compiler_params=own_meetings(reduction_scratch_bytes=512),
        scratch_types={"staged": product.scratch(normed=True)},
    )
    return kernel(*weight, product.view(x), product.view(norm), *optional)
