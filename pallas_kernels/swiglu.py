r"""SwiGLU by itself, for products that do not end with it: y_i = silu(a_i) b_i, silu(a) = a / (1 + exp(-a))."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.parts.compat import THREADS, Target, current_target
from pallas_kernels.parts.spans import Spans, check_rows

SPAN = 2048  # elements of a thread block


def swiglu(gate_up: Float[Array, "*batch gate_up"]) -> Float[Array, "*batch gate_up//2"]:
    """Compute silu(gate) * up of rows that hold first gate, then up, as the stacked product [gate; up] leaves them.

    Computes in float32 and rounds once. Raises ValueError for rows of odd length, and Unsupported for another dtype
    than float32 or bfloat16. Reads each row once, and writes half as much. An `ffn` below 128 is padded, which is a
    copy.
    """
    check_rows("swiglu", gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu takes rows of gate and up side by side, got an odd length of {gate_up.shape[-1]}")
    return _swiglu(gate_up, target=current_target())


@partial(jax.jit, static_argnames="target")
def _swiglu(gate_up, *, target: Target):
    *batch, width = gate_up.shape
    rows, ffn = prod(batch), width // 2
    halves = gate_up.reshape(rows, 2, ffn)
    if ffn < THREADS:
        halves = jnp.pad(halves, ((0, 0), (0, 0), (0, THREADS - ffn)))
    padded = halves.shape[-1]
    spans = Spans.of(padded, gate_up.dtype, size=SPAN)

    def swiglu(
        halves_ref,  # [rows, 2, padded]
        y_ref,  # [rows, padded]
    ):
        row = lax.axis_index("row")
        target.wait_for_previous()
        target.let_next_start()

        def work(_, span):
            gate, up = (span.load(halves_ref.at[row, half, span.slice]).astype(jnp.float32) for half in (0, 1))
            y_ref[row, span.slice] = (gate / (1.0 + jnp.exp(-gate)) * up).astype(gate_up.dtype)

        spans.each(lax.axis_index("span"), work)

    kernel = target.kernel(
        swiglu,
        out_type=jax.ShapeDtypeStruct((rows, padded), gate_up.dtype),
        grid=(spans.count, rows),
        grid_names=("span", "row"),
    )
    return kernel(halves)[:, :ffn].reshape(*batch, ffn)
