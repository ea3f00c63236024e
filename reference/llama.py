r"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971; https://arxiv.org/abs/2407.21783): the whole model.

A token's embedding passes through blocks, each of which adds to it twice,

    x <- x + W_o attention(rope(W_q n), rope(W_k n), W_v n)        n = rmsnorm(x)
    x <- x + W_down swiglu(W_gate n, W_up n)                       n = rmsnorm(x)

and becomes one logit per token of the vocabulary: W_head rmsnorm(x). Keys and values of a position
never change once computed, since no position sees a later one: they are kept in a cache, and a
forward pass is given only the tokens that are new.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from reference.add import add
from reference.attention import attention, causal_mask
from reference.config import Config
from reference.embedding import embedding
from reference.linear import linear
from reference.moe import moe
from reference.qk_norm import qk_norm
from reference.rmsnorm import rmsnorm
from reference.rope import frequencies, rope_halves
from reference.swiglu import swiglu


class Linear(NamedTuple):
    weight: Float[np.ndarray, "rows cols"]
    bias: Float[np.ndarray, " rows"] | None = None


class FeedForward(NamedTuple):
    gate: Linear
    up: Linear
    down: Linear


class Experts(NamedTuple):
    router: Float[np.ndarray, "experts dim"]
    gate: Float[np.ndarray, "experts ffn dim"]
    up: Float[np.ndarray, "experts ffn dim"]
    down: Float[np.ndarray, "experts dim ffn"]


class Layer(NamedTuple):
    attention_norm: Float[np.ndarray, " dim"]
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Float[np.ndarray, " head_dim"] | None
    k_norm: Float[np.ndarray, " head_dim"] | None
    ffn_norm: Float[np.ndarray, " dim"]
    ffn: FeedForward | Experts


class Params(NamedTuple):
    embedding: Float[np.ndarray, "vocab dim"]
    layers: Sequence[Layer]
    norm: Float[np.ndarray, " dim"]
    head: Float[np.ndarray, "vocab dim"]  # the embedding again, where the two are tied


class LayerCache(NamedTuple):
    """Keys (after RoPE) and values of the positions so far."""

    k: Float[np.ndarray, "keys kv_heads head_dim"]
    v: Float[np.ndarray, "keys kv_heads head_dim"]


Cache = Sequence[LayerCache]
Keep = Callable[[np.ndarray], np.ndarray]  # what a cache makes of the keys or values that are put into it


def exactly(x: Float[np.ndarray, "seq kv_heads head_dim"]) -> Float[np.ndarray, "seq kv_heads head_dim"]:
    """Keep them as they are. Others, as `quantizers.kv_cache`, are what attention reads even of the newest."""
    return x


def empty_cache(config: Config) -> Cache:
    """A cache of no positions."""
    nothing = np.zeros((0, config.kv_heads, config.head_dim))
    return [LayerCache(nothing, nothing)] * config.layers


def attend(
    x: Float[np.ndarray, "seq dim"],
    layer: Layer,
    cache: LayerCache,
    *,
    window: int | None,
    config: Config,
    keep: Keep = exactly,
) -> tuple[Float[np.ndarray, "seq dim"], LayerCache]:
    """The attention half of a block, and the cache with the new positions appended."""
    offset, seq = len(cache.k), len(x)
    n = rmsnorm(x, layer.attention_norm, eps=config.eps)
    q = linear(n, *layer.q).reshape(seq, config.heads, config.head_dim)
    k = linear(n, *layer.k).reshape(seq, config.kv_heads, config.head_dim)
    v = linear(n, *layer.v).reshape(seq, config.kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk_norm(q, k, layer.q_norm, layer.k_norm, eps=config.eps)
    turns = frequencies(config.head_dim, theta=config.theta, scaling=config.scaling)
    positions = offset + np.arange(seq)
    q, k = rope_halves(q, positions, turns), rope_halves(k, positions, turns)
    cache = LayerCache(np.concatenate([cache.k, keep(k)]), np.concatenate([cache.v, keep(v)]))
    h = attention(q, cache.k, cache.v, causal_mask(seq, offset + seq, offset=offset, window=window))
    return add(x, linear(h.reshape(seq, config.heads * config.head_dim), *layer.o)), cache


def feed_forward(x: Float[np.ndarray, "seq dim"], layer: Layer, *, config: Config) -> Float[np.ndarray, "seq dim"]:
    """The feed-forward half of a block: one layer, or some of many experts."""
    n = rmsnorm(x, layer.ffn_norm, eps=config.eps)
    if isinstance(layer.ffn, Experts):
        chosen, renormalized = config.experts_per_token, config.renormalize_experts
        return add(x, moe(n, *layer.ffn, experts_per_token=chosen, renormalized=renormalized))
    gate, up, down = layer.ffn
    return add(x, linear(swiglu(linear(n, *gate), linear(n, *up)), *down))


def hidden_states(
    params: Params, tokens: Int[np.ndarray, " seq"], cache: Cache, *, config: Config, keep: Keep = exactly
) -> tuple[Float[np.ndarray, "seq dim"], Cache]:
    """What the blocks make of new `tokens` that follow those in `cache`, and the cache that now holds both."""
    x = embedding(tokens, params.embedding)
    extended = []
    for i, (layer, layer_cache) in enumerate(zip(params.layers, cache, strict=True)):
        x, layer_cache = attend(x, layer, layer_cache, window=config.window(i), config=config, keep=keep)
        x = feed_forward(x, layer, config=config)
        extended.append(layer_cache)
    return x, extended


def unembed(params: Params, x: Float[np.ndarray, "*batch dim"], *, config: Config) -> Float[np.ndarray, "*batch vocab"]:
    """One logit per token of the vocabulary for each hidden state."""
    return linear(rmsnorm(x, params.norm, eps=config.eps), params.head)


def forward(
    params: Params, tokens: Int[np.ndarray, " seq"], cache: Cache, *, config: Config, keep: Keep = exactly
) -> tuple[Float[np.ndarray, "seq vocab"], Cache]:
    """Logits for what follows each of `tokens`, in float64, and the cache that now holds them too."""
    x, cache = hidden_states(params, tokens, cache, config=config, keep=keep)
    return unembed(params, x, config=config), cache


def greedy(params: Params, prompt: Int[np.ndarray, " seq"], *, config: Config) -> Iterator[int]:
    """Continue `prompt` with the most probable token, again and again (the lowest id on ties)."""
    tokens, cache = prompt, empty_cache(config)
    while True:
        x, cache = hidden_states(params, tokens, cache, config=config)
        token = int(np.argmax(unembed(params, x[-1], config=config)))
        yield token
        tokens = np.array([token])
