"""Cases of products with quantised weights, by the schemes of `--quantize`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import exact, plain
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Limits, Work, array, times
from pallas_kernels.gemv_quantised import gemv_quantised
from reference.config import Config

GROUP = 64  # columns that share a scale

# For one vector; bits of a weight, and whether groups have scales or rows do. Registers are traded for instructions:
# with 168 of them three blocks share a processor, and shared memory holds no more, as the vectors are float32 in it.
SCHEMES = {
    "q8": (8, True, Limits(168, 4.3)),
    "q8_row": (8, False, Limits(168, 4.6)),
    "q4": (4, True, Limits(168, 3.9)),
}


def gemv_quantised_cases(config: Config, dtype: np.dtype, work: Work) -> Iterator[Case]:
    """Output projection and down projection with their residual, and the LM head with the last norm; bfloat16."""
    if dtype != BFLOAT16:
        return
    for scheme in SCHEMES:
        for batch in work.batches(1, 4):
            yield _case(scheme, config.dim, config.heads * config.head_dim, dtype, batch=batch)
        yield _case(scheme, config.dim, config.ffn, dtype)
        yield _case(scheme, config.vocab, config.dim, dtype, eps=config.eps)


def _case(scheme: str, rows: int, cols: int, dtype: np.dtype, *, batch: int = 1, eps: float | None = None) -> Case:
    """W x + residual, or, with an `eps`, W times a normed x."""
    bits, grouped, limits = SCHEMES[scheme]
    codes = (
        array(rows, cols, dtype=np.dtype(np.int8)) if bits == 8 else array(rows, cols // 8, dtype=np.dtype(np.int32))
    )
    scales = array(rows, *([cols // GROUP] if grouped else []), dtype=FLOAT32)
    x = array(batch, cols, dtype=dtype)
    last = array(batch, rows, dtype=dtype) if eps is None else array(cols, dtype=dtype)
    return Case(
        op=f"gemv_quantised {scheme} {'residual' if eps is None else 'norm'}",
        shape=f"{rows}x{cols}{times(batch)}",
        dtype=dtype.name,
        function=_form(gemv_quantised, eps),
        plain=_form(plain.gemv_quantised, eps),
        exact=_form(exact.gemv_quantised, eps),
        arrays=(codes, scales, x, last),
        kernels={"gemv_quantised": limits if batch == 1 else Limits()},
        bits=bits,
    )


def _form(product: Callable[..., Any], eps: float | None) -> Callable[..., Any]:
    """One of the forms of a product, with the last argument as what it is."""
    if eps is None:
        return lambda codes, scales, x, residual, **tile: product(codes, scales, x, residual=residual, **tile)
    return lambda codes, scales, x, norm, **tile: product(codes, scales, x, norm=norm, eps=eps, out=jnp.float32, **tile)
