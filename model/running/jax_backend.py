"""The compiled model behind a generation: two programs serve every prompt, turn and length.

One of them decodes at temperature 0 or above it; the other way has a third, compiled when it is asked for, since a
branch between the two would cost a GPU 25 us a token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled, Lowered
from jaxtyping import Array, Float

from model.cache import Cache, empty_cache
from model.checkpoints.checkpoint import Checkpoint
from model.forward import Text, decode, forward, prefill, text_after
from model.insight.cost import decode_cost
from model.ops.block import CPU, XLA, Ops
from model.options import SamplingOptions
from model.running.compile import compiler_options
from model.running.memory import forget_code, return_blocks_when_freed, return_freed_memory
from model.sampling import as_arrays, random_key
from model.tensors import tensor_shapes
from model.weights.gpu_codes import has_kernels
from model.weights.params import Params, load_params
from reference.config import Config

CACHE = 2  # the position of the cache among the arguments of a program, which takes it over
STOPS = 64  # ids that may end a text, at most
SMALL = 1 << 28  # weights of a model that a CPU reads a whole chunk with in a quarter of a second


def prompt_chunk(config: Config, platform: str | None = None) -> int:
    """Prompt tokens computed at once, on the default device unless another is given.

    Enough to reuse each weight, few to waste as padding: on a CPU a long prompt takes a tenth longer in chunks of 64
    than of 128, but one would wait for what pads a short one if the model is large.
    """
    if (platform or jax.default_backend()) != "cpu":
        return 256
    return 64 if is_large(config) else 128


def longest_burst(platform: str | None = None) -> int:
    """Tokens that decoding draws at most before it returns to the host, on the default device unless another is given.

    A session asks for as many as it wants to show at once. A host takes 1.2 ms to hand over each call of TinyLlama's
    program on a GPU (benchmarks/LOG.md), where 16 tokens take 12.
    """
    return 16 if (platform or jax.default_backend()) == "cpu" else 128


def is_large(config: Config) -> bool:
    """Whether a CPU takes so long to read the weights that what else a step or a chunk takes hardly counts."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values()) > SMALL


def keep_heaps_small(config: Config) -> None:
    """Have this process give back what programs for a large model free on a CPU: see `return_blocks_when_freed`."""
    if _counts_its_memory(config):
        return_blocks_when_freed()


def give_back_compilers_memory(config: Config) -> None:
    """What compiling leaves behind; for a large model on a CPU, the compiler's code as well: see `forget_code`."""
    return_freed_memory()
    if _counts_its_memory(config):
        forget_code()


def _counts_its_memory(config: Config) -> bool:
    """Whether memory matters more than the milliseconds that giving it back takes: of a large model, on a CPU."""
    return is_large(config) and jax.default_backend() == "cpu"


def choose_ops(kernels: str) -> Ops:
    """The table of ops by name: `auto` takes the one made for the default device. Raises ValueError."""
    match kernels:
        case "auto" if has_kernels():
            from model.ops.gpu import PALLAS

            return PALLAS
        case "auto":
            return CPU if jax.default_backend() == "cpu" else XLA
        case "xla":
            return XLA
        case "cpu":
            return CPU
        case "pallas" if has_kernels():
            from model.ops.gpu import PALLAS_ONLY

            return PALLAS_ONLY
        case "pallas":
            device = jax.devices()[0]
            raise ValueError(
                "kernels pallas run on a GPU of compute capability 9.0 (H100, H200), and JAX has here "
                f"a {device.device_kind}: choose auto, xla or cpu"
            )
        case _:
            raise ValueError(f"no kernels named {kernels}: choose auto, xla, cpu or pallas")


class Programs(NamedTuple):
    """What runs a generation, compiled for fixed shapes; of the two that decode, one when it is first asked for."""

    prefill: Callable[..., Cache]
    decode: Callable[[bool], Callable[..., tuple[Array, Array, Text, Cache]]]  # greedy or not


def compile_programs(
    params: Params, config: Config, *, ops: Ops, capacity: int, chunk: int, cache_dtype: np.dtype, greedy: bool
) -> Programs:
    """Compile for the default device, before any weight is in memory: the compiler takes some hundred MB itself.

    Of the two that decode that is the one that `greedy` says; the other follows if it is asked for, beside the weights.
    `params` are `model.weights.params.abstract_params`.
    """
    keep_heaps_small(config)
    cache = jax.eval_shape(partial(empty_cache, config, batch=1, capacity=capacity + chunk, dtype=cache_dtype))

    def lower(program: Callable, *arguments, **fixed) -> Lowered:
        jitted = jax.jit(partial(program, config=config, ops=ops, **fixed), donate_argnums=CACHE)
        return jitted.lower(params, *arguments)

    def lower_decode(greedy: bool) -> Lowered:
        return lower(decode, *decode_shapes(config, cache), greedy=greedy, burst=longest_burst())

    with ThreadPoolExecutor(1) as pool:  # XLA compiles the larger, or reads it from disk, while Python traces the other
        ahead = pool.submit(lower_decode(greedy).compile, compiler_options())
        prefilling = lower(prefill, _shape(1, chunk), cache, _shape(1)).compile(compiler_options())
        decoding = {greedy: ahead.result()}
    give_back_compilers_memory(config)

    def decode_program(greedy: bool) -> Compiled:
        if greedy not in decoding:
            decoding[greedy] = lower_decode(greedy).compile(compiler_options())
            give_back_compilers_memory(config)
        return decoding[greedy]

    return Programs(prefilling, decode_program)


