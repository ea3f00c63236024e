"""The model as functions over pytrees: five ops per block, with the same code for prefill and for decoding.

Tokens are `[batch, seq]`. Rows may have different lengths: `lengths` is the number of valid tokens of each row. The
tokens after them are padding, which later queries do not attend to.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from llamaspec.model.cache import Cache, LayerPages, LayerStore
from llamaspec.model.ops.block import join
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.sampling import Sampling, log_probabilities, sample
from llamaspec.model.weights.params import Layer, Params, Rope
from llamaspec.reference.config import Config


def hidden_states(
    params: Params,
    tokens: Int[Array, "batch seq"],
    cache: Cache,
    *,
    lengths: Int[Array, " batch"] | None = None,
    positions_within: Int[Array, "batch seq"] | None = None,
    config: Config,
    ops: Ops,
) -> tuple[Float[Array, "batch seq dim"], Cache]:
    """Compute the hidden states of `tokens`, which follow the tokens in `cache`, and a cache that also contains them.

    If rows hold several documents (see `training.packing`), `positions_within` has the position of each token in its
    document, and the cache must be empty. If it is None, the positions continue after those in the cache.

    The cache must have room for `seq` more positions in every row, padding included. If the cache is in pages, padding
    needs no room, and a row with length -1 in the cache is idle when decoding.
    """
    states, cache = residual_stream(
        params, tokens, cache, lengths=lengths, positions_within=positions_within, config=config, ops=ops
    )
    return states[-1], cache


def residual_stream(
    params: Params,
    tokens: Int[Array, "batch seq"],
    cache: Cache,
    *,
    lengths: Int[Array, " batch"] | None = None,
    positions_within: Int[Array, "batch seq"] | None = None,
    config: Config,
    ops: Ops,
) -> tuple[list[Float[Array, "batch seq dim"]], Cache]:
    """Return the embedded tokens and the output of each block, and the cache. See `hidden_states`."""
    positions = _positions(params.rope.cos, params.rope.sin, cache.lengths, tokens.shape[1])
    if positions_within is not None:
        positions = Positions(positions_within, *(table[positions_within] for table in params.rope[:2]))
    if lengths is not None and isinstance(cache.layers[0], LayerPages):
        counts = jnp.arange(tokens.shape[1]) < lengths[:, None]
        positions = positions._replace(at=jnp.where(counts, positions.at, -1))
    x = params.embedding[tokens]
    x = x if config.embedding_scale == 1 else (x.astype(jnp.float32) * config.embedding_scale).astype(x.dtype)
    states, layers = [x], []
    for i, (layer, layer_cache) in enumerate(zip(params.layers, cache.layers, strict=True)):
        at = _of_layer(positions, params.rope, i, config=config)
        x, layer_cache = _block(x, layer, layer_cache, at, window=config.window(i), config=config, ops=ops)
        states.append(x)
        layers.append(layer_cache)
    return states, Cache(layers, cache.lengths + (tokens.shape[1] if lengths is None else lengths))


# With `jit`, layers of equal shapes are traced and lowered only once. If all programs were compiled before, tracing
# takes most of the time of a start. XLA inlines the calls.
@partial(jax.jit, static_argnames=("window", "config", "ops"))
def _block(
    x: Float[Array, "batch seq dim"],
    layer: Layer,
    cache: LayerStore,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
    ops: Ops,
) -> tuple[Float[Array, "batch seq dim"], LayerStore]:
    q, cache = ops.norm_qkv(x, layer, cache, positions, config=config)
    attend = ops.attend if layer.sinks is None else partial(ops.attend, sinks=layer.sinks)
    h = attend(q, cache, positions, window=window, config=config)
    block_input, x = x, join(partial(ops.project_add, h, layer), x, layer.attention_post_norm, config=config)
    if config.experts:
        return ops.moe_add(x, layer, config=config), cache
    g = ops.norm_gate_up(block_input if config.parallel_residual else x, layer, config=config)
    return join(partial(ops.down_add, g, layer), x, layer.ffn_post_norm, config=config), cache


def forward(
    params: Params,
    tokens: Int[Array, "batch seq"],
    cache: Cache,
    *,
    lengths: Int[Array, " batch"] | None = None,
    positions_within: Int[Array, "batch seq"] | None = None,
    config: Config,
    ops: Ops,
) -> tuple[Float[Array, "batch seq vocab"], Cache]:
    """Compute float32 logits for the token after each of `tokens`, and the extended cache. See `hidden_states`."""
    x, cache = hidden_states(
        params, tokens, cache, lengths=lengths, positions_within=positions_within, config=config, ops=ops
    )
    return ops.norm_logits(x, params, config=config), cache


def prefill(
    params: Params,
    tokens: Int[Array, "batch seq"],
    cache: Cache,
    lengths: Int[Array, " batch"],
    *,
    config: Config,
    ops: Ops,
) -> Cache:
    """Append the first `lengths` tokens of each row to the cache.

    We compute no logits, because decoding starts by feeding the last token of the prompt.
    """
    return hidden_states(params, tokens, cache, lengths=lengths, config=config, ops=ops)[1]


class DecodeState(NamedTuple):
    """The state of decoding, except for the cache.

    These arrays stay on the device between calls of `decode`, so the next call can start before the host has read the
    tokens of the previous one.
    """

    tokens: Int[Array, " batch"]  # the newest token of each row, not fed yet
    seen: Bool[Array, "batch vocab"]  # whether the repetition penalty applies to a token
    done: Bool[Array, " batch"]  # whether the row has drawn a stop token
    # Log probabilities of the tokens that a call draws, if the caller passes an array for them; otherwise None.
    scores: Float[Array, "burst batch"] | None = None


def state_after(tokens: Int[np.ndarray, " batch"], seen: Bool[np.ndarray, "batch vocab"]) -> DecodeState:
    """Make the state before the first call of `decode`, on the default device.

    `tokens` has the newest token of each row.
    """
    return DecodeState(*jax.device_put((tokens.astype(np.int32), seen, np.zeros(len(tokens), bool))))


def decode(
    params: Params,
    text: DecodeState,
    cache: Cache,
    keys: UInt32[Array, "batch 2"],
    sampling: Sampling,
    stops: Int[Array, " stops"],
    steps: Int[Array, ""],
    *,
    greedy: bool,
    burst: int,
    config: Config,
    ops: Ops,
) -> tuple[Int[Array, "burst batch"], Int[Array, ""], DecodeState, Cache]:
    """Draw up to `steps` tokens for each row on the device. Each step feeds the newest token and draws the next one.

    If `greedy`, the next token is the likeliest one. Otherwise it is drawn with the row's random key from `keys`, and
    the temperature must not be 0. The loop ends once every row has drawn one of `stops`; if every row had done so
    before the call, the loop takes no step. Returns the tokens (zeros after the last step), the number of steps, the
    new state, and the cache, which contains all tokens except the newest of each row.
    """
    batch, ids = text.tokens.shape[0], jnp.arange(config.vocab, dtype=jnp.int32)

    def unfinished(state):
        step, _, _, _, _, done, _ = state
        return (step < steps) & ~jnp.all(done)

    # The work outside the layers is small, but on a GPU each operation is a kernel. So we compute lengths from the
    # step, update `seen` and `done` with one expression each, and do not check indices that cannot be out of range.
    def step(state):
        step, tokens, drawn, layers, seen, done, scores = state
        # The barrier makes the weights depend on the loop. Without it, XLA would convert weights of a narrow dtype to a
        # wider one before the loop.
        weights, tokens = lax.optimization_barrier((params, tokens))
        x, now = hidden_states(weights, tokens[:, None], Cache(layers, cache.lengths + step), config=config, ops=ops)
        logits = ops.norm_logits(x[:, 0], weights, config=config)
        tokens = sample(logits, seen, keys, now.lengths, sampling, greedy=greedy)
        seen, done = _updated(seen, done, tokens, ids, stops)
        drawn = lax.dynamic_update_slice(drawn, tokens[None], (step, 0))
        if scores is not None:
            own = log_probabilities(logits, tokens, sampling.temperature)
            scores = lax.dynamic_update_slice(scores, own[None], (step, 0))
        return step + 1, tokens, drawn, now.layers, seen, done, scores

    drawn = jnp.zeros((burst, batch), jnp.int32)
    start = (jnp.int32(0), text.tokens, drawn, cache.layers, text.seen, text.done, text.scores)
    steps_taken, tokens, drawn, layers, seen, done, scores = lax.while_loop(unfinished, step, start)
    return drawn, steps_taken, DecodeState(tokens, seen, done, scores), Cache(layers, cache.lengths + steps_taken)


def verify(
    params: Params,
    text: DecodeState,
    cache: Cache,
    keys: UInt32[Array, "1 2"],
    sampling: Sampling,
    stops: Int[Array, " stops"],
    draft: Int[Array, " drafts"],
    count: Int[Array, ""],
    *,
    greedy: bool,
    config: Config,
    ops: Ops,
) -> tuple[Int[Array, " steps"], Int[Array, ""], DecodeState, Cache]:
    """Feed the newest token and the first `count` tokens of `draft` in one pass, and draw the token after each of them.

    The sequence of draws ends with the first token that differs from the draft, with a stop token, or with the token
    after the whole draft. With the ops `by_token.BY_TOKEN`, the result (tokens, number of steps, state and cache)
    equals that of `decode` after the same number of steps. Rejected tokens leave keys and values after the cache's
    `lengths`, where the next tokens overwrite them.
    """
    ids = jnp.arange(config.vocab, dtype=jnp.int32)
    tokens = jnp.concatenate([text.tokens, draft])
    x, now = hidden_states(params, tokens[None], cache, config=config, ops=ops)
    logits = ops.norm_logits(x, params, config=config)[0]  # [drafts + 1, vocab]

    def draw(state):
        step, tokens, drawn, seen, done, _ = state
        position = cache.lengths + step + 1
        row = lax.dynamic_slice_in_dim(logits, step, 1)
        tokens = sample(row, seen, keys, position, sampling, greedy=greedy)
        seen, done = _updated(seen, done, tokens, ids, stops)
        drawn = lax.dynamic_update_slice(drawn, tokens, (step,))
        expected = lax.dynamic_index_in_dim(draft, jnp.minimum(step, len(draft) - 1), keepdims=False)
        accepted = (step < count) & (tokens[0] == expected) & ~done[0]
        return step + 1, tokens, drawn, seen, done, accepted

    start = (jnp.int32(0), text.tokens, jnp.zeros_like(tokens), text.seen, text.done, jnp.bool_(True))
    steps, newest, drawn, seen, done, _ = lax.while_loop(lambda state: state[-1], draw, start)
    return drawn, steps, DecodeState(newest, seen, done), Cache(now.layers, cache.lengths + steps)


def _updated(seen: Array, done: Array, tokens: Array, ids: Array, stops: Array) -> tuple[Array, Array]:
    """Add new `tokens` to `seen`, and the rows that drew one of `stops` to `done`."""
    return seen | (tokens[:, None] == ids), jnp.any(done[:, None] | (tokens[:, None] == stops), axis=1)


def _positions(cos: Array, sin: Array, starts: Int[Array, " batch"], seq: int) -> Positions:
    index = starts[:, None] + jnp.arange(seq, dtype=jnp.int32)
    return Positions(index, cos[index], sin[index])


def _of_layer(positions: Positions, rope: Rope, layer: int, *, config: Config) -> Positions:
    """Return the positions with the cosines and sines for RoPE in `layer`.

    Their angles come from `theta` or from `local_theta`. In a layer without RoPE, the angles are 0.
    """
    if not config.uses_rope(layer):
        return positions._replace(cos=jnp.ones_like(positions.cos), sin=jnp.zeros_like(positions.sin))
    if not config.is_local(layer):
        return positions
    assert rope.local_cos is not None and rope.local_sin is not None
    index = jnp.maximum(positions.at, 0)  # an idle row has position -1, and its result is not used
    return positions._replace(cos=rope.local_cos[index], sin=rope.local_sin[index])
