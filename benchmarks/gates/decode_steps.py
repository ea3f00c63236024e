"""Decode steps of the published Llamas through our kernels, compiled without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.model.cache import empty_cache
from llamaspec.model.forward import decode
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.table import Ops
from llamaspec.model.running.programs import CACHE, decode_shapes, longest_burst
from llamaspec.model.weights.gpu_codes import arranged

CAPACITY = 4096  # positions of the cache
FEW_LAYERS = 2
DRAWN = "drawn"  # a word in the name of a step that samples tokens
DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": np.dtype(np.float32)}

# All models have a head_dim of 64 or 128, for which attention has kernels. Float32 is compiled for the models that run
# in float32. Each scheme with kernels is compiled for one model, and the coarsest scheme for the largest model. Two
# steps sample, from a small and from a large vocabulary; all other steps are greedy.
STEPS = (
    *(f"{name} bfloat16" for name, config in SHAPES.items() if config.head_dim in (64, 128)),
    *(f"{name} float32" for name in ("stories-110m", "tinyllama-1.1b")),
    *(f"{name} bfloat16 {scheme}" for name, scheme in (
        ("tinyllama-1.1b", "q8"), ("llama-3.1-8b", "q8"), ("llama-3.1-8b", "q8_row"), ("llama-3.1-8b", "q4"),
        ("llama-3.1-70b", "q4"), ("tinyllama-1.1b", DRAWN), ("llama-3.1-8b", DRAWN),
    )),
)  # fmt: skip


class DecodeStep(NamedTuple):
    """A loop that draws tokens for one sequence. The body of the loop is the step."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    layers: int
    cache: int  # bytes, updated in place
    plain: int  # ops of a layer with kernels that refuse this model


def decode_step(name: str, *, layers: int | None = None) -> DecodeStep:
    """Build a step of `STEPS`, with the first `layers` layers of the model or with all."""
    model, dtype, *words = name.split()
    scheme = next((word for word in words if word != DRAWN), None)
    config = replace(SHAPES[model], layers=layers or SHAPES[model].layers)
    cache = jax.eval_shape(partial(empty_cache, config, batch=1, capacity=CAPACITY, dtype=DTYPES[dtype]))
    params = random_shapes(config, dtype=DTYPES[dtype], positions=CAPACITY, quantize=scheme)
    params = jax.eval_shape(arranged, params)
    ops, reasons = pallas_ops(config, params, capacity=CAPACITY)
    refused = [name for name in Ops._fields if reasons.get(name)]

    return DecodeStep(
        function=partial(decode, greedy=DRAWN not in words, burst=longest_burst("gpu"), config=config, ops=ops),
        arguments=(params, *decode_shapes(config, cache)),
        donated=(CACHE,),
        layers=config.layers,
        cache=sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache.layers)),
        plain=len(set(refused) - {"norm_logits"}),
    )
