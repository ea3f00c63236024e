r"""A matrix times one to eight vectors: y = W x, optionally with a norm before and a residual after.

    x_b <- x_b g / rms(x_b)          (with a norm g)
    y_b = W x_b (+ bias) (+ r_b)

A thread block multiplies a few rows of W at once by all vectors. The loop is in `parts/row_product.py`, or for codes
with scales in `parts/quantized_product.py`, which converts the vectors to fixed point.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from llamaspec.pallas_kernels.parts.compat import Target, current_target, store_in_pieces
from llamaspec.pallas_kernels.parts.matrix import MatrixOperand, product_of, shares
from llamaspec.pallas_kernels.parts.operands import check_operand
from llamaspec.pallas_kernels.parts.staging import own_meetings
from llamaspec.pallas_kernels.parts.tile import Tile


def gemv(
    w: MatrixOperand,
    x: Float[Array, "batch cols"],
    *,
    norm: Float[Array, " cols"] | None = None,
    eps: float = 1e-5,
    bias: Float[Array, " rows"] | None = None,
    residual: Float[Array, "batch rows"] | None = None,
    out: Any = None,
    tile: Tile | None = None,
) -> Float[Array, "batch rows"]:
    """Multiply W by each of up to 8 vectors in float32, and round once to `out`, by default the dtype of x.

    x, norm, bias and residual have one dtype, float32 or bfloat16. W has the same dtype, or it is `ScaledCodes`: int8
    with a scale for each row, or int8 or int4 with a scale for each group of 32, 64 or 128 columns. For codes, x times
    the norm is rounded to fixed point. The error of a number is at most 2^-21 times the largest number in its group. If
    a row has one scale, these groups have 128 columns. Numbers must be smaller than 2^127, and a number that is not
    finite gives NaN.

    `rows` must be a multiple of 8. For floats, `cols` must be a multiple of 128 (float32) or 256 (bfloat16). For codes,
    `cols` must be at least 1024, a multiple of 128 (int8) or 256 (int4), and also a multiple of four times the group
    size. Raises ValueError for shapes that do not fit together. Raises Unsupported for other sizes, dtypes and groups,
    and if shared memory is too small for the vectors.

    The kernel reads each of the rows x cols weights once, or twice for codes and more than 4 vectors. It reads 4 bytes
    per scale, and writes batch x rows numbers.
    """
    several = shares(w, len(x))
    parts = [x[share] for share in several]
    products = [product_of("gemv", w, part, normed=norm is not None, tile=tile) for part in parts]
    rows, cols = w.shape
    for name, array, shape in (
        ("norm", norm, (cols,)),
        ("bias", bias, (rows,)),
        ("residual", residual, (len(x), rows)),
    ):
        check_operand("gemv", name, array, shape, x.dtype)
    fixed = {"eps": eps, "out": np.dtype(out or x.dtype), "target": current_target()}
    launches = [
        # We pass the whole residual: a slice would be a view, but a kernel's arrays must start at multiples of 256
        # bytes.
        _gemv(w, part, norm, bias, residual, product=product, base=share.start, **fixed)
        for part, share, product in zip(parts, several, products, strict=True)
    ]
    return launches[0] if len(launches) == 1 else jnp.concatenate(launches)


@partial(jax.jit, static_argnames=("product", "base", "eps", "out", "target"))
def _gemv(w, x, norm, bias, residual, *, product, base: int, eps: float, out: np.dtype, target: Target):
    """Launch the kernel for some of the vectors. Row `base` of `residual` belongs to the first of them."""
    rows, batch = w.shape[0], len(x)
    weight = product.operands(w)
    norm = None if norm is None else product.view(norm)
    optional = [a for a in (norm, bias, residual) if a is not None]

    def gemv(*refs, staged):
        refs = list(refs)
        weight_refs, x_ref = [refs.pop(0) for _ in weight], refs.pop(0)
        norm_ref, bias_ref, residual_ref = (refs.pop(0) if a is not None else None for a in (norm, bias, residual))
        (y_ref,) = refs

        def rows_of(tile):
            return pl.multiple_of(tile * product.rows, 8)

        def added(tile):
            """List the terms to add to each result."""
            own_rows = pl.ds(rows_of(tile), product.rows)
            biases = [] if bias_ref is None else [product.load_rows(bias_ref.at[own_rows])]
            if residual_ref is None:
                return [biases] * batch
            return [[*biases, product.load_rows(residual_ref.at[base + b, own_rows])] for b in range(batch)]

        def finish(tile, dots, read):
            own_rows = pl.ds(rows_of(tile), product.rows)
            for b, ((y,), terms) in enumerate(zip(dots, read, strict=True)):
                for term in terms:
                    y = y + term
                store_in_pieces(y_ref.at[b, own_rows], y.astype(out))

        product.run(
            lax.axis_index("block"),
            weight_refs,
            lambda tile: [rows_of(tile)],
            x_ref,
            norm_ref,
            staged,
            target,
            eps=eps,
            ahead=added,
            finish=finish,
        )

    kernel = target.kernel(
        gemv,
        out_type=jax.ShapeDtypeStruct((batch, rows), out),
        grid=(product.blocks,),
        grid_names=("block",),
        compiler_params=own_meetings(),
        scratch_types={"staged": product.scratch(normed=norm is not None)},
    )
    return kernel(*weight, product.view(x), *optional)
