"""The ops of a transformer block in plain JAX. An op calls its parameter `product` for all matrix products."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.cache import LayerStore, extended
from llamaspec.model.ops.table import Mean, Positions, Product, Total
from llamaspec.model.weights.params import Experts, FeedForward, Layer, Linear, Params
from llamaspec.reference.config import Activation, Config

# The constants of `reference.clamped_swiglu`. We repeat them here, so that `model.ops` imports no layer of `reference`.
SLOPE, LIMIT = 1.702, 7.0


def norm_qkv(
    x: Float[Array, "batch seq dim"],
    layer: Layer,
    cache: LayerStore,
    positions: Positions,
    *,
    config: Config,
    product: Product,
    mean: Mean | None = None,
) -> tuple[Float[Array, "batch seq heads head_dim"], LayerStore]:
    """Normalize x, project it to q, k and v, and append k and v to the cache. See `table.NormQkv`."""
    n = apply_norm(x, layer.attention_norm, layer.attention_norm_bias, config=config)
    qkv = _linear(n, layer.qkv, product).reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(qkv, [config.heads, config.heads + config.kv_heads], axis=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _norm_of_heads(q, layer.q_norm, config=config, mean=mean)
        k = _norm_of_heads(k, layer.k_norm, config=config, mean=mean)
    q, k = rope(q, positions), rope(k, positions)
    return q.astype(x.dtype), extended(cache, k, v, positions.at)


def project_add(
    h: Float[Array, "batch seq width"],
    layer: Layer,
    x: Float[Array, "batch seq dim"],
    *,
    product: Product,
    total: Total | None = None,
) -> Float[Array, "batch seq dim"]:
    """Add the output projection of h to the residual stream."""
    return (x.astype(jnp.float32) + _linear(h, layer.o, product, total)).astype(x.dtype)


def norm_gate_up(
    x: Float[Array, "batch seq dim"], layer: Layer, *, config: Config, product: Product
) -> Float[Array, "batch seq ffn"]:
    """Normalize x, project it to gate and up, and apply SwiGLU or the model's other gate.

    If the model has no gate, apply the activation to up.
    """
    assert isinstance(layer.ffn, FeedForward)
    n = apply_norm(x, layer.ffn_norm, layer.ffn_norm_bias, config=config)
    hidden = _linear(n, layer.ffn.gate_up, product)
    g = _gated(hidden, config.activation) if config.gated else ACTIVATIONS[config.activation](hidden)
    return g.astype(x.dtype)


def down_add(
    g: Float[Array, "batch seq ffn"],
    layer: Layer,
    x: Float[Array, "batch seq dim"],
    *,
    product: Product,
    total: Total | None = None,
) -> Float[Array, "batch seq dim"]:
    """Add the down projection of g to the residual stream."""
    assert isinstance(layer.ffn, FeedForward)
    return (x.astype(jnp.float32) + _linear(g, layer.ffn.down, product, total)).astype(x.dtype)


def moe_add(
    x: Float[Array, "batch seq dim"], layer: Layer, *, config: Config, product: Product, total: Total | None = None
) -> Float[Array, "batch seq dim"]:
    """Normalize x, and add to the residual stream the weighted outputs of the experts that the router chooses.

    For one token, we read only the chosen experts. For several tokens, we read all experts, because almost every expert
    is chosen for some token. If the router does not choose an expert for a token, the expert's weight is 0.
    """
    assert isinstance(layer.ffn, Experts)
    n = apply_norm(x, layer.ffn_norm, layer.ffn_norm_bias, config=config)
    p = jax.nn.softmax(_linear(n, Linear(layer.ffn.router, layer.ffn.router_bias), product), axis=-1)  # of all experts
    weights, chosen = lax.top_k(p, config.experts_per_token)
    if config.renormalize_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)  # [batch, seq, experts_per_token]

    def expert(ffn: FeedForward):
        def output(n: Float[Array, "batch seq dim"]) -> Float[Array, "batch seq dim"]:
            g = _gated(_linear(n, ffn.gate_up, product), config.activation).astype(x.dtype)
            return _linear(g, ffn.down if total is None else ffn.down._replace(bias=None), product)

        return output

    experts = [expert(ffn) for ffn in layer.ffn.experts]
    # With `total`, we sum the experts' outputs over devices only once, and then add the residual stream and the biases.
    start = x.astype(jnp.float32)
    if total is not None and config.expert_bias:
        biases = jnp.stack([ffn.down.bias for ffn in layer.ffn.experts if ffn.down.bias is not None])
        start = start + jnp.sum(weights[..., None] * biases.astype(jnp.float32)[chosen], axis=-2)
    y = start if total is None else jnp.zeros_like(start)
    if x.shape[0] * x.shape[1] == 1:
        for rank in range(config.experts_per_token):
            y = y + weights[..., rank, None] * lax.switch(chosen[0, 0, rank], experts, n)
    else:
        shares = jnp.sum(jax.nn.one_hot(chosen, config.experts) * weights[..., None], axis=-2)  # [batch, seq, experts]
        for e in range(config.experts):
            y = y + shares[..., e, None] * experts[e](n)
    if layer.ffn.shared is not None:
        shared = layer.ffn.shared
        y = y + jax.nn.sigmoid(product(n, shared.score)) * expert(FeedForward(shared.gate_up, shared.down))(n)
    return (y if total is None else start + total(y)).astype(x.dtype)


def final_norm(x: Float[Array, "*batch dim"], params: Params, *, config: Config) -> Float[Array, "*batch dim"]:
    """Normalize the output x of the last block, and round the result to the dtype of x."""
    return apply_norm(x, params.norm, params.norm_bias, config=config)


def norm_logits(
    x: Float[Array, "*batch dim"], params: Params, *, config: Config, product: Product
) -> Float[Array, "*batch vocab"]:
    """Normalize x, and give one logit per token of the vocabulary, in float32."""
    return head_logits(final_norm(x, params, config=config), params, config=config, product=product)


def head_logits(
    n: Float[Array, "*batch dim"], params: Params, *, config: Config, product: Product
) -> Float[Array, "*batch vocab"]:
    """Give the logits for n, the output of the last norm."""
    logits = product(n, params.head)
    logits = logits if config.logit_divisor == 1 else logits / config.logit_divisor
    return logits if config.logit_cap is None else capped(logits, config.logit_cap)


def join(
    add: Callable[[Float[Array, "batch seq dim"]], Float[Array, "batch seq dim"]],
    x: Float[Array, "batch seq dim"],
    norm: Float[Array, " dim"] | None,
    *,
    config: Config,
) -> Float[Array, "batch seq dim"]:
    """Add the output of attention or of the feed-forward layer to the residual stream x.

    `add(r)` computes this output, and returns r plus the output. Usually we return `add(x)`. If the model normalizes or
    scales the output first, we get the output from `add(0)`, rounded to the dtype of x, and add it to x afterwards.
    """
    if norm is None and config.residual_scale == 1:
        return add(x)
    y = add(jnp.zeros_like(x)).astype(jnp.float32)
    y = y if norm is None else rmsnorm(y, norm, eps=config.eps)
    return (x.astype(jnp.float32) + config.residual_scale * y).astype(x.dtype)


def score_scale(config: Config) -> float:
    """Return the factor of attention scores: `config.attention_scale`, or 1 / sqrt(head_dim) by default."""
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def transform_scores(scores: Float[Array, "*heads seq rows"], config: Config) -> Float[Array, "*heads seq rows"]:
    """Apply the model's soft cap to scaled attention scores, if it has one. All attention in plain JAX calls this."""
    return scores if config.attention_cap is None else capped(scores, config.attention_cap)


