"""One decode step of each published Llama, as a function of shapes: what is lowered and compiled without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from model.cache import empty_cache
from model.forward import decode
from model.jax_backend import BURST, CACHE, STOPS
from model.ops import Ops
from model.options import SamplingOptions
from model.params import abstract_params
from model.sampling import as_arrays
from reference.config import Config

CAPACITY = 4096  # positions of the cache


class DecodeStep(NamedTuple):
    """The loop that draws tokens, at batch 1; its body is the step."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    cache: int  # bytes that are to be updated in place


def decode_step(config: Config, *, layers: int, dtype: np.dtype, ops: Ops) -> DecodeStep:
    """The step of a model with the first so many of its layers."""
    config = replace(config, layers=layers, windows=config.windows and config.windows[:layers])
    cache = jax.eval_shape(partial(empty_cache, config, batch=1, capacity=CAPACITY, dtype=dtype))

    def shape(*dimensions: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, dtype)

    return DecodeStep(
        function=partial(decode, burst=BURST, config=config, ops=ops),
        arguments=(
            abstract_params(config, dtype=dtype, positions=CAPACITY),
            shape(1),
            cache,
            shape(1, config.vocab, dtype=np.bool_),
            shape(1, 2, dtype=np.uint32),
            jax.tree.map(lambda value: shape(dtype=value.dtype), as_arrays(SamplingOptions())),
            shape(STOPS),
            shape(),
        ),
        donated=(CACHE,),
        cache=sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache.layers)),
    )
