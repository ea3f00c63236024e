"""Draws random weights and caches on the device.

A model with random weights runs as fast as a trained one, and needs no file.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from llamaspec.model.cache import Cache, LayerCache
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint, place_of
from llamaspec.model.insight.machine import random_numbers
from llamaspec.model.running.process import give_back_compilers_memory
from llamaspec.model.tensors import tensor_shapes
from llamaspec.model.weights.embedding import Embedding
from llamaspec.model.weights.loading import abstract_params, aligned_zeros
from llamaspec.model.weights.params import Params, rope_table
from llamaspec.reference.config import Config

NO_NAN = 0x77  # mask of the bits that a random code may have, so that it is not NaN in any scheme
PERIOD = 1 << 20  # number of weights that we draw for a written model; its other weights repeat them


def random_checkpoint(config: Config) -> Checkpoint:
    """Make a model in main memory: normally distributed weights that keep activations near 1, and norms of 1."""
    rng = np.random.default_rng(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        scale = np.float32(shape[-1] ** -0.5)
        values = rng.standard_normal(shape, np.float32) * scale if len(shape) == 2 else np.ones(shape, np.float32)
        return Tensor(shape, values.dtype, lambda: values)

    tensors = {name: tensor(shape) for name, shape in tensor_shapes(config).items()}
    return Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset())


def write_random_model(config: Config, folder: Path) -> None:
    """Write a model with the sizes of `config` in bfloat16, with the tokenizer of the built-in model.

    The weights repeat after `PERIOD` numbers, because drawing all of them would take longer than writing them.
    """
    stories = open_checkpoint("stories")
    numbers = np.random.default_rng(0).standard_normal(PERIOD, np.float32)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        def read() -> np.ndarray:
            weights = (numbers * shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)
            return np.resize(weights, shape) if len(shape) == 2 else np.ones(shape, ml_dtypes.bfloat16)

        return Tensor(shape, np.dtype(ml_dtypes.bfloat16), read)

    tensors = {name: tensor(shape) for name, shape in tensor_shapes(config).items()}
    checkpoint = Checkpoint("random", "memory", config, tensors, bos=stories.bos, stops=stories.stops)
    tokenizer = place_of("stories") / "tokenizer.model"
    write_huggingface(checkpoint, folder, files={tokenizer.name: tokenizer.read_bytes()})


def random_shapes(config: Config, *, dtype: np.dtype, positions: int, quantize: str | None = None) -> Params:
    """Return shapes and dtypes of a model's weights. `quantize` names one of `reference.quantizers.schemes`."""
    empty = np.empty(0, dtype)
    tensors = {name: Tensor(shape, dtype, lambda: empty) for name, shape in tensor_shapes(config).items()}
    checkpoint = Checkpoint("random", "memory", config, tensors, bos=None, stops=frozenset())
    if quantize:
        checkpoint = quantized(checkpoint, quantize)
    return abstract_params(config, dtype=dtype, positions=positions, tensors=checkpoint.tensors)


def random_params(shapes: Params, config: Config) -> Params:
    """Draw weights of these shapes: norms near 1, matrices that keep activations near 1, and codes of any value.

    On a CPU we place the weights in memory as `load_params` does, because their alignment decides how fast they are
    read. We draw the largest ones first, because drawing takes additional memory.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes._replace(rope=None))
    place = _aligned if jax.default_backend() == "cpu" else lambda drawn: drawn
    leaves: dict[int, jax.Array] = {}
    for i, (path, shape) in sorted(enumerate(paths), key=lambda leaf: -leaf[1][1].size):
        leaves[i] = place(_weight(i, shape, scales="scales" in str(path[-1])))
    params = jax.tree.unflatten(tree, [leaves[i] for i in range(len(paths))])
    params = params._replace(rope=rope_table(config, len(shapes.rope.cos)))
    give_back_compilers_memory(config, platform=jax.default_backend())  # drawing compiles programs, loading does not
    table = params.embedding
    return params._replace(head=table.matrix if isinstance(table, Embedding) else table) if config.tied else params


def random_cache(config: Config, *, dtype: np.dtype, capacity: int, batch: int = 1) -> Cache:
    """Draw a cache with random numbers at all positions. Its lengths are 0."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)
    layers = [
        LayerCache(*(random_numbers(2 * i + j, *shape, dtype=dtype) for j in (0, 1))) for i in range(config.layers)
    ]
    give_back_compilers_memory(config, platform=jax.default_backend())  # drawing compiles programs
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def _aligned(drawn: jax.Array) -> jax.Array:
    buffer = aligned_zeros(drawn.shape, np.dtype(drawn.dtype))
    buffer[...] = drawn
    return jax.device_put(buffer, may_alias=True)


def _weight(seed: int, shape: Any, *, scales: bool) -> jax.Array:
    if scales:
        # A scale that is a power of 2 is stored as its exponent (reference.quantizers.mx): this is about 2^-8.
        return jnp.full(shape.shape, 119 if shape.dtype == np.uint8 else 2.0**-8, shape.dtype)
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return _codes(jax.random.key(seed, impl="rbg"), shape.shape, shape.dtype)
    numbers = random_numbers(seed, *shape.shape, dtype=shape.dtype)
    return 1 + numbers / 8 if len(shape.shape) == 1 else numbers * shape.shape[-1] ** -0.5


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _codes(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    words = np.dtype(f"u{dtype.itemsize}")
    mask = int.from_bytes([NO_NAN] * dtype.itemsize)
    return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, words) & np.array(mask, words), dtype)
