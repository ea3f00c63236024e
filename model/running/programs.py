"""The compiled programs of a model: two programs serve prompts and completions of every length.

One reads a chunk of a prompt, and one decodes, either at temperature 0 or above 0. Decoding the other way is a third
program, since a branch between the two would cost a GPU 25 us a token. It is compiled when first needed, and so are the
programs for wider chunks of a prompt, which a GPU has.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from llamaspec.model.cache import Cache, cache_rows, empty_cache
from llamaspec.model.forward import DecodeState, decode, prefill
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.compile import compiler_options, model_options
from llamaspec.model.running.memory import Memory
from llamaspec.model.running.process import is_large
from llamaspec.model.running.program_store import ProgramStore
from llamaspec.model.sampling import as_arrays
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

CACHE = 2  # the index of the cache among the arguments of a program, which donates the cache
MIDDLE, WIDE, WIDE_OF_CODES = 512, 1024, 2048  # tokens
STOPS = 64  # ids that may end a text, at most


class Layout(NamedTuple):
    """Sizes that programs are compiled for."""

    batch: int  # sequences at once
    capacity: int  # tokens of a sequence
    chunk: int  # tokens of a prompt that are read at once
    burst: int  # the most tokens that a call of `decode` draws
    cache_dtype: np.dtype  # of keys and values
    wide: tuple[int, ...] = ()  # wider chunks for longer prompts, if they are faster; ascending
    devices: int = 1  # the number of devices that split the rows of the cache

    @property
    def rows(self) -> int:
        """Positions of a sequence in the cache, with room for the padding of a prompt's last chunk."""
        return cache_rows(self.capacity, self.chunk)

    @property
    def rows_held(self) -> int:
        """Positions of a sequence that a device holds."""
        return -(-self.rows // self.devices)

    @property
    def widest(self) -> int:
        """The most tokens of a prompt that are read at once."""
        return max((self.chunk, *self.wide))

    def parts(self, count: int) -> Iterator[tuple[int, int]]:
        """Cut `count` tokens of a prompt into parts: the width of the chunk for each part, and its number of tokens.

        A wide chunk is used only if its padding is less than `chunk` tokens, since the cache has no room for more.

        >>> layout = Layout(1, 4096, 256, 128, np.dtype(np.float32), wide=(512, 1024))
        >>> [*layout.parts(256)], [*layout.parts(257)], [*layout.parts(1600)]
        ([(256, 256)], [(512, 257)], [(1024, 1024), (512, 512), (256, 64)])
        """
        while count > 0:
            width = max(width for width in (self.chunk, *self.wide) if count > width - self.chunk)
            yield width, min(width, count)
            count -= width

    def fitted(self, plan: Callable[[int], Memory], free: int) -> "Layout":
        """Drop wide chunks, the widest first, until the `plan` for the widest remaining one fits in `free` bytes.

        >>> layout = Layout(1, 4096, 256, 128, np.dtype(np.float32), wide=(512, 1024))
        >>> layout.fitted(lambda widest: Memory(0, 0, widest, 0, process=0, compiling=0), 1000).wide
        (512,)
        """
        layout = self
        while layout.wide and not plan(layout.widest).fits(free):
            layout = layout._replace(wide=layout.wide[:-1])
        return layout

    def empty_cache(self, config: Config) -> Cache:
        """Make the cache that programs of this layout take, or a device's part of it."""
        return empty_cache(config, batch=self.batch, capacity=self.rows_held, dtype=self.cache_dtype)


def prompt_chunk(config: Config, platform: str) -> int:
    """Choose how many tokens of a prompt are read at once.

    A larger chunk reuses each weight more often, but wastes time on the padding of a short prompt. On a CPU a long
    prompt takes a tenth longer in chunks of 64 than of 128; for a large model the padding would cost more than that.
    """
    if platform != "cpu":
        return 256
    return 64 if is_large(config) else 128


def wide_chunks(platform: str, capacity: int, *, codes: bool) -> tuple[int, ...]:
    """Choose the widths of the wider chunks for longer prompts; none on a CPU, where they are not faster.

    On an H100, Llama 3.1 8B in bfloat16 reads 512 tokens in 18.9 ms in chunks of 256 and in 15.6 ms at once. It reads
    4,096 tokens in 145 ms in chunks of 256, in 108 ms in chunks of 1,024 and in 107 ms in chunks of 2,048. With
    quantized matrices (`codes`), every chunk decodes each matrix once, which takes longer than reading the matrix, so
    we add a chunk of 2,048. If 512 were the widest, 1,024 or 1,536 tokens in q8 would take 1.5 times as long as in
    bfloat16 with chunks of 1,024.
    """
    widths = (MIDDLE, WIDE, WIDE_OF_CODES) if codes else (MIDDLE, WIDE)
    return tuple(width for width in widths if platform != "cpu" and capacity >= width)


def longest_burst(platform: str) -> int:
    """Choose the most tokens that decoding draws before it returns to the host.

    A session asks for as many tokens as it wants to show at once, up to this number. The host takes 1.2 ms to launch a
    burst of TinyLlama on a GPU, and the GPU takes 12 ms for 16 tokens.
    """
    return 16 if platform == "cpu" else 128


class Programs(NamedTuple):
    """Compiled programs of one layout. Both fields are functions that return a program, and compile it if needed."""

    prefill: Callable[[int], Callable[..., Cache]]  # by the width of a chunk, `Layout.chunk` or one of `wide`
    decode: Callable[[bool], Callable[..., tuple[Array, Array, DecodeState, Cache]]]  # greedy or not


def compile_programs(
    params: Params,
    config: Config,
    *,
    ops: Ops,
    layout: Layout,
    platform: str,
    greedy: bool,
    prompt: int | None = None,
    compiled: Callable[[], object] | None = None,
    store: ProgramStore | None = None,
    jit: Callable[..., Any] | None = None,
) -> Programs:
    """Compile the programs of a model for JAX's default device.

    `params` are shapes from `model.weights.loading.abstract_params`. `greedy` and `prompt`, the number of tokens in the
    first prompt, choose the programs to compile now (`first_programs`); the others are compiled when first needed.
    `compiled` is called after compiling. Programs that `store` has are loaded from there, and the others are stored.
    `jit` wraps a function like `jax.jit`, its default, so that it can be lowered for these shapes.
    """
    compiled = compiled or (lambda: None)
    if jit is None:
        options = model_options(platform, params, config, ops=ops, batch=layout.batch)
    else:  # for several devices
        options = compiler_options(platform)
    makers = _makers(params, config, ops=ops, layout=layout, options=options, jit=jit)
    # XLA compiles the first program, which is larger, while Python traces the other.
    first = first_programs(layout, greedy=greedy, prompt=prompt)
    with ThreadPoolExecutor(len(first)) as pool:
        loading = {name: pool.submit(makers[name].load, store) for name in first}
        programs = {name: program for name, loaded in loading.items() if (program := loaded.result())}
        missing = [name for name in first if name not in programs]
        compiling = {name: pool.submit(makers[name].lower(store)) for name in missing}
        programs |= {name: program.result() for name, program in compiling.items()}
    compiled()

    def later(name: str) -> Compiled:
        if name not in programs:
            programs[name] = makers[name].load(store) or makers[name].lower(store)()
            compiled()
        return programs[name]

    return Programs(lambda width: later(_reader(width)), lambda greedy: later(_decoder(greedy)))


def first_programs(layout: Layout, *, greedy: bool, prompt: int | None = None) -> list[str]:
    """Name the programs that the first completion needs, the largest first.

    `prompt` is the number of tokens of the first prompt; None means a short prompt. All tokens but the last are read in
    chunks, so a prompt of one token needs only the program that decodes.
    """
    read = layout.chunk if prompt is None else prompt - 1
    return [_decoder(greedy), *dict.fromkeys(_reader(width) for width, _ in layout.parts(read))]


def are_stored(store: ProgramStore | None, names: Sequence[str]) -> bool:
    """Whether `store` has all programs of these names, so that `compile_programs` compiles nothing."""
    return store is not None and all(map(store.has, names))


def _reader(width: int) -> str:
    return f"prefill_{width}"


def _decoder(greedy: bool) -> str:
    return "decode_greedy" if greedy else "decode"


class _Maker(NamedTuple):
    """One program: loaded from a store, or lowered and compiled."""

    name: str
    program: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes
    results: Any  # a pytree of their structure
    options: dict[str, Any]
    jit: Callable[..., Any]

    def load(self, store: ProgramStore | None) -> Compiled | None:
        return store.load(self.name, self.arguments, self.results) if store else None

    def lower(self, store: ProgramStore | None) -> Callable[[], Compiled]:
        """Lower the program now; the returned function compiles it."""

        def lower(name: str) -> Lowered:
            named = partial(self.program)
            named.__name__ = name  # type: ignore  # JAX names a program by its function
            return self.jit(named).lower(*self.arguments)

        if store:
            return store.compile(self.name, lower, self.options)
        lowered = lower(self.program.func.__name__)  # type: ignore
        return lambda: lowered.compile(self.options)


def _makers(
    params: Params,
    config: Config,
    *,
    ops: Ops,
    layout: Layout,
    options: dict[str, Any],
    jit: Callable[..., Any] | None,
) -> dict[str, _Maker]:
    jit = jit or partial(jax.jit, donate_argnums=CACHE)
    cache = jax.eval_shape(partial(layout.empty_cache, config))
    read = partial(prefill, config=config, ops=ops)
    makers = [
        _Maker(_reader(width), read, (params, *prefill_shapes(layout, cache, width)), cache, options, jit)
        for width in (layout.chunk, *layout.wide)
    ]
    shapes = (params, *decode_shapes(config, cache))
    for greedy in (False, True):
        draw = partial(decode, greedy=greedy, burst=layout.burst, config=config, ops=ops)
        makers.append(_Maker(_decoder(greedy), draw, shapes, (0, 0, DecodeState(0, 0, 0), cache), options, jit))  # type: ignore
    return {maker.name: maker for maker in makers}


def prefill_shapes(layout: Layout, cache: Cache, width: int | None = None) -> tuple[Any, ...]:
    """Return the shapes of `prefill`'s arguments after the weights; `cache` has the shapes of the cache.

    `width` is the number of tokens of a chunk, by default `layout.chunk`.
    """
    return _shape(layout.batch, width or layout.chunk), cache, _shape(layout.batch)


def decode_shapes(config: Config, cache: Cache) -> tuple[Any, ...]:
    """Return the shapes of `decode`'s arguments after the weights; `cache` has the shapes of the cache."""
    (batch,) = cache.lengths.shape
    return (
        DecodeState(_shape(batch), _shape(batch, config.vocab, dtype=np.bool_), _shape(batch, dtype=np.bool_)),
        cache,
        _shape(batch, 2, dtype=np.uint32),
        jax.tree.map(lambda value: _shape(dtype=value.dtype), as_arrays(SamplingOptions())),
        _shape(STOPS),
        _shape(),
    )


def _shape(*dimensions: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(dimensions, dtype)
