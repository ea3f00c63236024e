r"""The logarithm of a softmax's denominator: log sum_j exp(x_j) = m + log sum_j exp(x_j - m), m = max_j x_j."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.parts.compat import Target, current_target
from pallas_kernels.parts.spans import as_rows, check_rows
from pallas_kernels.softmax import MAX_SCORES, combine, exp_sums, finite, spans_of


def logsumexp(x: Float[Array, "*batch n"]) -> Float32[Array, "*batch"]:
    """Compute log sum_j exp(x_j) over the last axis, in float32. A row with nothing but -inf gives -inf.

    Raises Unsupported for another dtype than float32 or bfloat16, and for rows of more than 2^20 scores. Reads each row
    once; a second kernel combines the maximum and sum that `softmax.exp_sums` writes for each span.
    """
    check_rows("logsumexp", x, most=MAX_SCORES)
    return _logsumexp(x, target=current_target())


@partial(jax.jit, static_argnames="target")
def _logsumexp(x, *, target: Target):
    scores = as_rows(x, pad=-jnp.inf)
    rows, length = scores.shape
    spans = spans_of(rows, length, scores.dtype)

    def logsumexp(
        max_ref,  # [rows, THREADS]
        sum_ref,  # [rows, THREADS]
        y_ref,  # [rows]
    ):
        row = lax.axis_index("row")
        target.wait_for_previous()
        target.let_next_start()
        maximum, total = combine(max_ref.at[row], sum_ref.at[row], spans.pieces)
        y_ref[row] = finite(maximum) + jnp.log(total)

    kernel = target.kernel(
        logsumexp, out_type=jax.ShapeDtypeStruct((rows,), jnp.float32), grid=(rows,), grid_names=("row",)
    )
    return kernel(*exp_sums(scores, target)).reshape(x.shape[:-1])