def sink_scores(sinks: Float[Array, " heads"], config: Config) -> Float[Array, "kv_heads group 1 1"]:
    """Convert the scores of attention sinks to float32, with the same order of axes as the scores of keys."""
    return sinks.astype(jnp.float32).reshape(config.kv_heads, -1, 1, 1)


def capped(x: Float[Array, "*batch n"], cap: float) -> Float[Array, "*batch n"]:
    """Compute `reference.capped` in float32."""
    return cap * jnp.tanh(x / cap)


def rmsnorm(
    x: Float[Array, "*batch n"], weight: Float[Array, " n"], *, eps: float, mean: Mean | None = None
) -> Float[Array, "*batch n"]:
    """Compute `reference.rmsnorm` in float32.

    With `mean`, x is one device's part of a vector, and all devices have parts of the same size. `mean` averages the
    mean squares of the parts over the devices.
    """
    x = x.astype(jnp.float32)
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    square = square if mean is None else mean(square)
    return x * lax.rsqrt(square + eps) * weight.astype(jnp.float32)


def layernorm(
    x: Float[Array, "*batch n"], weight: Float[Array, "*heads n"], bias: Float[Array, " n"] | None, *, eps: float
) -> Float[Array, "*batch n"]:
    """Compute `reference.layernorm` in float32."""
    x = x.astype(jnp.float32)
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    y = centered * scale * weight.astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