def decode_shapes(config: Config, cache: Cache) -> tuple[Any, ...]:
    """The shapes of what `decode` takes after the weights, for one sequence and a cache of these."""
    return (
        Text(_shape(1), _shape(1, config.vocab, dtype=np.bool_), _shape(1, dtype=np.bool_)),
        cache,
        _shape(1, 2, dtype=np.uint32),
        jax.tree.map(lambda value: _shape(dtype=value.dtype), as_arrays(SamplingOptions())),
        _shape(STOPS),
        _shape(),
    )


def _shape(*dimensions: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(dimensions, dtype)


class Drawing(NamedTuple):
    """A text that is being drawn, on the device."""

    text: Text
    fixed: tuple[Any, ...]  # what all calls of the program for it are given
    greedy: bool


class JaxBackend:
    """A Llama on the default device, one sequence at a time."""

    def __init__(
        self,
        params: Params,
        programs: Programs,
        config: Config,
        *,
        ops: Ops,
        capacity: int,
        chunk: int,
        cache_dtype: np.dtype,
    ):
        self.capacity = capacity
        self.chunk = chunk
        self.burst = longest_burst()
        # A GPU would rest for the milliseconds in which a host hands over a call; a CPU has no time of its own.
        self.ahead = 0 if jax.default_backend() == "cpu" else 1
        self._cache_dtype = cache_dtype
        self._params, self._programs, self._config = params, programs, config
        self._forward = jax.jit(partial(forward, config=config, ops=ops))

    def bytes_read(self, position: int | float) -> float:
        """What a step of decoding reads at least, with so many tokens before it."""
        return decode_cost(self._params, self._config, position=position, batch=1, cache_dtype=self._cache_dtype).bytes

    def start(self) -> Cache:
        """An empty cache. It has room for a whole chunk past the capacity, since the last chunk is padded."""
        return empty_cache(self._config, batch=1, capacity=self.capacity + self.chunk, dtype=self._cache_dtype)

    def rewind(self, cache: Cache, length: int) -> Cache:
        """Forget all but the first `length` positions."""
        return cache._replace(lengths=jax.device_put(np.array([length], np.int32)))

    def extend(self, cache: Cache, ids: Sequence[int]) -> Cache:
        """Append at most a chunk of tokens to the cache."""
        return self._programs.prefill(self._params, self._padded(ids), cache, np.array([len(ids)], np.int32))

    def begin(
        self, token: int, *, seen: np.ndarray, seed: int, options: SamplingOptions, stops: Sequence[int]
    ) -> Drawing:
        """A text to draw after `token`, which ends at one of `stops`."""
        if len(stops) > STOPS:
            raise ValueError(f"{len(stops)} ids that end a text are more than the {STOPS} that a program takes")
        ends = np.array([*stops, *[-1] * (STOPS - len(stops))], np.int32)
        fixed = jax.device_put((random_key(seed)[None], as_arrays(options), ends))
        return Drawing(text_after(np.array([token]), seen[None]), fixed, options.greedy)

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Begin to draw up to `steps` tokens (at most `burst`), which the first result waits for; none where the text
        has ended."""
        drawn, taken, text, cache = self._programs.decode(drawing.greedy)(
            self._params, drawing.text, cache, *drawing.fixed, np.int32(steps)
        )
        return lambda: np.asarray(drawn)[: int(taken), 0].tolist(), drawing._replace(text=text), cache

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "seq vocab"]:
        """Logits for what follows each of `ids`, in float32."""
        return np.concatenate(list(self.logits_in_parts(ids)))

    def logits_in_parts(self, ids: Sequence[int], *, after: int = 0) -> Iterator[Float[np.ndarray, "rows vocab"]]:
        """`logits` of a chunk at a time, without those of the first `after` ids, which are only read."""
        cache = self.start()
        for start in range(0, after, self.chunk):
            cache = self.extend(cache, ids[start : min(start + self.chunk, after)])
        for start in range(after, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            lengths = np.array([len(part)], np.int32)
            logits, cache = self._forward(self._params, self._padded(part), cache, lengths=lengths)
            yield np.asarray(logits)[0, : len(part)]

    def with_weights(self, checkpoint: Checkpoint, *, read_from: Checkpoint | None = None) -> "JaxBackend":
        """The same programs on the weights of another checkpoint, whose tensors are of the same shapes and forms.

        Where these weights were `read_from` a checkpoint that is named, tensors that it and the other share stay.
        """
        other, loaded = copy(self), (read_from, self._params) if read_from else None
        dtype, positions = self._params.embedding.dtype, len(self._params.rope.cos)
        other._params = load_params(checkpoint, dtype=dtype, positions=positions, loaded=loaded)
        return other

    def _padded(self, ids: Sequence[int]) -> np.ndarray:
        tokens = np.zeros((1, self.chunk), np.int32)
        tokens[0, : len(ids)] = ids
        return tokens
