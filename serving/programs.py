"""The two programs that serve every request: one prefills a chunk of one prompt, one decodes a fixed number of rows.

Both take one paged cache and return it. Their shapes never change, so nothing is compiled while requests are served. A
row's tokens do not depend on the other rows, to the last bit, for three reasons: products have fixed shapes, attention
reads each row's own pages in order, and an option that only some rows use never changes the numbers of other rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from llamaspec.model.cache import Cache, LayerPages, empty_pages
from llamaspec.model.forward import hidden_states
from llamaspec.model.ops.block import final_norm
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.compile import untuned_options
from llamaspec.model.sampling import Sampling, as_arrays, penalize, sample_by_row
from llamaspec.model.weights.adapted import with_chosen
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.serving.request import MOST_LOGPROBS, MOST_STOPS


class ProgramSizes(NamedTuple):
    """The sizes for which the programs are compiled."""

    width: int  # number of rows of `decode`
    chunk: int  # number of tokens of `prefill`
    burst: int  # largest number of steps of `decode`
    pages: int  # total number of pages
    page: int  # tokens per page
    blocks: int  # largest number of pages per request
    cache_dtype: np.dtype
    rank: int = 0  # of all adapters together


class State(NamedTuple):
    """All arrays on the device that the programs change."""

    pages: list[tuple[Array, Array]]  # keys and values of each layer
    counts: Int[Array, "rows vocab"]  # count of each token in the answer so far
    prompted: Bool[Array, "rows vocab"]  # whether the prompt contains a token
    bias: Float[Array, "rows vocab"]  # added to logits; -inf forbids a token


class DecodeArguments(NamedTuple):
    """Arguments of `decode` that change with every plan."""

    table: Int[Array, "rows blocks"]
    starts: Int[Array, " rows"]  # position of the first token to feed; -1: an idle row
    steps: Int[Array, " rows"]
    fed: Int[Array, "rows burst"]  # known tokens, which are fed before drawn tokens
    known: Int[Array, " rows"]  # number of known tokens
    keys: UInt32[Array, "rows 2"]
    sampling: Sampling  # each array is [rows, 1]
    presence: Float[Array, "rows 1"]
    frequency: Float[Array, "rows 1"]
    stops: Int[Array, "rows stops"]
    reports: Bool[Array, ""]  # whether any row wants log-probabilities
    adapters: Bool[Array, "rows rank"]  # the ranks of each row's adapter


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, and of the likeliest tokens at the same positions."""

    tokens: Float[Array, "*batch"]
    top_ids: Int[Array, "*batch top"]
    top: Float[Array, "*batch top"]


class Decoded(NamedTuple):
    """Tokens that `decode` drew, with their log-probabilities if `DecodeArguments.reports` was set, otherwise zeros."""

    tokens: Int[Array, "burst rows"]
    logprobs: Logprobs


class Pooled(NamedTuple):
    """Final hidden states of a chunk, after the last norm, in float32. Zeros if the request does not ask for an
    embedding.
    """

    last: Float[Array, " dim"]  # of the last token
    total: Float[Array, " dim"]  # the sum over all tokens


class Prefilled(NamedTuple):
    """Results of `prefill` for a request that asks for them, otherwise zeros."""

    logprobs: Logprobs
    pooled: Pooled


def empty_state(config: Config, sizes: ProgramSizes) -> State:
    """Make a state with an empty cache."""
    shape = (sizes.width, config.vocab)
    zeros: Any = [jax.device_put(np.zeros(shape, dtype)) for dtype in (np.int32, np.bool_, np.float32)]
    return State(empty_pages(config, pages=sizes.pages, page=sizes.page, dtype=sizes.cache_dtype), *zeros)