def gelu(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Compute `reference.gelu` in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True)


def squared_relu(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Compute `reference.squared_relu` in float32."""
    positive = jnp.maximum(x.astype(jnp.float32), 0)
    return positive * positive


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": gelu,
    "relu2": squared_relu,
}


def rope(x: Float[Array, "batch seq heads head_dim"], positions: Positions) -> Float[Array, "batch seq heads head_dim"]:
    """Compute `reference.rope.rope_halves` in float32.

    `positions` may have angles for fewer than head_dim / 2 pairs. Then only the features of these pairs are rotated.
    """
    pairs = positions.cos.shape[-1]
    a, b, *unrotated = jnp.split(x, [pairs, 2 * pairs] if 2 * pairs < x.shape[-1] else 2, axis=-1)
    cos, sin = positions.cos[:, :, None], positions.sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *unrotated], axis=-1)


def _linear(
    x: Float[Array, "batch seq cols"], linear: Linear, product: Product, total: Total | None = None
) -> Float[Array, "batch seq rows"]:
    """Multiply by the weight, sum over devices if `total` is given, and then add the bias."""
    y = product(x, linear.weight)
    y = y if total is None else total(y)
    return y if linear.bias is None else y + linear.bias.astype(jnp.float32)


def apply_norm(
    x: Float[Array, "*batch dim"],
    weight: Float[Array, " dim"] | None,
    bias: Float[Array, " dim"] | None,
    *,
    config: Config,
) -> Float[Array, "*batch dim"]:
    """Normalize x, and round the result to the dtype of x. If `weight` is None, return x unchanged."""
    if weight is None:
        return x
    eps = config.eps
    return (layernorm(x, weight, bias, eps=eps) if config.layer_norm else rmsnorm(x, weight, eps=eps)).astype(x.dtype)


def _norm_of_heads(
    x: Float[Array, "batch seq heads head_dim"], weight: Float[Array, " width"], *, config: Config, mean: Mean | None
) -> Float[Array, "batch seq heads head_dim"]:
    """Normalize q or k, in the way that `config` states.

    Some models normalize each head, either with the same weights for all heads or with separate weights per head. Other
    models normalize all heads together, as one vector.
    """
    if config.head_qk_norm:
        return layernorm(x, weight.reshape(x.shape[2:]), None, eps=config.eps)
    if not config.wide_qk_norm:
        return rmsnorm(x, weight, eps=config.eps)
    return rmsnorm(x.reshape(*x.shape[:2], -1), weight, eps=config.eps, mean=mean).reshape(x.shape)


def _gated(gate_up: Float[Array, "*batch gate_up"], activation: Activation) -> Float[Array, "*batch ffn"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if activation == "clamped_silu":
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up
