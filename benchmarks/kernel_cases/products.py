"""Cases of the matrix-vector products: all weights of a layer, and the LM head."""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import exact, plain
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Limits, Work, array, times
from pallas_kernels.gemv import gemv
from pallas_kernels.norm_gate_up import norm_gate_up
from pallas_kernels.norm_qkv import norm_qkv
from pallas_kernels.tile import tile_for
from reference.config import Config

# For one vector. By dtype and rows of a tile; a norm adds a load and a product for every column, and a tile in two
# pieces a copy for each turn of the loop.
PLAIN = {
    (FLOAT32, 16): Limits(50, 3.9),
    (BFLOAT16, 8): Limits(54, 6.0),
    (BFLOAT16, 16): Limits(94, 4.3),
    (BFLOAT16, 32): Limits(151, 3.5),
}
NORMED = Limits(96, 5.0)
PAIRED = Limits(96, 5.5)


def gemv_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """Output projection and down projection with their residual, and the LM head with the last norm."""

    def residual(rows: int, cols: int, batch: int = 1) -> Case:
        limits = PLAIN.get((dtype, tile_for("gemv", rows, cols, dtype).rows), Limits()) if batch == 1 else Limits()
        return Case(
            op="gemv residual",
            shape=f"{rows}x{cols}{times(batch)}",
            dtype=dtype.name,
            function=lambda w, x, residual, **tile: gemv(w, x, residual=residual, **tile),
            plain=lambda w, x, residual: plain.gemv(w, x, residual=residual),
            exact=lambda w, x, residual: exact.gemv(w, x, residual=residual),
            arrays=(array(rows, cols, dtype=dtype), *(array(batch, n, dtype=dtype) for n in (cols, rows))),
            kernels={"gemv": limits},
            bits=dtype.itemsize * 8,
        )

    for batch in work.batches(1, 2, 4, 8):
        yield residual(config.dim, config.heads * config.head_dim, batch)
    yield residual(config.dim, config.ffn)
    yield Case(
        op="gemv norm",
        shape=f"{config.vocab}x{config.dim}",
        dtype=dtype.name,
        function=lambda w, x, norm, **tile: gemv(w, x, norm=norm, eps=config.eps, out=jnp.float32, **tile),
        plain=lambda w, x, norm: plain.gemv(w, x, norm=norm, eps=config.eps, out=jnp.float32),
        exact=lambda w, x, norm: exact.gemv(w, x, norm=norm, eps=config.eps, out=np.float32),
        arrays=tuple(
            array(*shape, dtype=dtype) for shape in ((config.vocab, config.dim), (1, config.dim), (config.dim,))
        ),
        kernels={"gemv": NORMED},
        bits=dtype.itemsize * 8,
    )


def norm_gate_up_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    for batch in work.batches(1, 8):
        yield Case(
            op="norm_gate_up",
            shape=f"{2 * config.ffn}x{config.dim}{times(batch)}",
            dtype=dtype.name,
            function=partial(norm_gate_up, eps=config.eps),
            plain=partial(plain.norm_gate_up, eps=config.eps),
            exact=partial(exact.norm_gate_up, eps=config.eps),
            arrays=(
                array(2 * config.ffn, config.dim, dtype=dtype),
                array(batch, config.dim, dtype=dtype),
                array(config.dim, dtype=dtype),
            ),
            kernels={"norm_gate_up": PAIRED if batch == 1 else Limits()},
            bits=dtype.itemsize * 8,
        )


def norm_qkv_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    rows = (heads + 2 * kv_heads) * head_dim
    for batch in work.batches(1, 8):
        cache = array(batch, kv_heads, work.capacity, head_dim, dtype=dtype)
        turns = array(batch, head_dim // 2, dtype=FLOAT32)
        yield Case(
            op="norm_qkv",
            shape=f"{heads}+2x{kv_heads}x{head_dim}x{config.dim}{times(batch)}",
            dtype=dtype.name,
            function=partial(norm_qkv, heads=heads, eps=config.eps),
            plain=partial(plain.norm_qkv, heads=heads, eps=config.eps),
            exact=partial(exact.norm_qkv, heads=heads, eps=config.eps),
            given={5: np.full(batch, work.capacity // 2, np.int32)},
            arrays=(
                array(rows, config.dim, dtype=dtype),
                array(batch, config.dim, dtype=dtype),
                array(config.dim, dtype=dtype),
                cache,
                cache,
                array(batch, dtype=np.dtype(np.int32)),
                turns,
                turns,
            ),
            donated=(3, 4),
            kernels={"norm_qkv": PAIRED if batch == 1 else Limits()},
            bits=dtype.itemsize * 8,
        )
