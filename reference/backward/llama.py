r"""The gradient of a whole Llama: the backward functions of its layers, in reverse order.

A block adds to the residual stream twice, x <- x + f(x). The gradient after each addition therefore goes back on two
paths: unchanged around f, and through f:

    dx = dy + (df/dx)^T dy

So a gradient can reach the first block without passing through any matrix. That is why deep stacks of residual blocks
can learn. The forward pass keeps every value that the backward pass needs. To save memory, training may recompute some
of them instead (Chen et al., 2016, https://arxiv.org/abs/1604.06174).

Elastic depth trains a model so that its first d blocks are a good model, too, for each d in a set D. The norm and the
head turn the residual stream x_d after block d into logits l_d, and the loss is the mean over D of the cross entropies:

    l_d = W_head rmsnorm(x_d)        loss = 1 / |D| sum_(d in D) cross entropy(l_d)

So dx_d receives one more term for each d in D, and a block learns from all models that contain it. The idea is from
Once-for-All (Cai et al., 2020, https://arxiv.org/abs/1908.09791) and LayerSkip (Elhoushi et al., 2024,
https://arxiv.org/abs/2404.16710).
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.backward.attention import attention_backward
from llamaspec.reference.backward.embedding import embedding_backward
from llamaspec.reference.backward.linear import linear_backward
from llamaspec.reference.backward.moe import moe_backward
from llamaspec.reference.backward.qk_norm import qk_norm_backward
from llamaspec.reference.backward.rmsnorm import rmsnorm_backward
from llamaspec.reference.backward.rope import rope_halves_backward
from llamaspec.reference.backward.swiglu import swiglu_backward
from llamaspec.reference.config import Config
from llamaspec.reference.embedding import embedding
from llamaspec.reference.linear import linear
from llamaspec.reference.llama import Experts, Layer, Linear, Params, feed_forward
from llamaspec.reference.losses import cross_entropy, cross_entropy_backward
from llamaspec.reference.qk_norm import qk_norm
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import rotated
from llamaspec.reference.swiglu import swiglu


class AttentionValues(NamedTuple):
    """Values that the forward pass of attention saves for the backward pass."""

    x: Float[np.ndarray, "seq dim"]
    normed: Float[np.ndarray, "seq dim"]
    raw_q: Float[np.ndarray, "seq heads head_dim"]  # before the norms of queries and keys
    raw_k: Float[np.ndarray, "seq kv_heads head_dim"]
    q: Float[np.ndarray, "seq heads head_dim"]  # after RoPE
    k: Float[np.ndarray, "seq kv_heads head_dim"]
    v: Float[np.ndarray, "seq kv_heads head_dim"]
    mask: Float[np.ndarray, "seq seq"]
    heads: Float[np.ndarray, "seq width"]  # the output of attention, all heads joined


def loss_and_gradient(
    params: Params,
    tokens: Int[np.ndarray, " seq"],
    weights: Float[np.ndarray, " seq"],
    *,
    config: Config,
    depths: Collection[int] | None = None,
) -> tuple[float, Params]:
    """Compute the cross entropy of `tokens`, and the gradient of this loss for every weight of the model.

    Each token is predicted from the earlier tokens, and `weights[i]` multiplies the loss of `tokens[i]`. The first
    token is not predicted, so `weights[0]` is not used. The gradient has the shape of `params`. If the head is tied,
    `head` and `embedding` have separate parts, and the gradient of the shared matrix is their sum. `depths` is the set
    D of elastic depth; None: only the whole model. Raises ValueError if `config` turns on a feature that no Llama model
    has (`Config.beyond_llama`).

    This model has no layers and a head of zeros, so both ids are equally likely:

    >>> config = Config(dim=2, layers=0, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=2, context=9, eps=0.0, theta=1.0)
    >>> params = Params(np.eye(2), [], np.ones(2), np.zeros((2, 2)))
    >>> loss, slopes = loss_and_gradient(params, np.array([0, 1]), np.ones(2), config=config)
    >>> round(loss, 4), slopes.head.round(4).tolist()  # log 2, and (p - e_1) n^T for the normalized vector n
    (0.6931, [[0.7071, 0.0], [-0.7071, 0.0]])
    """
    config.check_llama("gradients")
    chosen = {config.layers} if depths is None else set(depths)
    states, saved = [embedding(tokens, params.embedding)], []
    for i, layer in enumerate(params.layers):
        values = _attend(states[-1], layer, window=config.window(i), config=config)
        middle = states[-1] + linear(values.heads, *layer.o)
        saved.append((values, middle))
        states.append(feed_forward(middle, layer, config=config))

    loss, dx, dnorm, dhead = 0.0, np.zeros_like(states[0]), np.zeros(config.dim), np.zeros(params.head.shape)
    layers = []
    for depth in range(config.layers, -1, -1):
        if depth in chosen:
            more, *slopes = _prediction_backward(states[depth], params, tokens, weights / len(chosen), config=config)
            loss, dx, dnorm, dhead = loss + more, *(a + b for a, b in zip((dx, dnorm, dhead), slopes, strict=True))
        if depth == 0:
            break
        layer, (values, middle) = params.layers[depth - 1], saved[depth - 1]
        through, ffn_norm, ffn = _feed_forward_backward(middle, layer, dx, config=config)
        dx = dx + through
        through, slopes = _attend_backward(values, layer, dx, config=config)
        dx = dx + through
        layers.append(slopes._replace(ffn_norm=ffn_norm, ffn=ffn))
    return loss, Params(embedding_backward(tokens, dx, vocab=config.vocab), layers[::-1], dnorm, dhead)


def _prediction_backward(
    x: np.ndarray, params: Params, tokens: np.ndarray, weights: np.ndarray, *, config: Config
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the cross entropy after the residual stream `x`, and its gradients for `x`, the norm and the head."""
    normed = rmsnorm(x, params.norm, eps=config.eps)
    logits = linear(normed, params.head)[:-1]  # the last token's logits predict a token that we do not have
    loss = cross_entropy(logits, tokens[1:], weights[1:])
    dlogits = np.concatenate([cross_entropy_backward(logits, tokens[1:], weights[1:]), np.zeros((1, config.vocab))])
    dnormed, dhead, _ = linear_backward(normed, params.head, dlogits)
    dx, dnorm = rmsnorm_backward(x, params.norm, dnormed, eps=config.eps)
    return loss, dx, dnorm, dhead


