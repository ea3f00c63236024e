"""Draws random arguments for a case of the kernel table, on the device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.benchmarks.common.kernel_cases.case import Case
from llamaspec.benchmarks.common.random_model import NO_NAN
from llamaspec.model.insight.machine import random_numbers
from llamaspec.pallas_kernels.parts.matrix import ScaledE4M3

MOST_CODES = {"int8": 127, "int32": 2**31 - 1}  # a word of codes of less than eight bits may be anything


def draw(case: Case, seed: int) -> list[Any]:
    """Draw normal numbers for floats and random codes for integers. Arrays in `case.values` are used unchanged."""
    drawn = jax.tree.leaves(case.arrays)
    seeds = iter(range(len(drawn) * seed, len(drawn) * (seed + 1)))
    return [
        jnp.asarray(case.values[i])
        if i in case.values
        else jax.tree.map(lambda shape: _draw(next(seeds), shape), shapes, is_leaf=_is_e4m3)
        for i, shapes in enumerate(case.arrays)
    ]


def _is_e4m3(leaf: Any) -> bool:
    return isinstance(leaf, ScaledE4M3)


def _draw(seed: int, shape: Any) -> Any:
    if _is_e4m3(shape):
        codes, scales = (_draw(seed + i, part) for i, part in enumerate((shape.codes, shape.scales)))
        return ScaledE4M3(codes & NO_NAN, scales)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return random_numbers(seed, *shape.shape, dtype=shape.dtype)
    return _codes(jax.random.key(seed, impl="rbg"), shape.shape, np.dtype(shape.dtype))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _codes(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    most = MOST_CODES[dtype.name]
    return jax.random.randint(key, shape, -most, most, dtype)
