"""Building blocks for tensor cores: matrices in shared memory for wgmma, products, row statistics."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from llamaspec.pallas_kernels.parts.compat import Target

WGMMA = plgpu.Layout.WGMMA  # the layout of the tensor cores' results in registers: 16 rows per warp
TURNED = plgpu.Layout.WGMMA_TRANSPOSED  # the layout for storing the transpose of such a matrix


def matrices(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Declare shared memory for matrices [..., rows, cols], swizzled in rows of 128 bytes against bank conflicts."""
    cols = 128 // np.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, cols)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def product(a, b):
    """Multiply a by b: bfloat16 in, float32 out. b is in shared memory; a is in shared memory or in registers."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def filled(value: float, *shape: int, layout: Any = WGMMA) -> Any:
    """Make a float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def down(x, rows: int):
    """Broadcast a vector [cols] to a matrix [rows, cols]."""
    return lax.broadcast_in_dim(x, (rows, *x.shape), (1,))


def across(x, cols: int):
    """Broadcast a vector [rows] to a matrix [rows, cols]."""
    return lax.broadcast_in_dim(x, (*x.shape, cols), (0,))


def accumulate(o, a, b, target: Target):
    """Return o plus `product(a, b)`.

    The tensor cores add to the accumulator. The interpreter adds o after the product.
    """
    if target.interpret:
        return o + product(a, b)
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.WGMMAAccumulatorRef.init(o))
