r"""The position of the largest element: greedy decoding's choice among a vocabulary's logits.

Each span of a row is searched by a thread block, and a second kernel, of one block a row, chooses among the results.
The hardware gives the maximum of registers but not its index, so the kernel looks at them again for the first position
of an element that equals the maximum.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.parts.compat import THREADS, Target, current_target
from pallas_kernels.parts.spans import Span, as_rows, check_rows
from pallas_kernels.softmax import spans_of

MAX_ELEMENTS = 2**20  # in a row: 8,192 a span
NOWHERE = 2**31 - 1


def argmax(x: Float[Array, "*batch n"]) -> Int32[Array, "*batch"]:
    """Find the position of the largest element over the last axis.

    Of equal elements the first counts, and NaN counts as the largest, as in NumPy. Raises Unsupported for another dtype
    than float32 or bfloat16, and for rows of more than 2^20 elements. Reads each row once.
    """
    check_rows("argmax", x, most=MAX_ELEMENTS)
    return _argmax(x, target=current_target())


@partial(jax.jit, static_argnames="target")
def _argmax(x, *, target: Target):
    values = as_rows(x, pad=-jnp.inf)
    rows, length = values.shape
    spans = spans_of(rows, length, values.dtype)

    def argmax_spans(
        x_ref,  # [rows, length]
        max_ref,  # [rows, THREADS]
        place_ref,  # [rows, THREADS]
    ):
        row = lax.axis_index("row")
        target.wait_for_previous()
        target.let_next_start()

        def work(piece, span):
            values = span.load(x_ref.at[row, span.slice]).astype(jnp.float32)
            max_ref[row, piece], place_ref[row, piece] = first_of_largest(values, span.positions())

        spans.each(lax.axis_index("span"), work)

    def argmax(
        max_ref,  # [rows, THREADS]
        place_ref,  # [rows, THREADS]
        y_ref,  # [rows]
    ):
        row = lax.axis_index("row")
        each = Span(0, THREADS)
        target.wait_for_previous()
        target.let_next_start()
        written = each.positions() < spans.pieces
        maxima = jnp.where(written, each.load(max_ref.at[row]), -jnp.inf)
        places = jnp.where(written, each.load(place_ref.at[row]), NOWHERE)
        _, y_ref[row] = first_of_largest(maxima, places)

    found = target.kernel(
        argmax_spans,
        out_type=[jax.ShapeDtypeStruct((rows, THREADS), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(spans.count, rows),
        grid_names=("span", "row"),
    )(values)
    chosen = target.kernel(
        argmax, out_type=jax.ShapeDtypeStruct((rows,), jnp.int32), grid=(rows,), grid_names=("row",)
    )(*found)
    return chosen.reshape(x.shape[:-1])


def first_of_largest(values: Array, places: Array) -> tuple[Any, Any]:
    """Find the largest of `values`, NaN counting as such, and the least of the positions in `places` that have it."""
    largest = jnp.max(values)
    is_largest = (values == largest) | (values != values)  # with a NaN among them, the maximum is NaN and equals none
    return largest, jnp.min(jnp.where(is_largest, places, NOWHERE))
