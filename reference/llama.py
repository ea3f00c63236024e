r"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971; https://arxiv.org/abs/2407.21783): the whole model.

x is a token's embedding. It passes through the blocks, and each block adds to x twice,

    x <- x + W_o attention(rope(W_q n), rope(W_k n), W_v n)        n = rmsnorm(x)
    x <- x + W_down swiglu(W_gate n, W_up n)                       n = rmsnorm(x)

After the last block, W_head rmsnorm(x) gives one logit per token of the vocabulary. The shapes are:

    x, n  [seq, dim]          W_q n  [seq, heads head_dim]         W_k n, W_v n  [seq, kv_heads head_dim]
    W_gate n, W_up n  [seq, ffn]                                   logits  [seq, vocab]

The keys and values of a position never change, because no position sees a later one. So we keep them in
a cache [keys, kv_heads, head_dim], and a forward pass only takes the new tokens.

Other model families set switches in the last part of `Config`. With all of them, a block is

    x <- x + r rmsnorm(W_o attention(...))        x <- x + r rmsnorm(W_down (act(W_gate n) W_up n))

Here r is `residual_scale`. The first x is `embedding_scale` times the embedding. Logits are divided by
`logit_divisor`, and then become c tanh(logits / c), with `logit_cap` as c. Every rmsnorm may be a layernorm, and a
layer without a gate adds W_down act(W_up n). In a parallel block (Chowdhery et al., 2022,
https://arxiv.org/abs/2204.02311) one n feeds both halves: x <- x + W_o attention(...) + W_down (act(W_gate n) W_up n).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.add import add
from llamaspec.reference.attention import attention_weights, causal_mask, weighted
from llamaspec.reference.capped import capped
from llamaspec.reference.clamped_swiglu import clamped_swiglu
from llamaspec.reference.config import Config
from llamaspec.reference.embedding import embedding
from llamaspec.reference.geglu import geglu
from llamaspec.reference.gelu import gelu
from llamaspec.reference.layernorm import layernorm
from llamaspec.reference.linear import linear
from llamaspec.reference.moe import Biases, moe, shared_expert
from llamaspec.reference.qk_norm import head_qk_norm, qk_norm, wide_qk_norm
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import Rotation, rotated
from llamaspec.reference.squared_relu import squared_relu
from llamaspec.reference.swiglu import swiglu

# Functions of a feed-forward layer: of gate and up, or only of up if there is no gate.
GATED = {"silu": swiglu, "gelu_tanh": geglu, "clamped_silu": clamped_swiglu}
UNGATED = {"gelu_tanh": gelu, "relu2": squared_relu}


class Linear(NamedTuple):
    weight: Float[np.ndarray, "rows cols"]
    bias: Float[np.ndarray, " rows"] | None = None


class FeedForward(NamedTuple):
    gate: Linear | None  # None: no gate
    up: Linear
    down: Linear


class Experts(NamedTuple):
    router: Float[np.ndarray, "experts dim"]
    gate: Float[np.ndarray, "experts ffn dim"]
    up: Float[np.ndarray, "experts ffn dim"]
    down: Float[np.ndarray, "experts dim ffn"]
    biases: Biases | None = None


class SharedExpert(NamedTuple):
    """The expert that every token uses."""

    score: Float[np.ndarray, "one dim"]
    gate: Float[np.ndarray, "shared dim"]
    up: Float[np.ndarray, "shared dim"]
    down: Float[np.ndarray, "dim shared"]


class Layer(NamedTuple):
    attention_norm: Float[np.ndarray, " dim"] | None  # None: no norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Float[np.ndarray, " q_width"] | None  # of a head, or of all heads joined
    k_norm: Float[np.ndarray, " k_width"] | None
    ffn_norm: Float[np.ndarray, " dim"] | None  # the same as attention's in a parallel block
    ffn: FeedForward | Experts
    attention_post_norm: Float[np.ndarray, " dim"] | None = None
    ffn_post_norm: Float[np.ndarray, " dim"] | None = None
    shared: SharedExpert | None = None
    attention_norm_bias: Float[np.ndarray, " dim"] | None = None  # of a LayerNorm
    ffn_norm_bias: Float[np.ndarray, " dim"] | None = None
    sinks: Float[np.ndarray, " heads"] | None = None


class Params(NamedTuple):
    embedding: Float[np.ndarray, "vocab dim"]
    layers: Sequence[Layer]
    norm: Float[np.ndarray, " dim"]
    head: Float[np.ndarray, "vocab dim"]  # the embedding, if the two are tied
    norm_bias: Float[np.ndarray, " dim"] | None = None  # of a LayerNorm


class LayerCache(NamedTuple):
    """Keys (after RoPE) and values of the positions so far."""

    k: Float[np.ndarray, "keys kv_heads head_dim"]
    v: Float[np.ndarray, "keys kv_heads head_dim"]

    def append(
        self, k: Float[np.ndarray, "seq kv_heads head_dim"], v: Float[np.ndarray, "seq kv_heads head_dim"]
    ) -> "LayerCache":
        """Append the keys and values of new positions. (`quantizers.kv_cache.Int8Cache` rounds them.)

        >>> LayerCache(np.zeros((3, 1, 2)), np.zeros((3, 1, 2))).append(np.ones((1, 1, 2)), np.ones((1, 1, 2))).k.shape
        (4, 1, 2)
        """
        return LayerCache(np.concatenate([self.k, k]), np.concatenate([self.v, v]))


Cache = Sequence[LayerCache]


def empty_cache(config: Config) -> Cache:
    """Make a cache without positions.

    >>> config = Config(dim=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=9, vocab=9, context=5, eps=0.0, theta=1.0)
    >>> [layer.k.shape for layer in empty_cache(config)]
    [(0, 2, 2), (0, 2, 2)]
    """
    empty = np.zeros((0, config.kv_heads, config.head_dim))
    return [LayerCache(empty, empty)] * config.layers


def attend(
    x: Float[np.ndarray, "seq dim"],
    layer: Layer,
    cache: LayerCache,
    *,
    window: int | None,
    config: Config,
    rotation: Rotation | None = None,
) -> tuple[Float[np.ndarray, "seq dim"], LayerCache]:
    """Compute the attention half of a block. Returns its output, and the cache with the new positions appended.

    `rotation` is this layer's rotation. None means the model's usual rotation.

    The first token sees only itself. With W_v = W_o = 1, its normalized vector is added to it:

    >>> config = Config(dim=2, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=2, vocab=2, context=9, eps=0.0, theta=1e4)
    >>> g, zero, one = np.ones(2), Linear(np.zeros((2, 2))), Linear(np.eye(2))
    >>> layer = Layer(g, zero, zero, one, one, None, None, g, FeedForward(one, one, one))
    >>> y, cache = attend(np.array([[3.0, 4.0]]), layer, empty_cache(config)[0], window=None, config=config)
    >>> y.round(4), cache.v.round(4).tolist()
    (array([[3.8485, 5.1314]]), [[[0.8485, 1.1314]]])
    """
    offset, seq = len(cache.k), len(x)
    n = apply_norm(x, layer.attention_norm, layer.attention_norm_bias, config=config)
    q = linear(n, *layer.q).reshape(seq, config.heads, config.head_dim)
    k = linear(n, *layer.k).reshape(seq, config.kv_heads, config.head_dim)
    v = linear(n, *layer.v).reshape(seq, config.kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        norm = head_qk_norm if config.head_qk_norm else wide_qk_norm if config.wide_qk_norm else qk_norm
        q, k = norm(q, k, layer.q_norm, layer.k_norm, eps=config.eps)
    rotation = rotation or config.rotation()
    positions = offset + np.arange(seq)
    q, k = rotated(q, positions, rotation), rotated(k, positions, rotation)
    cache = cache.append(k, v)
    mask = causal_mask(seq, offset + seq, offset=offset, window=window)
    scale, cap = config.attention_scale, config.attention_cap
    p = attention_weights(q, cache.k, mask, scale=scale, cap=cap, sinks=layer.sinks)
    h = weighted(p, cache.v)
    added = linear(h.reshape(seq, config.heads * config.head_dim), *layer.o)
    return _joined(x, added, layer.attention_post_norm, config=config), cache


def feed_forward(
    x: Float[np.ndarray, "seq dim"],
    layer: Layer,
    *,
    config: Config,
    before: Float[np.ndarray, "seq dim"] | None = None,
) -> Float[np.ndarray, "seq dim"]:
    """Compute the feed-forward half of a block (one layer, or the chosen experts), and add the result to x.

    `before` is the input of the attention half. In a parallel block it is the input of this half, too.

    With W_gate = W_up = W_down = 1 and the normalized vector n = (0.8485, 1.1314), it adds silu(n) n:

    >>> config = Config(dim=2, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=2, vocab=2, context=9, eps=0.0, theta=1e4)
    >>> g, one = np.ones(2), Linear(np.eye(2))
    >>> layer = Layer(g, one, one, one, one, None, None, g, FeedForward(one, one, one))
    >>> feed_forward(np.array([[3.0, 4.0]]), layer, config=config).round(4)
    array([[3.5042, 4.9678]])
    """
    norm_input = before if config.parallel_residual and before is not None else x
    n = apply_norm(norm_input, layer.ffn_norm, layer.ffn_norm_bias, config=config)
    if isinstance(layer.ffn, Experts):
        *matrices, biases = layer.ffn
        chosen, renormalized = config.experts_per_token, config.renormalize_experts
        added = moe(
            n,
            *matrices,
            experts_per_token=chosen,
            renormalized=renormalized,
            biases=biases,
            gated=GATED[config.activation],
        )
        return add(x, added if layer.shared is None else add(added, shared_expert(n, *layer.shared)))
    gate, up, down = layer.ffn
    if gate is None:
        hidden = UNGATED[config.activation](linear(n, *up))
    else:
        hidden = GATED[config.activation](linear(n, *gate), linear(n, *up))
    added = linear(hidden, *down)
    return _joined(x, added, layer.ffn_post_norm, config=config)


def apply_norm(
    x: Float[np.ndarray, "*batch dim"],
    weight: Float[np.ndarray, " dim"] | None,
    bias: Float[np.ndarray, " dim"] | None = None,
    *,
    config: Config,
) -> Float[np.ndarray, "*batch dim"]:
    """Apply the model's kind of norm to `x`. Without a weight (None), return `x`."""
    if weight is None:
        return x
    return layernorm(x, weight, bias, eps=config.eps) if config.layer_norm else rmsnorm(x, weight, eps=config.eps)


def _joined(x: np.ndarray, added: np.ndarray, norm: np.ndarray | None, *, config: Config) -> np.ndarray:
    """Normalize and scale the output `added` of half a block, and add it to the residual stream `x`."""
    return add(x, config.residual_scale * apply_norm(added, norm, config=config))


def map_arrays(part: Any, function: Callable[[np.ndarray], Any]) -> Any:
    """Apply a function to every array in a named tuple of arrays, such as a `Layer`. None stays None.

    >>> map_arrays(Linear(np.ones(2), None), lambda array: 2 * array)
    Linear(weight=array([2., 2.]), bias=None)
    """
    if isinstance(part, np.ndarray):
        return function(part)
    return type(part)(*(map_arrays(member, function) for member in part)) if isinstance(part, tuple) else part


def hidden_states(
    params: Params, tokens: Int[np.ndarray, " seq"], cache: Cache, *, config: Config
) -> tuple[Float[np.ndarray, "seq dim"], Cache]:
    """Compute the output of the last block for `tokens`, which follow the positions in `cache`.

    Also returns the cache with the new positions appended."""
    x = config.embedding_scale * embedding(tokens, params.embedding)
    extended = []
    for i, (layer, layer_cache) in enumerate(zip(params.layers, cache, strict=True)):
        window, rotation = config.window(i), config.rotation(i)
        y, layer_cache = attend(x, layer, layer_cache, window=window, config=config, rotation=rotation)
        x = feed_forward(y, layer, config=config, before=x)
        extended.append(layer_cache)
    return x, extended


def unembed(params: Params, x: Float[np.ndarray, "*batch dim"], *, config: Config) -> Float[np.ndarray, "*batch vocab"]:
    """Compute the logits of each hidden state, one per token of the vocabulary."""
    logits = linear(apply_norm(x, params.norm, params.norm_bias, config=config), params.head) / config.logit_divisor
    return logits if config.logit_cap is None else capped(logits, cap=config.logit_cap)


def forward(
    params: Params, tokens: Int[np.ndarray, " seq"], cache: Cache, *, config: Config
) -> tuple[Float[np.ndarray, "seq vocab"], Cache]:
    """Compute the logits after each of `tokens`, in float64, and the cache with the new positions appended.

    In this model with two tokens, the layer adds nothing, because its matrices are 0:

    >>> config = Config(dim=2, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=2, vocab=2, context=9, eps=0.0, theta=1e4)
    >>> ones, zero = np.ones(2), Linear(np.zeros((2, 2)))
    >>> layer = Layer(ones, zero, zero, zero, zero, None, None, ones, FeedForward(zero, zero, zero))
    >>> params = Params(np.array([[3.0, 4.0], [1.0, 7.0]]), [layer], ones, np.array([[5.0, 0.0], [0.0, 5.0]]))
    >>> logits, cache = forward(params, np.array([0, 1]), empty_cache(config), config=config)
    >>> logits * np.sqrt(12.5)  # a token's vector divided by the root of its mean square, 12.5 or 25
    array([[15.        , 20.        ],
           [ 3.53553391, 24.74873734]])

    One token at a time gives the same logits as all at once:

    >>> first, cache = forward(params, np.array([0]), empty_cache(config), config=config)
    >>> second, cache = forward(params, np.array([1]), cache, config=config)
    >>> np.array_equal(np.concatenate([first, second]), logits), len(cache[0].k)
    (True, 2)
    """
    x, cache = hidden_states(params, tokens, cache, config=config)
    return unembed(params, x, config=config), cache


def greedy(params: Params, prompt: Int[np.ndarray, " seq"], *, config: Config) -> Iterator[int]:
    """Continue `prompt`, always with the most probable token (the lowest id on ties).

    This model without layers counts modulo 3. Its head maps each number's vector to the next number:

    >>> config = Config(dim=3, layers=0, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=3, context=9, eps=0.0, theta=1.0)
    >>> counting = Params(np.eye(3), [], np.ones(3), np.roll(np.eye(3), 1, axis=0))
    >>> numbers = greedy(counting, np.array([0]), config=config)
    >>> [next(numbers) for _ in range(4)]
    [1, 2, 0, 1]
    """
    tokens, cache = prompt, empty_cache(config)
    while True:
        x, cache = hidden_states(params, tokens, cache, config=config)
        token = int(np.argmax(unembed(params, x[-1], config=config)))
        yield token
        tokens = np.array([token])
