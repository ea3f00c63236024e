"""The residual connection by itself: x + y. `gemv` adds after a product, and `add_rmsnorm` before a norm."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.parts.compat import Target, current_target
from pallas_kernels.parts.spans import MAX_ELEMENTS, Spans, as_rows, check_rows
from pallas_kernels.unsupported import Unsupported

SPAN = 2048  # elements of a thread block


def add(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Add x and y in float32, and round once to their dtype.

    Raises Unsupported for another dtype than float32 or bfloat16 and for more than 2^31 - 1 elements, and ValueError
    for arrays that differ in shape or dtype. Reads both once, writes once; an odd number of elements moves 2 or 4 bytes
    at a time.
    """
    check_rows("add", x)
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(f"add takes two arrays alike, got {list(x.shape)} {x.dtype} and {list(y.shape)} {y.dtype}")
    if x.size > MAX_ELEMENTS:
        raise Unsupported(f"add takes at most {MAX_ELEMENTS} elements, got {x.size}")
    return _add(x, y, target=current_target())


@partial(jax.jit, static_argnames="target")
def _add(x, y, *, target: Target):
    (flat_x,), (flat_y,) = (as_rows(a.reshape(1, -1), pad=0.0) for a in (x, y))
    spans = Spans.of(flat_x.size, x.dtype, size=SPAN)

    def add(x_ref, y_ref, z_ref):  # [elements] each
        target.wait_for_previous()
        target.let_next_start()

        def work(_, span):
            a, b = (span.load(ref.at[span.slice]).astype(jnp.float32) for ref in (x_ref, y_ref))
            z_ref[span.slice] = (a + b).astype(x.dtype)

        spans.each(lax.axis_index("span"), work)

    kernel = target.kernel(
        add,
        out_type=jax.ShapeDtypeStruct(flat_x.shape, x.dtype),
        grid=(spans.count,),
        grid_names=("span",),
    )
    return kernel(flat_x, flat_y)[: x.size].reshape(x.shape)
