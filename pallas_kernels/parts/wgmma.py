"""What the kernels on tensor cores share: matrices in shared memory as wgmma reads them, products, row statistics."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.parts.compat import Target

WGMMA = plgpu.Layout.WGMMA  # a matrix in registers as the tensor cores leave it: 16 rows a warp
TURNED = plgpu.Layout.WGMMA_TRANSPOSED  # the same, for storing its transpose


def matrices(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Shared memory for matrices [..., rows, cols], in rows of 128 bytes that are swizzled against bank conflicts."""
    cols = 128 // np.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, cols)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def product(a, b):
    """a b, with b in shared memory and a there or in registers: bfloat16 in, float32 out."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def filled(value: float, *shape: int, layout: Any = WGMMA) -> Any:
    """A float32 array of one value, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def down(x, rows: int):
    """One number a column, repeated on every row."""
    return lax.broadcast_in_dim(x, (rows, *x.shape), (1,))


def across(x, cols: int):
    """One number a row, repeated in every column."""
    return lax.broadcast_in_dim(x, (*x.shape, cols), (0,))


def accumulate(o, a, b, target: Target):
    """o + a b, with a and b as for `product`: in the accumulator itself, which the interpreter cannot start from o."""
    if target.interpret:
        return o + product(a, b)
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.WGMMAAccumulatorRef.init(o))
