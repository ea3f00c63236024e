"""Wraps our kernels in functions with the signatures of the reference.

The kernels run on a Hopper GPU, or in Pallas's interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from llamaspec.model.candidates.own import own_candidate
from llamaspec.model.device import default_device
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.forms.mxfp4 import MXFP4
from llamaspec.model.weights.forms.table import LEVELS
from llamaspec.model.weights.params import Params
from llamaspec.pallas_kernels.attention_decode import attention_decode as decode_kernel
from llamaspec.pallas_kernels.attention_paged import attention_paged as paged_kernel
from llamaspec.pallas_kernels.attention_prefill import attention_prefill as prefill_kernel
from llamaspec.pallas_kernels.coded_gemm import coded_gemm as gemm_kernel
from llamaspec.pallas_kernels.gemv import gemv as gemv_kernel
from llamaspec.pallas_kernels.norm_gate_up import norm_gate_up as gate_up_kernel
from llamaspec.pallas_kernels.norm_qkv import norm_qkv as qkv_kernel
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, ScaledE4M3
from llamaspec.pallas_kernels.rmsnorm import rmsnorm as rmsnorm_kernel
from llamaspec.pallas_kernels.softmax import softmax as softmax_kernel
from llamaspec.reference.config import Config

# An interpreted kernel calls back into Python, which runs more programs. With asynchronous dispatch, JAX may have no
# free thread for these programs.
jax.config.update("jax_cpu_enable_async_dispatch", False)


@contextmanager
def runnable() -> Iterator[None]:
    """Make a context in which kernels can be called, even on a machine without a GPU.

    Raises RuntimeError after the body if the interpreter found a race.
    """
    with nullcontext() if default_device().has_kernels else interpreter():
        yield


def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with runnable():
        return jax.block_until_ready(function(*arguments, **named))


kernel = partial(own_candidate, kernel=True)

HEADS = {"head_dim": [64, 128]}
INTEGER = {"rows": [8, 16], "cols": [1024, 1280], "scheme": ["q8", "q8_row", "q4"]}
CODED = {
    **INTEGER,
    "scheme": [*INTEGER["scheme"], "mxfp4", "fp8"],
}  # without NF4, because the kernel also rounds the levels of NF4
PRODUCT = {"batch": [1, 2], "rows": [8, 16], "cols": [256, 512]}
# Kinds of inputs in which all numbers have about the same size. The contract `gemv_quantized` allows one rounding of
# each number, but the kernel rounds a group of numbers to fixed point. The contract `gemv_fixed_point` draws all kinds
# of inputs.
EVEN = [
    f"{kind}({seed}) * 2**{exponent}"
    for kind in ("integers", "normal", "positive", "equal", "last", "halves", "zeros")
    for seed in range(4)
    for exponent in (-8, 0, 8)
]

rmsnorm = kernel("rmsnorm")(partial(run, rmsnorm_kernel))
softmax = kernel("softmax")(partial(run, softmax_kernel))


@kernel("gemv", only={"rows": [8, 16, 32], "cols": [256, 512, 768]})
def gemv(x: Float[Array, " cols"], weight: Float[Array, "rows cols"]) -> Float[Array, " rows"]:
    return run(gemv_kernel, weight, x[None])[0]


@kernel("gemv_quantized", only={**CODED, "x": EVEN})
def gemv_quantized(
    x: Float[Array, " cols"], codes: Int[Array, "rows cols"], scales: Float[Array, "rows groups"], *, scheme: str
) -> Float[Array, " rows"]:
    """Compute W x for a matrix W that is quantized by one of the schemes of `--quantize`."""
    if scheme == "fp8":
        return run(gemv_kernel, ScaledE4M3(lax.bitcast_convert_type(codes, jnp.int8), scales[:, 0]), x[None])[0]
    if scheme == "mxfp4":
        scales = MXFP4.real_scales(scales)
    levels = LEVELS.get(scheme)
    if levels is not None:
        codes = jnp.asarray(int4.pack(np.asarray(codes), "table", lowest=0))
    elif scheme == "q4":
        codes = jnp.asarray(int4.pack(np.asarray(codes)))
    scales = scales[:, 0] if scheme == "q8_row" else scales
    return run(gemv_kernel, ScaledCodes(codes, scales, None, levels), x[None])[0]


gemv_fixed_point = kernel("gemv_fixed_point", only=INTEGER)(gemv_quantized.function)


@kernel(
    "gemm_quantized",
    only={"batch": [1, 3, 9], "rows": [64, 128], "cols": [1024, 1280], "scheme": ["q8", "q8_row", "q4"]},
    dtypes=("bfloat16",),
)
def gemm_quantized(
    x: Float[Array, "batch cols"], codes: Int[Array, "rows cols"], scales: Float[Array, "rows groups"], *, scheme: str
) -> Float[Array, "batch rows"]:
    """Multiply several vectors by a matrix that is quantized by one of the schemes with integer codes."""
    codes = jnp.asarray(int4.pack(np.asarray(codes))) if scheme == "q4" else codes
    return run(gemm_kernel, ScaledCodes(codes, scales[:, 0] if scheme == "q8_row" else scales), x).astype(x.dtype)


@kernel("norm_linear", only=PRODUCT)
def norm_linear(
    x: Float[Array, "batch cols"],
    norm: Float[Array, " cols"],
    weight: Float[Array, "rows cols"],
    bias: Float[Array, " rows"] | None,
    *,
    eps: float,
) -> Float[Array, "batch rows"]:
    return run(gemv_kernel, weight, x, norm=norm, eps=eps, bias=bias)


@kernel("linear_add", only=PRODUCT)
def linear_add(
    x: Float[Array, "batch cols"],
    weight: Float[Array, "rows cols"],
    bias: Float[Array, " rows"] | None,
    residual: Float[Array, "batch rows"],
) -> Float[Array, "batch rows"]:
    return run(gemv_kernel, weight, x, bias=bias, residual=residual)


@kernel("norm_gate_up", only={"batch": [1, 2], "ffn": [8, 16, 24], "cols": [256, 512]})
def norm_gate_up(
    x: Float[Array, "batch cols"],
    norm: Float[Array, " cols"],
    weight: Float[Array, "gate_up cols"],
    bias: Float[Array, " gate_up"] | None,
    *,
    eps: float,
) -> Float[Array, "batch ffn"]:
    return run(gate_up_kernel, weight, x, norm, eps=eps, bias=bias)


@kernel("norm_qkv", only={"pairs": [8, 16, 32], "cols": [256, 512]})
def norm_qkv(
    x: Float[Array, "batch cols"],
    norm: Float[Array, " cols"],
    weight: Float[Array, "rows cols"],
    bias: Float[Array, " rows"] | None,
    k_cache: Float[Array, "batch capacity kv_heads head_dim"],
    v_cache: Float[Array, "batch capacity kv_heads head_dim"],
    positions: Int[Array, " batch"],
    frequencies: Float[Array, " pairs"],
    *,
    eps: float,
) -> tuple[
    Float[Array, "batch heads head_dim"],
    Float[Array, "batch capacity kv_heads head_dim"],
    Float[Array, "batch capacity kv_heads head_dim"],
]:
    angles = positions[:, None].astype(jnp.float32) * frequencies
    kv_heads, head_dim = k_cache.shape[2:]
    q, k, v = run(
        qkv_kernel,
        weight,
        x,
        norm,
        k_cache.swapaxes(1, 2),
        v_cache.swapaxes(1, 2),
        positions,
        jnp.cos(angles),
        jnp.sin(angles),
        heads=len(weight) // head_dim - 2 * kv_heads,
        eps=eps,
        bias=bias,
    )
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


@kernel("attention_decode", only=HEADS)
def attention_decode(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "batch capacity kv_heads head_dim"],
    v: Float[Array, "batch capacity kv_heads head_dim"],
    lengths: Int[Array, " batch"],
    *,
    window: int | None,
) -> Float[Array, "batch heads head_dim"]:
    return run(decode_kernel, q, _cached(k), _cached(v), lengths, window=window).reshape(q.shape)


@kernel("attention_prefill", only=HEADS, dtypes=("bfloat16",))
def attention_prefill(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch capacity kv_heads head_dim"],
    v: Float[Array, "batch capacity kv_heads head_dim"],
    offsets: Int[Array, " batch"],
    *,
    window: int | None,
) -> Float[Array, "batch queries heads head_dim"]:
    return run(prefill_kernel, q, _cached(k), _cached(v), offsets, window=window).reshape(q.shape)


@kernel("attention_paged", only={**HEADS, "page": [8, 16]})
def attention_paged(
    q: Float[Array, "batch heads head_dim"],
    k_pages: Float[Array, "pages page kv_heads head_dim"],
    v_pages: Float[Array, "pages page kv_heads head_dim"],
    table: Int[Array, "batch blocks"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch heads head_dim"]:
    k, v = k_pages.swapaxes(1, 2), v_pages.swapaxes(1, 2)
    return run(paged_kernel, q, k, v, table, lengths).reshape(q.shape)


def _cached(a: Float[Array, "batch capacity kv_heads head_dim"]) -> Float[Array, "batch kv_heads rows head_dim"]:
    """Transpose keys or values to the layout of our cache, and pad the capacity with NaN to a multiple of 8."""
    return jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, -a.shape[1] % 8), (0, 0)), constant_values=jnp.nan)


def walked_ops(config: Config, params: Params, rows: int) -> Ops:
    """Return the ops that `verify.judging.walk` judges for a model: all kernels except attention.

    The cache has `rows` rows. The attention kernel rounds the softmax weights. The contract of attention allows this
    rounding, but the bounds of the walk do not.
    """
    ops, _ = pallas_ops(config, params, capacity=rows)
    return ops._replace(attend=XLA.attend)