def _attend(x: np.ndarray, layer: Layer, *, window: int | None, config: Config) -> AttentionValues:
    """Compute `reference.llama.attend` without a cache: all steps before the output projection."""
    seq = len(x)
    assert layer.attention_norm is not None
    normed = rmsnorm(x, layer.attention_norm, eps=config.eps)
    raw_q, raw_k, v = (linear(normed, *w).reshape(seq, -1, config.head_dim) for w in (layer.q, layer.k, layer.v))
    q, k = raw_q, raw_k
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk_norm(q, k, layer.q_norm, layer.k_norm, eps=config.eps)
    q, k = (rotated(part, np.arange(seq), config.rotation()) for part in (q, k))
    mask = causal_mask(seq, seq, window=window)
    return AttentionValues(x, normed, raw_q, raw_k, q, k, v, mask, attention(q, k, v, mask).reshape(seq, -1))


def _attend_backward(
    saved: AttentionValues, layer: Layer, dy: np.ndarray, *, config: Config
) -> tuple[np.ndarray, Layer]:
    """Compute the gradient of attention for the block's input, and a `Layer` with the gradients for the weights."""
    seq = len(dy)
    dheads, o = _linear_backward(saved.heads, layer.o, dy)
    dq, dk, dv = attention_backward(saved.q, saved.k, saved.v, saved.mask, dheads.reshape(saved.q.shape))
    turns, length = config.rotation()
    dq, dk = (length * rope_halves_backward(a, np.arange(seq), turns) for a in (dq, dk))
    q_norm = k_norm = None
    if layer.q_norm is not None and layer.k_norm is not None:
        dq, dk, q_norm, k_norm = qk_norm_backward(
            saved.raw_q, saved.raw_k, layer.q_norm, layer.k_norm, dq, dk, eps=config.eps
        )
    by_q, q = _linear_backward(saved.normed, layer.q, dq.reshape(seq, -1))
    by_k, k = _linear_backward(saved.normed, layer.k, dk.reshape(seq, -1))
    by_v, v = _linear_backward(saved.normed, layer.v, dv.reshape(seq, -1))
    assert layer.attention_norm is not None
    dx, attention_norm = rmsnorm_backward(saved.x, layer.attention_norm, by_q + by_k + by_v, eps=config.eps)
    return dx, layer._replace(attention_norm=attention_norm, q=q, k=k, v=v, o=o, q_norm=q_norm, k_norm=k_norm)


def _feed_forward_backward(x: np.ndarray, layer: Layer, dy: np.ndarray, *, config: Config):
    """Compute the gradients for the input, the norm and the matrices of the feed-forward half."""
    assert layer.ffn_norm is not None
    normed = rmsnorm(x, layer.ffn_norm, eps=config.eps)
    if isinstance(layer.ffn, Experts):
        chosen, renormalized = config.experts_per_token, config.renormalize_experts
        assert layer.ffn.biases is None  # `check_llama`
        experts = layer.ffn[:4]
        dnormed, router, gate, up, down = moe_backward(
            normed, *experts, dy, experts_per_token=chosen, renormalized=renormalized
        )
        ffn = Experts(router, gate, up, down)
    else:
        assert layer.ffn.gate is not None  # `check_llama`
        gate, up = linear(normed, *layer.ffn.gate), linear(normed, *layer.ffn.up)
        dhidden, down = _linear_backward(swiglu(gate, up), layer.ffn.down, dy)
        dgate, dup = swiglu_backward(gate, up, dhidden)
        by_gate, gate_slope = _linear_backward(normed, layer.ffn.gate, dgate)
        by_up, up_slope = _linear_backward(normed, layer.ffn.up, dup)
        dnormed, ffn = by_gate + by_up, layer.ffn._replace(gate=gate_slope, up=up_slope, down=down)
    dx, ffn_norm = rmsnorm_backward(x, layer.ffn_norm, dnormed, eps=config.eps)
    return dx, ffn_norm, ffn


def _linear_backward(x: np.ndarray, linear: Linear, dy: np.ndarray) -> tuple[np.ndarray, Linear]:
    dx, weight, bias = linear_backward(x, linear.weight, dy)
    return dx, Linear(weight, None if linear.bias is None else bias)
