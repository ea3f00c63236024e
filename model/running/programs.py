"""The compiled programs of a model. Two programs are enough for prompts and completions of every length.

One program prefills a chunk of a prompt, and one decodes. Another temperature may need a third program: decoding at
temperature 0 is one program, and decoding at higher temperatures is another, because a branch inside a single program
would cost a GPU 25 us per token. A GPU also has programs for wider chunks of a prompt, and speculation needs a program
that verifies a draft. We compile the programs that the first completion needs when a model is loaded, and all other
programs at their first use.
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
from llamaspec.model.forward import DecodeState, decode, prefill, verify
from llamaspec.model.ops.by_token import BY_TOKEN
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.compile import compiler_options, model_options
from llamaspec.model.running.memory import Memory
from llamaspec.model.running.process import is_large
from llamaspec.model.running.program_store import ProgramStore
from llamaspec.model.sampling import as_arrays
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

CACHE = 2  # index of the cache among a program's arguments; the program donates the cache
MIDDLE, WIDE, WIDE_OF_CODES = 512, 1024, 2048  # tokens per chunk
STOPS = 64  # largest number of ids that end a text


class Layout(NamedTuple):
    """The sizes for which programs are compiled: numbers of sequences and tokens, and the dtype of the cache."""

    batch: int  # number of sequences
    capacity: int  # tokens per sequence
    chunk: int  # tokens of a prompt that are prefilled at once
    burst: int  # largest number of tokens per call of `decode`
    cache_dtype: np.dtype  # dtype of keys and values
    wide: tuple[int, ...] = ()  # wider chunks for longer prompts, in ascending order; (): they are not faster
    devices: int = 1  # number of devices over which the rows of the cache are sharded
    drafts: int = 0  # number of tokens per draft that `verify` takes; 0: there is no such program

    @property
    def rows(self) -> int:
        """The number of cache rows for a sequence: `capacity` positions, and room for a prompt's padded last chunk."""
        return cache_rows(self.capacity, self.chunk)

    @property
    def rows_held(self) -> int:
        """The number of cache rows for a sequence on one device."""
        return -(-self.rows // self.devices)

    @property
    def widest(self) -> int:
        """The largest number of prompt tokens that are prefilled at once."""
        return max((self.chunk, *self.wide))

    def parts(self, count: int) -> Iterator[tuple[int, int]]:
        """Cut `count` tokens of a prompt into parts. Yields the width of the chunk for each part, and the part's number
        of tokens.

        We use a wide chunk only if its padding is less than `chunk` tokens, because the cache has no room for more.

        >>> layout = Layout(1, 4096, 256, 128, np.dtype(np.float32), wide=(512, 1024))
        >>> [*layout.parts(256)], [*layout.parts(257)], [*layout.parts(1600)]
        ([(256, 256)], [(512, 257)], [(1024, 1024), (512, 512), (256, 64)])
        """
        while count > 0:
            width = max(width for width in (self.chunk, *self.wide) if count > width - self.chunk)
            yield width, min(width, count)
            count -= width

    def fitted(self, plan: Callable[[int], Memory], free: int) -> "Layout":
        """Drop wide chunks, the widest first, until the `plan` for the widest remaining chunk fits in `free` bytes.

        >>> layout = Layout(1, 4096, 256, 128, np.dtype(np.float32), wide=(512, 1024))
        >>> layout.fitted(lambda widest: Memory(0, 0, widest, 0, process=0, compiling=0), 1000).wide
        (512,)
        """
        layout = self
        while layout.wide and not plan(layout.widest).fits(free):
            layout = layout._replace(wide=layout.wide[:-1])
        return layout

    def empty_cache(self, config: Config) -> Cache:
        """Make an empty cache of this layout. If its rows are sharded, make the part of one device."""
        return empty_cache(config, batch=self.batch, capacity=self.rows_held, dtype=self.cache_dtype)


def prompt_chunk(config: Config, platform: str) -> int:
    """Return how many tokens of a prompt are prefilled at once.

    A larger chunk reuses each weight more often, but wastes time on the padding of a short prompt. On a CPU, a long
    prompt takes a tenth longer with chunks of 64 than with chunks of 128. For a large model, the padding would cost
    more than that.
    """
    if platform != "cpu":
        return 256
    return 64 if is_large(config) else 128


def wide_chunks(platform: str, capacity: int, *, codes: bool) -> tuple[int, ...]:
    """Return the widths (in tokens, at most `capacity`) of the wider chunks for longer prompts.

    On a CPU there are none, because they are not faster. On a GPU they are 512 and 1,024. For quantized matrices
    (`codes`) we add 2,048, because every chunk decodes each matrix once, which takes longer than reading the matrix.

    On an H100, Llama 3.1 8B in bfloat16 prefills 512 tokens in 18.9 ms with chunks of 256, and in 15.6 ms with one
    chunk. It prefills 4,096 tokens in 145 ms with chunks of 256, in 108 ms with chunks of 1,024, and in 107 ms with
    chunks of 2,048. If 512 were the widest chunk, q8 would take 1.5 times as long for 1,024 or 1,536 tokens as bfloat16
    takes with chunks of 1,024.
    """
    widths = (MIDDLE, WIDE, WIDE_OF_CODES) if codes else (MIDDLE, WIDE)
    return tuple(width for width in widths if platform != "cpu" and capacity >= width)


def longest_burst(platform: str) -> int:
    """Return the largest number of tokens that decoding draws before it returns to the host.

    A session asks for as many tokens as it wants to show at once, up to this number. The host takes 1.2 ms to launch a
    burst of TinyLlama on a GPU, and the GPU takes 12 ms for 16 tokens.
    """
    return 16 if platform == "cpu" else 128


class Programs(NamedTuple):
    """The compiled programs of one layout.

    Each field is a function that returns a program, and compiles it if needed.
    """

    prefill: Callable[[int], Callable[..., Cache]]  # takes the width of a chunk: `Layout.chunk` or one of `wide`
    decode: Callable[[bool], Callable[..., tuple[Array, Array, DecodeState, Cache]]]  # takes whether decoding is greedy
    # takes whether decoding is greedy; only if `Layout.drafts` is not 0
    verify: Callable[[bool], Callable[..., tuple[Array, Array, DecodeState, Cache]]]


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

    `params` are shapes from `model.weights.loading.abstract_params`. `prompt` is the number of tokens in the first
    prompt. `prompt` and `greedy` decide which programs we compile now (`first_programs`). We compile the others at
    their first use. We call `compiled` each time we have compiled programs. If `store` has a program, we load it from
    there; otherwise we store it. `jit` replaces `jax.jit`; for example, `Partition.jit` makes programs for several
    devices.
    """
    compiled = compiled or (lambda: None)
    if jit is None:
        options = model_options(platform, params, config, ops=ops, batch=layout.batch)
    else:  # for several devices
        options = compiler_options(platform)
    makers = _makers(params, config, ops=ops, layout=layout, options=options, jit=jit)
    # XLA compiles the first program, which is larger, while Python traces the other program.
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

    return Programs(
        lambda width: later(_reader(width)),
        lambda greedy: later(_decoder(greedy)),
        lambda greedy: later(_verifier(greedy)),
    )


def first_programs(layout: Layout, *, greedy: bool, prompt: int | None = None) -> list[str]:
    """Return the names of the programs that the first completion needs, the largest program first.

    `prompt` is the number of tokens in the first prompt. None means a short prompt. All tokens except the last are
    prefilled in chunks, so a prompt of one token needs only the program that decodes.
    """
    read = layout.chunk if prompt is None else prompt - 1
    verifier = [_verifier(greedy)] if layout.drafts else []
    return [*verifier, _decoder(greedy), *dict.fromkeys(_reader(width) for width, _ in layout.parts(read))]


def are_stored(store: ProgramStore | None, names: Sequence[str]) -> bool:
    """Return whether `store` has all programs with these names, so that `compile_programs` compiles nothing."""
    return store is not None and all(map(store.has, names))


def _reader(width: int) -> str:
    return f"prefill_{width}"


def _decoder(greedy: bool) -> str:
    return "decode_greedy" if greedy else "decode"


def _verifier(greedy: bool) -> str:
    return "verify_greedy" if greedy else "verify"


class _Maker(NamedTuple):
    """One program, which is loaded from a store, or lowered and compiled."""

    name: str
    program: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes of the program's arguments
    results: Any  # a pytree with the structure of the program's results
    options: dict[str, Any]
    jit: Callable[..., Any]

    def load(self, store: ProgramStore | None) -> Compiled | None:
        return store.load(self.name, self.arguments, self.results) if store else None

    def lower(self, store: ProgramStore | None) -> Callable[[], Compiled]:
        """Lower the program now. The returned function compiles it."""

        def lower(name: str) -> Lowered:
            named = partial(self.program)
            named.__name__ = name  # type: ignore  # JAX names a program by its function
            return self.jit(named).lower(*self.arguments)

        if store:
            return store.compile(self.name, lower, self.options)
        lowered = lower(self.program.func.__name__)  # type: ignore  # of a partial
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
        # numbers in the place of arrays: only the structure of the results counts
        results: Any = (0, 0, DecodeState(0, 0, 0), cache)  # type: ignore
        makers.append(_Maker(_decoder(greedy), draw, shapes, results, options, jit))
        if layout.drafts:
            check = partial(verify, greedy=greedy, config=config, ops=BY_TOKEN)
            drafted = (*shapes[:-1], _shape(layout.drafts), _shape())
            makers.append(_Maker(_verifier(greedy), check, drafted, results, options, jit))
    return {maker.name: maker for maker in makers}


def prefill_shapes(layout: Layout, cache: Cache, width: int | None = None) -> tuple[Any, ...]:
    """Return the shapes of `prefill`'s arguments after the weights. `cache` has the shapes of the cache.

    `width` is the number of tokens per chunk, by default `layout.chunk`.
    """
    return _shape(layout.batch, width or layout.chunk), cache, _shape(layout.batch)


def decode_shapes(config: Config, cache: Cache) -> tuple[Any, ...]:
    """Return the shapes of `decode`'s arguments after the weights. `cache` has the shapes of the cache."""
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
