r"""The place of the largest element: greedy decoding's choice among a vocabulary's logits.

Spans of a row are searched by as many thread blocks, and a second kernel, of one block a row, chooses among what they
found. There is no index of a maximum to be had from the hardware: it is the least position of an element that equals
the maximum, a second look at registers.
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
    """The position of the largest element over the last axis, the lowest of equals; NaN counts as the largest, as in
    NumPy.

    float32 or bfloat16, at most 2^20 elements a row, else a ValueError. Reads each row once.
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
    """The largest of `values`, or NaN if one is, and the least of the places where it stands."""
    largest = jnp.max(values)
    is_largest = (values == largest) | (values != values)  # with a NaN among them, the maximum is NaN and equals none
    return largest, jnp.min(jnp.where(is_largest, places, NOWHERE))