def prefill(
    params: Params,
    state: State,
    tokens: Int[Array, "1 chunk"],
    start: Int[Array, " 1"],
    count: Int[Array, " 1"],
    table: Int[Array, "1 blocks"],
    targets: Int[Array, " chunk"],
    reports: Bool[Array, ""],
    embeds: Bool[Array, ""],
    adapter: Bool[Array, "1 rank"],
    *,
    config: Config,
    ops: Ops,
) -> tuple[State, Prefilled]:
    """Compute keys and values of the first `count` of `tokens`, at positions from `start` on.

    If `reports` is set, also computes the log-probabilities of `targets` (the token after each of `tokens`). If
    `embeds` is set, also pools the hidden states of the chunk. `adapter` has the ranks of the request's adapter.
    """
    params = with_chosen(params, adapter)
    layers = [LayerPages(k, v, table) for k, v in state.pages]
    x, cache = hidden_states(params, tokens, Cache(layers, start), lengths=count, config=config, ops=ops)

    def report(x: Array) -> Logprobs:
        return logprobs(ops.norm_logits(x, params, config=config)[0], targets)

    def pool(x: Array) -> Pooled:
        normed = final_norm(x, params, config=config)[0].astype(jnp.float32)  # [chunk, dim]
        exists = jnp.arange(len(normed)) < count
        return Pooled(normed[count[0] - 1], jnp.sum(jnp.where(exists[:, None], normed, 0), axis=0))

    nothing = Pooled(*(jnp.zeros(config.dim) for _ in Pooled._fields))
    target_logprobs = lax.cond(reports, report, lambda x: no_logprobs(targets.shape), x)
    pooled = lax.cond(embeds, pool, lambda x: nothing, x)
    return state._replace(pages=_without_table(cache)), Prefilled(target_logprobs, pooled)


def decode(
    params: Params,
    state: State,
    rows: DecodeArguments,
    *,
    config: Config,
    ops: Ops,
) -> tuple[State, Decoded]:
    """Feed each row one token per step: first its known tokens, then the token that it drew in the previous step.

    A row ends early if it draws one of its stop tokens, or if its logits are NaN. For NaN, the result has the number
    `vocab` in place of a token id. The loop ends once every row has ended.
    """
    params = with_chosen(params, rows.adapters)
    width, burst = rows.fed.shape
    ids = jnp.arange(width)

    def active(i: Array, done: Array) -> Array:
        return (rows.starts >= 0) & (i < rows.steps) & ~done

    def step(loop):
        i, tokens, done, state, drawn = loop
        # The barrier makes the weights depend on the loop. Without it, XLA would convert all narrow weights before the
        # loop.
        weights, tokens = lax.optimization_barrier((params, tokens))
        goes_on = active(i, done)
        layers = [LayerPages(k, v, rows.table) for k, v in state.pages]
        cache = Cache(layers, jnp.where(goes_on, rows.starts + i, -1))
        x, cache = hidden_states(weights, tokens[:, None], cache, config=config, ops=ops)
        raw = ops.norm_logits(x[:, 0], weights, config=config)
        chosen = sample_by_row(adjusted(raw, state, rows), rows.keys, rows.starts + i + 1, rows.sampling)
        again = i + 1 < rows.known  # whether the next token to feed is known
        after = rows.fed[:, jnp.minimum(i + 1, burst - 1)]
        tokens = jnp.where(again, after, chosen)
        counts = state.counts.at[ids, tokens].add(goes_on, mode="drop")
        ends = jnp.any(tokens[:, None] == rows.stops, axis=1) | (tokens == config.vocab)
        state = state._replace(pages=_without_table(cache), counts=counts)
        token_logprobs = lax.cond(rows.reports, lambda: logprobs(raw, tokens), lambda: no_logprobs(tokens.shape))
        write = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        drawn = jax.tree.map(lambda steps, new: write(steps, new), drawn, Decoded(tokens, token_logprobs))
        return i + 1, tokens, done | (goes_on & ~again & ends), state, drawn

    drawn = Decoded(jnp.zeros((burst, width), jnp.int32), no_logprobs((burst, width)))
    start = (jnp.int32(0), rows.fed[:, 0], jnp.zeros(width, bool), state, drawn)
    _, _, _, state, drawn = lax.while_loop(lambda loop: jnp.any(active(loop[0], loop[2])), step, start)
    return state, drawn


def adjusted(logits: Float[Array, "rows vocab"], state: State, rows: DecodeArguments) -> Float[Array, "rows vocab"]:
    """Apply penalties and bias. The logits of a row with neither stay the same, bit for bit."""
    logits = penalize(logits, state.prompted | (state.counts > 0), rows.sampling.repetition_penalty)
    logits = logits - rows.presence * (state.counts > 0) - rows.frequency * state.counts
    return logits + state.bias


def logprobs(logits: Float[Array, "n vocab"], tokens: Int[Array, " n"]) -> Logprobs:
    """Compute the log-probabilities of `tokens`, and of the likeliest tokens at each position."""
    distribution = jax.nn.log_softmax(logits)
    top, top_ids = lax.top_k(distribution, min(MOST_LOGPROBS, logits.shape[-1]))
    return Logprobs(jnp.take_along_axis(distribution, tokens[:, None], 1)[:, 0], *_padded(top_ids, top))


