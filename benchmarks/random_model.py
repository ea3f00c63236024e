"""Weights and caches of random numbers, drawn on the device: as fast as a trained model's, without a file."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import random_numbers
from model.cache import Cache, LayerCache
from model.params import Params, abstract_params, rope_table
from reference.config import Config


def random_params(config: Config, *, dtype: np.dtype, positions: int) -> Params:
    """Weights in `dtype`: normal, of a size that keeps activations about 1; norms are about 1."""
    shapes = abstract_params(config, dtype=dtype, positions=positions)
    leaves, tree = jax.tree.flatten(shapes._replace(rope=None))  # type: ignore
    drawn = jax.tree.unflatten(tree, [_weight(i, leaf) for i, leaf in enumerate(leaves)])
    params = drawn._replace(rope=rope_table(config, positions))
    return params._replace(head=params.embedding) if config.tied else params


def random_cache(config: Config, *, dtype: np.dtype, capacity: int, batch: int = 1) -> Cache:
    """A cache whose every position is random, of which none counts as used yet."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)
    layers = [
        LayerCache(*(random_numbers(2 * i + j, *shape, dtype=dtype) for j in (0, 1))) for i in range(config.layers)
    ]
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def _weight(seed: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
    numbers = random_numbers(seed, *shape.shape, dtype=shape.dtype)
    return 1 + numbers / 8 if len(shape.shape) == 1 else numbers * shape.shape[-1] ** -0.5
