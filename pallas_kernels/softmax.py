r"""Softmax of rows of any length, in one kernel or two.

    p_i = exp(x_i - m) / sum_j exp(x_j - m)        m = max_j x_j

A row of up to 8,192 scores stays in the registers of one thread block, and is read and written once. A longer row, such
as the logits of a vocabulary, is cut into spans for many blocks. A first kernel, `exp_sums`, writes the maximum m_s of
each span s, and its sum, z_s = sum_j exp(x_j - m_s). A row has at most 128 spans. Every block of the second kernel
combines the spans, one per thread,

    m = max_s m_s        z = sum_s z_s exp(m_s - m)

and computes the p_i of its own span. The span is still in the second-level cache, so the row is read from HBM only
once.

Our models do not call this kernel: attention has its own online softmax, and XLA does the sampling. It is here for
reading, verifying and timing.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts.compat import THREADS, Target, current_target
from llamaspec.pallas_kernels.parts.spans import Span, Spans, as_rows, check_rows

REGISTER_SCORES = 8192  # scores that one thread block keeps in registers, 64 per thread
MAX_SCORES = 2**20  # scores in a row: 8,192 per span


def softmax(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Compute the distribution over the last axis in float32, and round once to the dtype of `x`.

    A score of -inf gives a probability of 0, and a row with only -inf gives zeros. Raises Unsupported for dtypes other
    than float32 and bfloat16, and for rows of more than 2^20 scores. Rows of fewer than 128 scores are copied to padded
    rows.
    """
    check_rows("softmax", x, most=MAX_SCORES)
    if not x.size:  # no rows: a grid has at least one block
        return x
    return _softmax(x, target=current_target())


@partial(jax.jit, static_argnames="target")
def _softmax(x, *, target: Target):
    scores = as_rows(x, pad=-jnp.inf)
    length = scores.shape[-1]
    p = (
        _in_registers(scores, target)
        if length <= REGISTER_SCORES
        else _scaled(scores, *exp_sums(scores, target), target)
    )
    return p[:, : x.shape[-1]].reshape(x.shape)


def _in_registers(scores: Array, target: Target) -> Array:
    rows, length = scores.shape
    spans = Spans.of(length, scores.dtype, size=length).of_row

    def softmax(x_ref, p_ref):  # both [rows, length]
        row = lax.axis_index("row")
        target.wait_for_previous()
        target.let_next_start()
        values = [span.load(x_ref.at[row, span.slice]).astype(jnp.float32) for span in spans]
        shift = finite(reduce(jnp.maximum, [jnp.max(a) for a in values]))
        weights = [jnp.exp(a - shift) for a in values]
        sums = [jnp.sum(span.only_new(w, 0.0)) for span, w in zip(spans, weights, strict=True)]
        scale = reciprocal(reduce(jnp.add, sums))
        for span, w in zip(spans, weights, strict=True):
            p_ref[row, span.slice] = (w * scale).astype(p_ref.dtype)

    kernel = target.kernel(
        softmax, out_type=jax.ShapeDtypeStruct(scores.shape, scores.dtype), grid=(rows,), grid_names=("row",)
    )
    return kernel(scores)


def _scaled(scores: Array, maxima: Array, sums: Array, target: Target) -> Array:
    rows, length = scores.shape
    spans = spans_of(rows, length, scores.dtype)

    def softmax(
        x_ref,  # [rows, length]
        max_ref,  # [rows, THREADS]
        sum_ref,  # [rows, THREADS]
        p_ref,  # [rows, length]
    ):
        row = lax.axis_index("row")
        target.wait_for_previous()
        target.let_next_start()

        def work(_, span):
            # We load the scores while the sums are combined. The scores of a tail are loaded again.
            values = span.load(x_ref.at[row, span.slice]).astype(jnp.float32)
            maximum, total = combine(max_ref.at[row], sum_ref.at[row], spans.pieces)
            p = jnp.exp(values - finite(maximum)) * reciprocal(total)
            p_ref[row, span.slice] = p.astype(p_ref.dtype)

        spans.visit(lax.axis_index("span"), work)

    kernel = target.kernel(
        softmax,
        out_type=jax.ShapeDtypeStruct(scores.shape, scores.dtype),
        grid=(spans.count, rows),
        grid_names=("span", "row"),
    )
    return kernel(scores, maxima, sums)


def exp_sums(
    scores: Float[Array, "rows n"], target: Target
) -> tuple[Float[Array, "rows 128"], Float[Array, "rows 128"]]:
    """Compute the maximum of each span of each row, and the span's sum_j exp(x_j - maximum), for `combine`.

    A row of the result has room for 128 spans. The kernel does not write the unused elements.
    """
    rows, length = scores.shape
    spans = spans_of(rows, length, scores.dtype)

    def exp_sums(
        x_ref,  # [rows, length]
        max_ref,  # [rows, THREADS]
        sum_ref,  # [rows, THREADS]
    ):
        row = lax.axis_index("row")
        target.wait_for_previous()
        target.let_next_start()

        def work(piece, span):
            values = span.load(x_ref.at[row, span.slice]).astype(jnp.float32)
            maximum = jnp.max(values)
            max_ref[row, piece] = maximum
            sum_ref[row, piece] = jnp.sum(span.only_new(jnp.exp(values - finite(maximum)), 0.0))

        spans.visit(lax.axis_index("span"), work)

    kernel = target.kernel(
        exp_sums,
        out_type=[jax.ShapeDtypeStruct((rows, THREADS), jnp.float32)] * 2,
        grid=(spans.count, rows),
        grid_names=("span", "row"),
    )
    maxima, sums = kernel(scores)
    return maxima, sums


def combine(max_ref, sum_ref, pieces: int) -> tuple[Any, Any]:
    """Combine the maxima and sums of the first `pieces` spans of a row. Later elements may contain anything."""
    span = Span(0, THREADS)
    maxima, sums = span.load(max_ref), span.load(sum_ref)
    written = span.positions() < pieces
    maxima = jnp.where(written, maxima, -jnp.inf)
    maximum = jnp.max(maxima)
    return maximum, jnp.sum(jnp.where(written, sums, 0.0) * jnp.exp(maxima - finite(maximum)))


def finite(maximum: Array) -> Array:
    """Return the number to subtract from scores: the maximum, or 0 if it is -inf, because -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def reciprocal(total: Array) -> Array:
    """Compute 1 / total, or 0 for a row without scores."""
    return jnp.where(total == 0, 0.0, 1.0 / total)


def spans_of(rows: int, length: int, dtype: np.dtype) -> Spans:
    """Cut rows into at most 128 spans each. With few elements, spans are small, so that more blocks work."""
    size = 4096 if rows * length >= 2**21 else 1024
    return Spans.of(length, dtype, size=max(size, -(-length // (THREADS - 1))))
