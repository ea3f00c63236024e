r"""`gemv` for a quantised W: int8 with a scale a row or a group, int4 with a scale a group.

    x_b <- x_b g / rms(x_b)                             (with a norm g)
    y_b,r = sum_c s_(r, group of c) q_(r, c) x_b,c      (+ bias) (+ residual)

W is read once: a byte, or half of one, a weight, and four bytes a scale. The loop is `quantised_product.py`'s.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.compat import MAX_SHARED_MEMORY, Target, current_target
from pallas_kernels.gemv import DTYPES, MAX_BATCH, check_operand
from pallas_kernels.quantised_product import CHUNK, GROUPS, Int4Product, Int8Product, QuantisedProduct
from pallas_kernels.tile import Tile, tile_for


def gemv_quantised(
    codes: Int[Array, "rows packed"],
    scales: Float32[Array, " rows"] | Float32[Array, "rows groups"],
    x: Float[Array, "batch cols"],
    *,
    norm: Float[Array, " cols"] | None = None,
    eps: float = 1e-5,
    bias: Float[Array, " rows"] | None = None,
    residual: Float[Array, "batch rows"] | None = None,
    out: Any = None,
    tile: Tile | None = None,
) -> Float[Array, "batch rows"]:
    """W x for each of up to 8 vectors, in the dtype `out` (that of x, unless given), summed in float32.

    `codes` are int8 [rows, cols], or int32 [rows, cols / 8] as `int4.pack` has them; `scales` one for each group of 32,
    64 or 128 columns, or, for int8, one for each row. x, norm, bias and residual are all float32 or all bfloat16.
    Raises ValueError for anything else; where `rows` is no multiple of 8, or `cols` none of 128 and of four groups, or
    below 1024; and for more vectors than shared memory holds.
    """
    out = np.dtype(out or x.dtype)
    product = product_of("gemv_quantised", codes, scales, x, normed=norm is not None, tile=tile)
    rows = len(codes)
    for name, array, shape in (
        ("norm", norm, (product.cols,)),
        ("bias", bias, (rows,)),
        ("residual", residual, (len(x), rows)),
    ):
        check_operand("gemv_quantised", name, array, shape, x.dtype)
    return _gemv_quantised(
        codes, scales, x, norm, bias, residual, product=product, eps=eps, out=out, target=current_target()
    )


@partial(jax.jit, static_argnames=("product", "eps", "out", "target"))
def _gemv_quantised(codes, scales, x, norm, bias, residual, *, product, eps: float, out: np.dtype, target: Target):
    rows, batch = len(codes), len(x)
    weight = product.operands(codes, scales)
    norm = None if norm is None else product.view(norm)
    optional = [a for a in (norm, bias, residual) if a is not None]

    def gemv_quantised(*refs, staged, y_smem):
        refs = list(refs)
        weight_refs, x_ref = [refs.pop(0) for _ in weight], refs.pop(0)
        norm_ref, bias_ref, residual_ref = (refs.pop(0) if a is not None else None for a in (norm, bias, residual))
        (y_ref,) = refs
        start = pl.multiple_of(lax.axis_index("rows") * product.rows, 8)
        dots = product.run(weight_refs, [start], x_ref, norm_ref, staged, target, eps=eps)
        target.let_next_start()
        mine = pl.ds(start, product.rows)
        for b, (y,) in enumerate(dots):
            if bias_ref is not None:
                y = y + product.load_rows(bias_ref.at[mine])
            if residual_ref is not None:
                y = y + product.load_rows(residual_ref.at[b, mine])
            y_smem[b][...] = y.astype(out)
        plgpu.commit_smem()
        for b in range(batch):
            plgpu.copy_smem_to_gmem(y_smem[b], y_ref.at[b, mine])
        plgpu.wait_smem_to_gmem(0)

    kernel = target.kernel(
        gemv_quantised,
        out_type=jax.ShapeDtypeStruct((batch, rows), out),
        grid=(rows // product.rows,),
        grid_names=("rows",),
        scratch_types={
            "staged": product.scratch(normed=norm is not None),
            "y_smem": [plgpu.SMEM((product.rows,), out) for _ in range(batch)],
        },
    )
    return kernel(*weight, product.view(x), *optional)


def product_of(
    op: str, codes: Array, scales: Array, x: Array, *, normed: bool, tile: Tile | None = None, runs: int = 1
) -> QuantisedProduct:
    """The loop for these arrays, over `tile`.rows rows in each of the runs.

    Raises ValueError, in the caller's words, where there is none.
    """
    if codes.ndim != 2 or codes.dtype not in (jnp.int8, jnp.int32):
        raise ValueError(f"{op} takes codes int8 [rows, cols] or packed int32, got {codes.dtype} {codes.shape}")
    four_bits = codes.dtype == jnp.int32
    rows, cols = len(codes), codes.shape[1] * (8 if four_bits else 1)
    if x.ndim != 2 or x.shape[1] != cols or x.dtype not in DTYPES:
        raise ValueError(f"{op} takes x [batch, {cols}] in float32 or bfloat16, got {x.dtype} {x.shape}")
    if not 1 <= len(x) <= MAX_BATCH:
        raise ValueError(f"{op} takes 1 to {MAX_BATCH} vectors, got {len(x)}")
    group = None if scales.ndim == 1 else cols // max(scales.shape[1], 1)
    if group not in GROUPS and not (group is None and not four_bits):
        raise ValueError(
            f"{op} takes a scale for each {', '.join(map(str, GROUPS))} columns{'' if four_bits else ' or each row'}, "
            f"got {scales.shape} for {rows} rows of {cols}"
        )
    check_operand(op, "scales", scales, (rows,) if group is None else (rows, cols // group), np.dtype(np.float32))
    tile = tile or tile_for(f"{op} {'int4' if four_bits else 'int8'}", rows, cols, x.dtype)
    if tile.rows % 8 or rows % tile.rows or not rows:
        raise ValueError(f"{op} takes rows of W in multiples of {max(tile.rows, 8)}, got {rows}")
    multiple = max(128, 4 * (group or 1))  # a copy wants rows of 16 bytes, of scales too
    if cols < CHUNK or cols % multiple:
        raise ValueError(f"{op} takes columns of W in multiples of {multiple}, {CHUNK} at least, got {cols}")
    kind = Int4Product if four_bits else Int8Product
    product = kind(rows=tile.rows, runs=runs, cols=cols, batch=len(x), stages=tile.stages, dtype=x.dtype, group=group)
    if (needed := product.scratch_bytes(normed=normed)) > MAX_SHARED_MEMORY - 4096:
        raise ValueError(f"{op} would need {needed} bytes of shared memory for {len(x)} vectors of {cols}")
    return product
