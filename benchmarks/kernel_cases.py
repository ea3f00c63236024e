"""The kernel table: every (op, shape, dtype) that the ten published Llamas ask of our kernels.

It is what is lowered (tests/kernels/test_lowering.py) and compiled for an H200 (benchmarks/gpu_compile) without a GPU.
A kernel joins it with a function of a model's config and a dtype, named in `OPS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.shapes import SHAPES
from pallas_kernels.gemv import gemv
from pallas_kernels.tile import tile_for
from reference.config import Config

FLOAT32, BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)
DTYPES = (FLOAT32, BFLOAT16)


class Limits(NamedTuple):
    """What the compiler may make of a kernel: no worse than what was seen when it was designed."""

    registers: int = 255  # a thread
    instructions: float | None = None  # of a thread, per weight, in the main loop
    eager: bool = True  # loads weights while the kernel before it still runs
    wgmma: bool = False  # leaves its products to the tensor cores


@dataclass(frozen=True)
class Case:
    """An op at one shape and dtype."""

    op: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    kernels: Mapping[str, Limits]  # that it consists of
    bits: float = 0  # of a weight in memory; 0: it has none
    donated: tuple[int, ...] = ()  # arrays that are updated in place
    models: tuple[str, ...] = ()  # that have it

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"


def array(*shape: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# By dtype and rows of a tile, at batch 1.
_GEMV = {
    (FLOAT32, 16): Limits(50, 3.9),
    (BFLOAT16, 8): Limits(54, 6.0),
    (BFLOAT16, 16): Limits(94, 4.3),
    (BFLOAT16, 32): Limits(151, 3.5),
}


def gemv_cases(config: Config, dtype: np.dtype) -> Iterator[Case]:
    """Output projection and down projection with their residual, and the LM head with the last norm."""

    def case(rows: int, cols: int, batch: int, *, head: bool = False) -> Case:
        tile = tile_for("gemv", rows, cols, dtype)
        limits = Limits(96, 5.0) if head else _GEMV[dtype, tile.rows] if batch == 1 else Limits()
        w, x, norm = array(rows, cols, dtype=dtype), array(batch, cols, dtype=dtype), array(cols, dtype=dtype)
        return Case(
            op="gemv norm" if head else "gemv residual",
            shape=f"{rows}x{cols}" + f" x{batch}" * (batch > 1),
            dtype=dtype.name,
            function=partial(_normed_gemv, eps=config.eps) if head else _gemv_residual,
            arrays=(w, x, norm) if head else (w, x, array(batch, rows, dtype=dtype)),
            kernels={"gemv": limits},
            bits=dtype.itemsize * 8,
        )

    for batch in _batches(config):
        yield case(config.dim, config.heads * config.head_dim, batch)
    yield case(config.dim, config.ffn, 1)
    yield case(config.vocab, config.dim, 1, head=True)


def _gemv_residual(w, x, residual):
    return gemv(w, x, residual=residual)


def _normed_gemv(w, x, norm, *, eps: float):
    return gemv(w, x, norm=norm, eps=eps, out=jnp.float32)


def _batches(config: Config) -> tuple[int, ...]:
    """Every model decodes one sequence; one of them, several at once."""
    return (1, 2, 4, 8) if config == SHAPES["llama-3.1-8b"] else (1,)


# What kernels refuse of the table, in their words: the plain form runs there.
REFUSED = {
    "gemv residual 288x288 float32": "columns of W in multiples of 128",
    "gemv residual 288x288 bfloat16": "columns of W in multiples of 256",
    "gemv norm 32000x288 float32": "columns of W in multiples of 128",
    "gemv norm 32000x288 bfloat16": "columns of W in multiples of 256",
    "gemv residual 512x1376 float32": "columns of W in multiples of 128",
    "gemv residual 512x1376 bfloat16": "columns of W in multiples of 256",
    "gemv residual 8192x28672 float32": "shared memory",
}

# One line a kernel.
OPS: tuple[Callable[[Config, np.dtype], Iterator[Case]], ...] = (gemv_cases,)


@cache
def kernel_cases() -> dict[str, Case]:
    """The table, by name; a shape that several models share is in it once."""
    cases: dict[str, Case] = {}
    for model, config in SHAPES.items():
        for case in (case for op in OPS for dtype in DTYPES for case in op(config, dtype)):
            known = cases.get(case.name, case)
            cases[case.name] = replace(known, models=(*known.models, model))
    return cases
