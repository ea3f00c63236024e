r"""RMSNorm of rows. Read this kernel first: it is the shortest.

    y_i = g_i x_i / sqrt(mean_j(x_j^2) + eps)

Our models do not call this kernel: in a decode step, the products normalize their own input (`gemv`, `norm_qkv`,
`norm_gate_up`). It is here for reading, verifying and timing.

Each row has one thread block. The block keeps the row in registers between the sum and the scaling, so the row is read
once and written once. No earlier kernel writes the weight, so we start loading it before the previous kernel ends.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts.compat import Target, current_target
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.spans import Spans, as_rows, check_rows

MAX_BYTES = 32 * 1024  # bytes of a row: 64 registers per thread
EARLY = 8192  # up to this many features, registers have room for the weight from the start


def rmsnorm(x: Float[Array, "*batch dim"], weight: Float[Array, " dim"], *, eps: float) -> Float[Array, "*batch dim"]:
    """Normalize `x` over its last axis: float32 inside, rounded once to the dtype of `x`.

    Raises ValueError for a weight with the wrong length. Raises Unsupported unless both arrays are float32 or both are
    bfloat16, and for rows of more than 32 KB (8,192 or 16,384 features). The kernel reads and writes each row once. If
    the length of a row is not a multiple of 128 vectors of 16 bytes, a small part is read twice. Rows of fewer than 128
    features are first copied to padded rows.
    """
    check_rows("rmsnorm", x, most=MAX_BYTES // x.dtype.itemsize)
    check_operand("rmsnorm", "a weight", weight, x.shape[-1:], x.dtype)
    if not x.size:  # no rows: a grid has at least one block
        return x
    return _rmsnorm(x, weight, eps=eps, target=current_target())


@partial(jax.jit, static_argnames=("eps", "target"))
def _rmsnorm(x, weight, *, eps: float, target: Target):
    dim = x.shape[-1]
    values = as_rows(x, pad=0.0)
    rows, width = values.shape
    spans = Spans.of(width, x.dtype, size=width).of_row
    early = dim == width <= EARLY  # not for a padded weight, since the previous kernel writes it

    def rmsnorm(
        x_ref,  # [rows, width]
        weight_ref,  # [width]
        y_ref,  # [rows, width]
    ):
        row = lax.axis_index("row")

        def load_weight():
            return [span.load(weight_ref.at[span.slice]) for span in spans]

        weights = load_weight() if early else None
        target.wait_for_previous()
        target.let_next_start()
        values = [span.load(x_ref.at[row, span.slice]).astype(jnp.float32) for span in spans]
        squares = sum(jnp.sum(span.only_new(a * a, 0.0)) for span, a in zip(spans, values, strict=True))
        scale = lax.rsqrt(squares * (1.0 / dim) + eps)
        for span, a, g in zip(spans, values, weights or load_weight(), strict=True):
            y_ref[row, span.slice] = (a * scale * g.astype(jnp.float32)).astype(x.dtype)

    kernel = target.kernel(
        rmsnorm, out_type=jax.ShapeDtypeStruct((rows, width), x.dtype), grid=(rows,), grid_names=("row",)
    )
    return kernel(values, as_rows(weight, pad=0.0)[0])[:, :dim].reshape(x.shape)
