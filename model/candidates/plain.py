"""Our ops in plain JAX, and their variants for CPUs, wrapped in functions with the signatures of the reference.

Only ops that the reference also has are here. `verify.judging.walk` verifies the fused ops of a block.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llamaspec.model import sampling
from llamaspec.model.cache import LayerCache
from llamaspec.model.candidates.own import OwnCandidate, own_candidate
from llamaspec.model.ops import attention, block, products
from llamaspec.model.ops.table import Positions
from llamaspec.model.options import SamplingOptions
from llamaspec.model.weights.adapted import Adapted
from llamaspec.reference.config import Config

# Our cache contains finite old values after its length, and XLA's attention reads at least one position.
CACHE = {"padding": [0.0, 100.0]}
LENGTHS = {"lengths": [(1,), (7, 8), (33, 1, 16), (17,)]}

gemm = OwnCandidate("gemm", jax.jit(products.dot))
gemv = OwnCandidate("gemv", jax.jit(products.dot))
cpu_gemv = OwnCandidate("gemv", jax.jit(products.cpu_product), only={"cols": [16, 128, 512, 513]})
rmsnorm = OwnCandidate("rmsnorm", jax.jit(block.rmsnorm, static_argnames="eps"))
layernorm = OwnCandidate("layernorm", jax.jit(block.layernorm, static_argnames="eps"))
gelu = OwnCandidate("gelu", jax.jit(block.gelu))
squared_relu = OwnCandidate("squared_relu", jax.jit(block.squared_relu))
argmax = OwnCandidate("argmax", jax.jit(sampling.largest))


@own_candidate("lora")
@partial(jax.jit, static_argnames="scale")
def lora(x: Array, weight: Array, a: Array, b: Array, *, scale: float) -> Float[Array, "batch rows"]:
    return products.dot(x, Adapted(weight, (a,), (scale * b.astype(jnp.float32),))).astype(x.dtype)


@own_candidate("lora_backward", dtypes=("float32",))  # JAX rounds both parts of dx to bfloat16 before it adds them
@partial(jax.jit, static_argnames="scale")
def lora_backward(
    x: Array, weight: Array, a: Array, b: Array, dy: Array, *, scale: float
) -> tuple[Float[Array, "batch cols"], Float[Array, "rank cols"], Float[Array, "rows rank"]]:
    """Compute the gradients for x, a and b with `jax.vjp`, as training does."""
    return jax.vjp(lambda x, a, b: products.dot(x, Adapted(weight, (a,), (scale * b,))), x, a, b)[1](dy)


@own_candidate("capped")
@partial(jax.jit, static_argnames="cap")
def capped(x: Float[Array, "rows n"], *, cap: float) -> Float[Array, "rows n"]:
    return block.capped(x.astype(jnp.float32), cap)


@own_candidate("wide_qk_norm")
@partial(jax.jit, static_argnames="eps")
def wide_qk_norm(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    q_weight: Float[Array, " q_width"],
    k_weight: Float[Array, " k_width"],
    *,
    eps: float,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
    q_normed = block.rmsnorm(q.reshape(*q.shape[:2], -1), q_weight, eps=eps).reshape(q.shape)
    return q_normed, block.rmsnorm(k.reshape(*k.shape[:2], -1), k_weight, eps=eps).reshape(k.shape)


@own_candidate("rope_halves")
@jax.jit
def rope_halves(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    frequencies: Float[Array, " pairs"],
) -> Float[Array, "batch seq heads head_dim"]:
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return block.rope(x, Positions(positions, jnp.cos(angles), jnp.sin(angles)))


@own_candidate("partial_rope")
@partial(jax.jit, static_argnames="magnitude")
def partial_rope(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    frequencies: Float[Array, " pairs"],
    *,
    magnitude: float,
) -> Float[Array, "batch seq heads head_dim"]:
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return block.rope(x, Positions(positions, magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)))


@own_candidate("attention_prefill", only=CACHE)
@partial(jax.jit, static_argnames="window")
def attention_prefill(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch capacity kv_heads head_dim"],
    v: Float[Array, "batch capacity kv_heads head_dim"],
    offsets: Int[Array, " batch"],
    *,
    window: int | None,
) -> Float[Array, "batch queries heads head_dim"]:
    return _attend(q, k, v, offsets[:, None] + jnp.arange(q.shape[1]), window=window)


@own_candidate("attention_decode", only={**CACHE, **LENGTHS})
@partial(jax.jit, static_argnames="window")
def attention_decode(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "batch capacity kv_heads head_dim"],
    v: Float[Array, "batch capacity kv_heads head_dim"],
    lengths: Int[Array, " batch"],
    *,
    window: int | None,
) -> Float[Array, "batch heads head_dim"]:
    return _attend(q[:, None], k, v, lengths[:, None] - 1, window=window)[:, 0]


# Attention needs only the numbers of heads and head_dim from a model's config.
_MINIMAL = Config(dim=1, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=1, context=1, eps=1.0, theta=1.0)


def _attend(q: Array, k: Array, v: Array, at: Int[Array, "batch seq"], *, window: int | None) -> Array:
    config = replace(_MINIMAL, heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3])
    cache = LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2))
    nowhere = jnp.zeros((*at.shape, 0))
    return attention.attend(q, cache, Positions(at, nowhere, nowhere), window=window, config=config).reshape(q.shape)


@jax.jit
def _distribution(logits: Array, options: sampling.Sampling) -> Array:
    return sampling.distribution(logits[None].astype(jnp.float32), options)[0]


@own_candidate("distribution", only={"temperature": [1.0, 0.7, 1.5, 0.125], "repetition_penalty": [1.0]})
def distribution(
    logits: Float[Array, " vocab"],
    seen: Array,
    **options: Any,
) -> Float[Array, " vocab"]:
    """Compute the probabilities of tokens, without a repetition penalty.

    `model.sampling.sample` applies the penalty in an earlier step.
    """
    return _distribution(logits, sampling.as_arrays(SamplingOptions(**options)))


@own_candidate("draw", dtypes=("float32",))
@jax.jit
def draw(p: Float[Array, " vocab"], u: Float[Array, ""] | float) -> Int[Array, ""]:
    return sampling.draw(p[None], jnp.asarray(u, jnp.float32)[None])[0]
