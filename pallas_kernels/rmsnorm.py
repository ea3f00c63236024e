r"""RMSNorm, with or without the residual addition before it.

    y_i = g_i x_i / sqrt(mean_j(x_j^2) + eps)

One thread block owns a row and keeps it in registers between the sum and the scaling, so the row is read once and
written once. No earlier kernel writes the weight, so we start loading it before the previous kernel ends.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.parts.compat import Target, current_target
from pallas_kernels.parts.operands import check_operand
from pallas_kernels.parts.spans import Spans, as_rows, check_rows

MAX_BYTES = 32 * 1024  # bytes of a row: 64 registers a thread
EARLY = 8192  # features up to which registers also hold the weight from the start


def rmsnorm(x: Float[Array, "*batch dim"], weight: Float[Array, " dim"], *, eps: float) -> Float[Array, "*batch dim"]:
    """Normalize `x` over its last axis: float32 inside, rounded once to the dtype of `x`.

    Raises ValueError for a weight of another length, and Unsupported unless both arrays are float32 or both bfloat16,
    with rows of at most 32 KB (8,192 or 16,384 features). Reads and writes each row once. A row that is no multiple of
    128 vectors of 16 bytes is read twice in a small part; one below 128 features is padded, which is a copy.
    """
    _check("rmsnorm", x, weight)
    (y,) = _rmsnorm(x, None, weight, eps=eps, target=current_target())
    return y


def add_rmsnorm(
    x: Float[Array, "*batch dim"], residual: Float[Array, "*batch dim"], weight: Float[Array, " dim"], *, eps: float
) -> tuple[Float[Array, "*batch dim"], Float[Array, "*batch dim"]]:
    """Compute `x + residual`, rounded to the dtype of `x`, and the `rmsnorm` of the rounded sum.

    The results equal those of an addition followed by a norm, bit by bit. It reads two rows and writes two, where the
    two kernels would read three and write two.
    """
    _check("add_rmsnorm", x, weight)
    check_operand("add_rmsnorm", "a residual", residual, x.shape, x.dtype)
    added, y = _rmsnorm(x, residual, weight, eps=eps, target=current_target())
    return added, y


@partial(jax.jit, static_argnames=("eps", "target"))
def _rmsnorm(x, residual, weight, *, eps: float, target: Target):
    shape, dim = x.shape, x.shape[-1]
    inputs = [as_rows(a, pad=0.0) for a in (x, residual) if a is not None]
    rows, width = inputs[0].shape
    spans = Spans.of(width, x.dtype, size=width).whole
    outputs = len(inputs)  # the norm, and with a residual also the sum
    early = dim == width <= EARLY  # a padded weight is written just before

    def rmsnorm(*refs):
        *in_refs, weight_ref = refs[: outputs + 1]  # [rows, width], [width]
        *sum_ref, y_ref = refs[outputs + 1 :]  # [rows, width]
        row = lax.axis_index("row")

        def load_weight():
            return [span.load(weight_ref.at[span.slice]) for span in spans]

        weights = load_weight() if early else None
        target.wait_for_previous()
        target.let_next_start()
        values = [[span.load(ref.at[row, span.slice]) for span in spans] for ref in in_refs]
        if outputs == 2:
            values = [
                [(a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype) for a, b in zip(*values, strict=True)]
            ]
            for span, a in zip(spans, values[0], strict=True):
                sum_ref[0][row, span.slice] = a
        wide = [a.astype(jnp.float32) for a in values[0]]
        squares = sum(jnp.sum(span.only_new(a * a, 0.0)) for span, a in zip(spans, wide, strict=True))
        scale = lax.rsqrt(squares * (1.0 / dim) + eps)
        for span, a, g in zip(spans, wide, weights or load_weight(), strict=True):
            y_ref[row, span.slice] = (a * scale * g.astype(jnp.float32)).astype(x.dtype)

    kernel = target.kernel(
        rmsnorm,
        out_type=[jax.ShapeDtypeStruct((rows, width), x.dtype)] * outputs,
        grid=(rows,),
        grid_names=("row",),
    )
    results = kernel(*inputs, as_rows(weight, pad=0.0)[0])
    return [a[:, :dim].reshape(shape) for a in results]


def _check(op: str, x: Array, weight: Array) -> None:
    check_rows(op, x, most=MAX_BYTES // x.dtype.itemsize)
    check_operand(op, "a weight", weight, x.shape[-1:], x.dtype)
