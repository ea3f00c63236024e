"""Times the compiled programs of `generate`, for prompts and for decoding, without the work of the host around them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.benchmarks.common.random_model import random_cache
from llamaspec.model.cache import Cache, empty_cache
from llamaspec.model.forward import decode, prefill, state_after
from llamaspec.model.insight.timing import Effort, Seconds, measure
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.compile import model_options
from llamaspec.model.running.process import give_back_compilers_memory, keep_heaps_small
from llamaspec.model.running.programs import CACHE, STOPS
from llamaspec.model.sampling import as_arrays
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True)
class TimedPrograms:
    """The programs of a model, compiled for `batch` sequences of up to `capacity` tokens."""

    prefill: Callable[..., Cache]  # raises ValueError if compiled without a chunk
    decode: Callable[[bool], Any]  # takes whether decoding is greedy; returns a program, compiled at its first use
    config: Config
    capacity: int
    chunk: int  # prompt tokens per call of `prefill`
    burst: int  # tokens that one call of a `decode` program draws
    batch: int
    seconds: float  # to compile prefill and greedy decoding


def compile_programs(
    params: Params,
    config: Config,
    *,
    ops: Ops,
    capacity: int,
    chunk: int,
    burst: int,
    batch: int = 1,
    options: dict[str, Any] | None = None,
) -> TimedPrograms:
    """Compile a model's programs for the default device, as `model.running.programs` does.

    `capacity` counts the tokens of a sequence and the padding of its last chunk. `chunk` is the number of tokens in a
    prefill chunk; if it is 0, we compile no prefill. `burst` is the largest number of tokens in a decoding call.
    `options` are XLA's options, by default the ones of `model_options`.
    """
    platform = jax.default_backend()
    keep_heaps_small(config, platform=platform)
    if options is None:
        options = model_options(platform, params, config, ops=ops, batch=batch)
    shapes, dtype = jax.eval_shape(lambda params: params, params), params.embedding.dtype
    cache = jax.eval_shape(partial(empty_cache, config, batch=batch, capacity=capacity, dtype=dtype))
    began = perf_counter()

    def compiled(program: Callable, *arguments: Any, **fixed: Any) -> Any:
        jitted = jax.jit(partial(program, config=config, ops=ops, **fixed), donate_argnums=CACHE)
        program_compiled = jitted.lower(shapes, *arguments).compile(options)
        give_back_compilers_memory(config, platform=platform)
        return program_compiled

    @lru_cache
    def decode_program(greedy: bool) -> Any:
        return compiled(decode, *_decoding(config, cache, batch, burst, GREEDY), greedy=greedy, burst=burst)

    prompt = jax.ShapeDtypeStruct((batch, chunk), np.int32)
    decode_program(GREEDY.greedy)
    return TimedPrograms(
        prefill=compiled(prefill, prompt, cache, jax.ShapeDtypeStruct((batch,), np.int32)) if chunk else _no_prompts,
        decode=decode_program,
        config=config,
        capacity=capacity,
        chunk=chunk,
        burst=burst,
        batch=batch,
        seconds=perf_counter() - began,
    )


def _no_prompts(*_: Any) -> Cache:
    raise ValueError("cannot read a prompt: the programs were compiled without prefill (chunk 0)")


def decoding(
    programs: TimedPrograms,
    params: Params,
    *,
    context: int,
    options: SamplingOptions = GREEDY,
) -> Callable[..., Any]:
    """Make a function that draws tokens after `context` tokens, in one call of the program (a burst).

    The function takes the number of tokens, by default `programs.burst`, and raises ValueError for a larger number.

    Raises ValueError if the cache has no room for `context` tokens and a burst.
    """
    config, batch = programs.config, programs.batch
    if context + programs.burst > programs.capacity:
        raise ValueError(
            f"a cache of {programs.capacity} positions has no room for {context} tokens and a burst of {programs.burst}"
        )
    program = programs.decode(options.greedy)
    cache = random_cache(config, dtype=params.embedding.dtype, capacity=programs.capacity, batch=batch)
    lengths = jnp.full(batch, context, jnp.int32)
    text, _, *fixed, _ = _decoding(config, cache, batch, programs.burst, options)
    fixed = jax.device_put(fixed)

    def call(tokens: int = programs.burst):
        nonlocal cache  # the program reuses the old buffer
        if tokens > programs.burst:
            raise ValueError(f"expected at most {programs.burst} tokens per call, got {tokens}")
        rewound = cache._replace(lengths=lengths + 0)
        drawn, count, _, cache = program(params, text, rewound, *fixed, np.int32(tokens))
        return drawn, count

    return call


def decode_seconds(
    programs: TimedPrograms,
    params: Params,
    *,
    context: int,
    effort: Effort,
) -> Seconds:
    """Time full bursts of greedy decoding after `context` tokens. Returns seconds per step."""
    return measure(decoding(programs, params, context=context), effort).over(programs.burst)


def prefilling(programs: TimedPrograms, params: Params, *, tokens: int) -> Callable[[], Any]:
    """Make a function that prefills a prompt of `tokens` tokens, chunk by chunk.

    Raises ValueError if the cache is too small for the prompt and the padding of its last chunk.
    """
    chunks = -(-tokens // programs.chunk)
    if chunks * programs.chunk > programs.capacity:
        raise ValueError(
            f"the cache has {programs.capacity} positions, too few for {chunks} chunks of {programs.chunk} tokens"
        )
    config, batch = programs.config, programs.batch
    cache = random_cache(config, dtype=params.embedding.dtype, capacity=programs.capacity, batch=batch)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab, (batch, chunks * programs.chunk)).astype(np.int32)
    parts = [
        (jnp.asarray(prompt[:, at : at + programs.chunk]), jnp.full(batch, min(programs.chunk, tokens - at), jnp.int32))
        for at in range(0, tokens, programs.chunk)
    ]

    def call():
        nonlocal cache
        cache = cache._replace(lengths=jnp.zeros(batch, jnp.int32))
        for part, lengths in parts:
            cache = programs.prefill(params, part, cache, lengths)
        return cache.lengths

    return call


def prefill_seconds(programs: TimedPrograms, params: Params, *, tokens: int, effort: Effort) -> Seconds:
    """Time the prefill of a prompt of `tokens` tokens."""
    return measure(prefilling(programs, params, tokens=tokens), effort)


def first_token_seconds(programs: TimedPrograms, params: Params) -> float:
    """Time a prompt of one chunk and the first token after it, once, without a warm-up."""
    config, batch = programs.config, programs.batch
    cache = empty_cache(config, batch=batch, capacity=programs.capacity, dtype=params.embedding.dtype)
    began = perf_counter()
    prompt = np.ones((batch, programs.chunk), np.int32)
    cache = programs.prefill(params, prompt, cache, np.full(batch, programs.chunk, np.int32))
    *arguments, _ = _decoding(config, cache, batch, programs.burst, GREEDY)
    jax.block_until_ready(programs.decode(GREEDY.greedy)(params, *arguments, np.int32(1))[0])
    return perf_counter() - began


def _decoding(config: Config, cache: Any, batch: int, burst: int, options: SamplingOptions) -> tuple[Any, ...]:
    """Make the arguments that the decoding program takes after the weights."""
    return (
        state_after(np.ones(batch, int), np.zeros((batch, config.vocab), bool)),
        cache,
        np.zeros((batch, 2), np.uint32),
        as_arrays(options),
        np.full(STOPS, -1, np.int32),
        np.int32(burst),
    )
