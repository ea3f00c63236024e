"""The ops of a block on a Hopper GPU: our kernels where they are made for it, the plain form where they are not.

Kernels are for decoding: one new token for each of a few sequences, where all time is spent reading weights and cache.
The products of a prompt's many tokens stay XLA's, whose matrix products reach the tensor cores' speed; its attention
is ours. What a kernel cannot do (other dtypes, odd widths, heads that are not 64 or 128 wide, codes that are neither
int8 nor int4) it says at trace time, and the plain form takes its place; `PALLAS_ONLY` passes the refusal on instead.

A module of its own beside `ops`, because Pallas takes a second to import, and only a GPU needs it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from model.cache import LayerCache, empty_cache
from model.ops.block import XLA, Ops, Positions, dot, plain
from model.weights.codes import Int8, QuantizedMatrix
from model.weights.gpu_codes import Int4Words
from model.weights.params import FeedForward, Layer, Matrix, Params
from pallas_kernels.attention_decode import attention_decode
from pallas_kernels.attention_prefill import attention_prefill
from pallas_kernels.gemv import gemv
from pallas_kernels.norm_gate_up import norm_gate_up as _norm_gate_up
from pallas_kernels.norm_qkv import norm_qkv as _norm_qkv
from pallas_kernels.parts import int4
from pallas_kernels.parts.matrix import Codes
from reference.config import Config

QUANTIZED = ("int8", "int4")  # what codes may be that kernels multiply by
MOST_SEQUENCES = (
    2  # at once, with weights that are floats: for four, XLA's tensor cores are faster (docs/performance-gpu.md)
)


def norm_qkv(
    x: Float[Array, "batch 1 dim"], layer: Layer, cache: LayerCache, positions: Positions, *, config: Config
) -> tuple[Float[Array, "batch 1 heads head_dim"], LayerCache]:
    _check_cache(cache, x)
    if layer.q_norm is not None:
        raise ValueError("norm_qkv has no norms of q and k")
    q, k, v = _norm_qkv(
        _multiplied(layer.qkv.weight, x),
        x[:, 0],
        layer.attention_norm,
        cache.k,
        cache.v,
        positions.at[:, 0],
        positions.cos[:, 0],
        positions.sin[:, 0],
        heads=config.heads,
        eps=config.eps,
        bias=layer.qkv.bias,
    )
    return q[:, None], LayerCache(k, v)


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    cache: LayerCache,
    positions: Positions,
    *,
    window: int | None,
    config: Config,
) -> Float[Array, "batch seq width"]:
    _check_cache(cache, q)
    start = positions.at[:, 0]
    if q.shape[1] > 1:
        return attention_prefill(q, cache.k, cache.v, start, window=window)
    return attention_decode(q[:, 0], cache.k, cache.v, start + 1, window=window)[:, None]


def project_add(
    h: Float[Array, "batch 1 width"], layer: Layer, x: Float[Array, "batch 1 dim"]
) -> Float[Array, "batch 1 dim"]:
    return gemv(_multiplied(layer.o.weight, h), h[:, 0], bias=layer.o.bias, residual=x[:, 0])[:, None]


def norm_gate_up(x: Float[Array, "batch 1 dim"], layer: Layer, *, config: Config) -> Float[Array, "batch 1 ffn"]:
    assert isinstance(layer.ffn, FeedForward)
    weight, bias = layer.ffn.gate_up
    return _norm_gate_up(_multiplied(weight, x), x[:, 0], layer.ffn_norm, eps=config.eps, bias=bias)[:, None]


def down_add(
    g: Float[Array, "batch 1 ffn"], layer: Layer, x: Float[Array, "batch 1 dim"]
) -> Float[Array, "batch 1 dim"]:
    assert isinstance(layer.ffn, FeedForward)
    return gemv(_multiplied(layer.ffn.down.weight, g), g[:, 0], bias=layer.ffn.down.bias, residual=x[:, 0])[:, None]


def norm_logits(x: Float[Array, "*batch dim"], params: Params, *, config: Config) -> Float[Array, "*batch vocab"]:
    rows = x.reshape(-1, config.dim)
    logits = gemv(_multiplied(params.head, rows[:, None]), rows, norm=params.norm, eps=config.eps, out=jnp.float32)
    return logits.reshape(*x.shape[:-1], -1)


def _multiplied(weight: Matrix, x: Float[Array, "batch 1 cols"]) -> Array | Codes:
    """`operand` for the vectors of x, of which kernels are the faster for a few."""
    if not isinstance(weight, QuantizedMatrix) and len(x) > MOST_SEQUENCES:
        raise ValueError(f"kernels multiply floats by up to {MOST_SEQUENCES} vectors, XLA is faster for {len(x)}")
    return operand(weight)


def operand(weight: Matrix) -> Array | Codes:
    """A matrix as kernels take it. Nothing is moved."""
    if not isinstance(weight, QuantizedMatrix):
        return weight
    if weight.zeros is not None:
        raise ValueError(f"kernels multiply by no {weight.form} weights with zero points")
    if isinstance(weight, Int8):
        one_a_row = weight.scales.shape[1] == 1
        return Codes(weight.codes, weight.scales[:, 0] if one_a_row else weight.scales)
    if isinstance(weight, Int4Words):
        return Codes(weight.codes, weight.scales)
    if weight.form in QUANTIZED:
        raise ValueError(
            f"kernels read {weight.form} weights as model.pallas_weights arranges them, with columns in multiples of "
            f"{int4.BLOCK}, got {weight.cols}"
        )
    raise ValueError(f"kernels multiply by weights in {' and '.join(QUANTIZED)}, not in {weight.form}")


def _check_cache(cache: LayerCache, x: Array) -> None:
    if cache.k.dtype != x.dtype:
        raise ValueError(f"kernels read a cache in the model's own {x.dtype}, not in {cache.k.dtype}")


def prompt_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """A product for the many tokens of a prompt, in float32 from what the tensor cores multiply.

    Where x is bfloat16, quantized weights are decoded to bfloat16, each rounded once, as a model in that dtype would
    have them: in float32 the product takes ten times as long.
    """
    if not isinstance(weight, QuantizedMatrix) or x.dtype != jnp.bfloat16:
        return dot(x, weight)
    # Together with x, or XLA might decode the matrices of all layers before the first is multiplied.
    x, codes = lax.optimization_barrier((x, weight))
    assert isinstance(codes, QuantizedMatrix)
    return dot(x, codes.weights()[:, : x.shape[-1]].astype(x.dtype))


PROMPTS = plain(prompt_product)


def _routed(name: str, kernel: Callable[..., Any], *, only: bool) -> Callable[..., Any]:
    """`kernel` where it does not refuse, else the plain form; for many tokens a sequence only attention has one."""

    def op(x: Array, *arguments: Any, **fixed: Any):
        if name != "attend" and x.ndim > 2 and x.shape[1] > 1:
            return getattr(PROMPTS, name)(x, *arguments, **fixed)
        try:
            return kernel(x, *arguments, **fixed)
        except ValueError:
            if only:
                raise
            return getattr(XLA, name)(x, *arguments, **fixed)

    return op


KERNELS = {
    "norm_qkv": norm_qkv,
    "attend": attend,
    "project_add": project_add,
    "norm_gate_up": norm_gate_up,
    "down_add": down_add,
    "norm_logits": norm_logits,
}


def _table(*, only: bool) -> Ops:
    return XLA._replace(**{name: _routed(name, kernel, only=only) for name, kernel in KERNELS.items()})


PALLAS = _table(only=False)
PALLAS_ONLY = _table(only=True)


def refusals(config: Config, params: Params, *, capacity: int, batch: int = 1) -> dict[str, str | None]:
    """For each op, why its kernel cannot do what decoding with this model asks of it; None where it can.

    `params` may be `abstract_params`.
    """
    dtype = params.embedding.dtype
    cache = jax.eval_shape(partial(empty_cache, config, batch=batch, capacity=capacity, dtype=dtype)).layers[0]
    layer = params.layers[0]

    def vector(*sizes: int, dtype: np.dtype = dtype) -> Any:
        return jax.ShapeDtypeStruct((batch, 1, *sizes), dtype)

    angles = vector(config.head_dim // 2, dtype=np.dtype(np.float32))
    positions = Positions(vector(dtype=np.dtype(np.int32)), angles, angles)
    x, h = vector(config.dim), vector(config.heads * config.head_dim)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "norm_qkv": (partial(norm_qkv, config=config), (x, layer, cache, positions)),
        "attend": (
            partial(attend, window=config.window(0), config=config),
            (vector(config.heads, config.head_dim), cache, positions),
        ),
        "project_add": (project_add, (h, layer, x)),
        "norm_logits": (
            partial(norm_logits, config=config),
            (jax.ShapeDtypeStruct((batch, config.dim), dtype), params),
        ),
    }
    if config.experts:
        found: dict[str, str | None] = {"moe_add": "experts have no kernel"}
    else:
        found = {}
        calls["norm_gate_up"] = (partial(norm_gate_up, config=config), (x, layer))
        calls["down_add"] = (down_add, (vector(config.ffn), layer, x))
    for name, (call, arguments) in calls.items():
        try:
            jax.eval_shape(call, *arguments)
            found[name] = None
        except ValueError as error:
            found[name] = str(error)
    return {name: found[name] for name in Ops._fields if name in found}
