"""The compiled programs of a model: two of them serve every prompt, turn and length.

One reads a chunk of a prompt, and one decodes, at temperature 0 or above it. The other way to decode is a third
program, compiled when it is asked for: a branch between the two would cost a GPU 25 us a token.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from model.cache import Cache, empty_cache
from model.forward import Text, decode, prefill
from model.ops.table import Ops
from model.options import SamplingOptions
from model.running.compile import compiler_options
from model.running.process import is_large
from model.sampling import as_arrays
from model.weights.params import Params
from reference.config import Config

CACHE = 2  # the position of the cache among the arguments of a program, which takes it over
STOPS = 64  # ids that may end a text, at most


class Layout(NamedTuple):
    """Sizes that programs are compiled for."""

    batch: int  # sequences at once
    capacity: int  # tokens of a sequence
    chunk: int  # tokens of a prompt that are read at once
    burst: int  # tokens that a call of `decode` draws at most
    cache_dtype: np.dtype  # of keys and values

    @property
    def rows(self) -> int:
        """Positions of a sequence in the cache, with room for the padding of a prompt's last chunk."""
        return self.capacity + self.chunk

    def empty_cache(self, config: Config) -> Cache:
        """Make the cache that programs of this layout take."""
        return empty_cache(config, batch=self.batch, capacity=self.rows, dtype=self.cache_dtype)


def prompt_chunk(config: Config, platform: str) -> int:
    """Choose how many tokens of a prompt are read at once.

    More tokens reuse each weight more often; the padding of a short prompt wastes time. On a CPU a long prompt takes a
    tenth longer in chunks of 64 than of 128, but a large model would wait for the padding.
    """
    if platform != "cpu":
        return 256
    return 64 if is_large(config) else 128


def longest_burst(platform: str) -> int:
    """Choose how many tokens decoding draws at most before it returns to the host.

    A session asks for as many as it wants to show at once. On a GPU a host takes 1.2 ms to launch a burst of TinyLlama,
    and the GPU takes 12 ms for 16 tokens.
    """
    return 16 if platform == "cpu" else 128


class Programs(NamedTuple):
    """Compiled programs of one layout. `decode` gives the greedy one or the other, compiled when first asked for."""

    prefill: Callable[..., Cache]
    decode: Callable[[bool], Callable[..., tuple[Array, Array, Text, Cache]]]  # greedy or not


def compile_programs(
    params: Params,
    config: Config,
    *,
    ops: Ops,
    layout: Layout,
    platform: str,
    greedy: bool,
    compiled: Callable[[], object] | None = None,
    jit: Callable[..., Any] | None = None,
) -> Programs:
    """Compile for JAX's default device, before any weight is in memory: the compiler takes some hundred MB itself.

    `params` are shapes, those of `model.weights.params.abstract_params`. `greedy` says which of the two programs that
    decode is compiled at once. `compiled` is called after each compilation. `jit` makes a function whose `lower` takes
    these shapes; by default it is `jax.jit`.
    """
    compiled = compiled or (lambda: None)
    jit = jit or partial(jax.jit, donate_argnums=CACHE)
    cache = jax.eval_shape(partial(layout.empty_cache, config))
    options = compiler_options(platform)

    def lower(program: Callable, *arguments, **fixed) -> Lowered:
        return jit(partial(program, config=config, ops=ops, **fixed)).lower(params, *arguments)

    def lower_decode(greedy: bool) -> Lowered:
        return lower(decode, *decode_shapes(config, cache), greedy=greedy, burst=layout.burst)

    # XLA compiles the larger program, or reads it from disk, while Python traces the other.
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(lower_decode(greedy).compile, options)
        prefilling = lower(prefill, *prefill_shapes(layout, cache)).compile(options)
        decoding = {greedy: ahead.result()}
    compiled()

    def decode_program(greedy: bool) -> Compiled:
        if greedy not in decoding:
            decoding[greedy] = lower_decode(greedy).compile(options)
            compiled()
        return decoding[greedy]

    return Programs(prefilling, decode_program)


def prefill_shapes(layout: Layout, cache: Cache) -> tuple[Any, ...]:
    """Give the shapes that `prefill` takes after the weights, for a cache of these shapes."""
    return _shape(layout.batch, layout.chunk), cache, _shape(layout.batch)


def decode_shapes(config: Config, cache: Cache) -> tuple[Any, ...]:
    """Give the shapes that `decode` takes after the weights, for a cache of these shapes."""
    (batch,) = cache.lengths.shape
    return (
        Text(_shape(batch), _shape(batch, config.vocab, dtype=np.bool_), _shape(batch, dtype=np.bool_)),
        cache,
        _shape(batch, 2, dtype=np.uint32),
        jax.tree.map(lambda value: _shape(dtype=value.dtype), as_arrays(SamplingOptions())),
        _shape(STOPS),
        _shape(),
    )


def _shape(*dimensions: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(dimensions, dtype)