def no_logprobs(shape: Sequence[int]) -> Logprobs:
    """Return zeros in place of log-probabilities that no row asked for."""
    top = (*shape, MOST_LOGPROBS)
    return Logprobs(jnp.zeros(shape), jnp.zeros(top, jnp.int32), jnp.zeros(top))


def _padded(top_ids: Array, top: Array) -> tuple[Array, Array]:
    """Pad the last axis with zeros to `MOST_LOGPROBS` entries, if the vocabulary has fewer tokens."""
    missing = [(0, 0), (0, MOST_LOGPROBS - top.shape[-1])]
    return jnp.pad(top_ids, missing), jnp.pad(top, missing)


def set_row(
    state: State,
    row: Int[Array, ""],
    prompted: Bool[Array, " vocab"],
    bias: Float[Array, " vocab"],
    fresh: Bool[Array, ""],
) -> State:
    """Set the prompt tokens and the bias of a row. If `fresh` is set, also resets the row's token counts."""
    counts = jnp.where(fresh, 0, state.counts[row])
    return state._replace(
        counts=state.counts.at[row].set(counts),
        prompted=state.prompted.at[row].set(prompted),
        bias=state.bias.at[row].set(bias),
    )


def _without_table(cache: Cache) -> list[tuple[Array, Array]]:
    return [(layer.k, layer.v) for layer in cache.layers]


class ServingPrograms(NamedTuple):
    """The compiled programs. Every program donates the state.

    The state is the second argument of `prefill` and `decode`, and the first argument of `set_row`.
    """

    prefill: Callable[..., tuple[State, Prefilled]]
    decode: Callable[..., tuple[State, Decoded]]
    set_row: Callable[..., State]


@runtime_checkable
class Spreads(Protocol):
    """A function that adapts a program for one device, and the shapes of its arguments, to several devices.

    It takes the program and the shapes, and returns both.
    """

    def __call__(self, run: Callable, arguments: Sequence[Any], /) -> tuple[Callable, Sequence[Any]]: ...


def compile_serving(
    params: Params, config: Config, *, ops: Ops, sizes: ProgramSizes, platform: str, spread: Spreads | None = None
) -> ServingPrograms:
    """Compile the programs for JAX's default device, or for several devices.

    `params` are arrays or shapes. For several devices, `params` and `config` describe the share of one device, and
    `spread` turns each program into a program for all devices. We turn autotuning off: otherwise two servers might
    choose different algorithms for a product, but servers with equal fingerprints must compute equal bits.
    """
    state = jax.eval_shape(partial(empty_state, config, sizes))
    options = untuned_options(platform)
    chunk, blocks, vocab = sizes.chunk, sizes.blocks, config.vocab
    flag = _shape(dtype=np.bool_)

    def compiled(program: Callable, *arguments: Any, donated: int, **fixed: Any) -> Any:
        run, shapes = (partial(program, **fixed), arguments)
        if spread:
            run, shapes = spread(run, arguments)
        return jax.jit(run, donate_argnums=donated).lower(*shapes).compile(options)

    number = _shape(1)
    adapter = _shape(1, sizes.rank, dtype=np.bool_)
    prompt = (_shape(1, chunk), number, number, _shape(1, blocks), _shape(chunk), flag, flag, adapter)
    fixed: dict[str, Any] = {"donated": 1, "config": config, "ops": ops}
    return ServingPrograms(
        compiled(prefill, params, state, *prompt, **fixed),
        compiled(decode, params, state, rows_shapes(sizes), **fixed),
        compiled(
            set_row, state, _shape(), _shape(vocab, dtype=np.bool_), _shape(vocab, dtype=np.float32), flag, donated=0
        ),
    )


def rows_shapes(sizes: ProgramSizes) -> DecodeArguments:
    """Return the shapes of the arrays in `DecodeArguments`."""
    width, column, real = sizes.width, (sizes.width, 1), np.float32
    sampling: Any = Sampling(*(_shape(*column, dtype=value.dtype) for value in as_arrays(SamplingOptions())))
    rows: Any = DecodeArguments(
        table=_shape(width, sizes.blocks),
        starts=_shape(width),
        steps=_shape(width),
        fed=_shape(width, sizes.burst),
        known=_shape(width),
        keys=_shape(width, 2, dtype=np.uint32),
        sampling=sampling,
        presence=_shape(*column, dtype=real),
        frequency=_shape(*column, dtype=real),
        stops=_shape(width, MOST_STOPS),
        reports=_shape(dtype=np.bool_),
        adapters=_shape(width, sizes.rank, dtype=np.bool_),
    )
    return rows


def _shape(*dimensions: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(dimensions, dtype)
