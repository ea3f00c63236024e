"""Our kernels, called as the reference is: on a GPU that they are made for, or by the interpreter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from model.ops.gpu import PALLAS
from model.ops.xla import XLA
from model.running.device import default_device
from pallas_kernels.add import add as add_kernel
from pallas_kernels.argmax import argmax as argmax_kernel
from pallas_kernels.attention_decode import attention_decode as decode_kernel
from pallas_kernels.attention_paged import attention_paged as paged_kernel
from pallas_kernels.attention_prefill import attention_prefill as prefill_kernel
from pallas_kernels.gemm import gemm as gemm_kernel
from pallas_kernels.gemv import gemv as gemv_kernel
from pallas_kernels.parts import int4
from pallas_kernels.parts.compat import interpreter
from pallas_kernels.parts.matrix import Codes
from pallas_kernels.rmsnorm import rmsnorm as rmsnorm_kernel
from pallas_kernels.rope import rope as rope_kernel
from pallas_kernels.softmax import softmax as softmax_kernel
from pallas_kernels.swiglu import swiglu as swiglu_kernel

# A kernel in the interpreter calls back into Python, which runs programs itself: it must not hold the threads for them.
jax.config.update("jax_cpu_enable_async_dispatch", False)


@contextmanager
def runnable() -> Iterator[None]:
    """Where kernels can be called. Raises RuntimeError, at the end, where the interpreter finds a race."""
    with nullcontext() if default_device().has_kernels else interpreter():
        yield


def run(kernel: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with runnable():
        return jax.block_until_ready(kernel(*arguments, **named))


add = partial(run, add_kernel)
argmax = partial(run, argmax_kernel)
rmsnorm = partial(run, rmsnorm_kernel)
softmax = partial(run, softmax_kernel)
gemm = partial(run, gemm_kernel)


def swiglu(gate: Float[Array, "*batch ffn"], up: Float[Array, "*batch ffn"]) -> Float[Array, "*batch ffn"]:
    return run(swiglu_kernel, jnp.concatenate([gate, up], axis=-1))


def gemv(x: Float[Array, " cols"], weight: Float[Array, "rows cols"]) -> Float[Array, " rows"]:
    return run(gemv_kernel, weight, x[None])[0]


def gemv_quantized(
    x: Float[Array, " cols"], codes: Int[Array, "rows cols"], scales: Float[Array, "rows groups"], *, scheme: str
) -> Float[Array, " rows"]:
    """Schemes q8, q8_row and q4."""
    if scheme == "q4":
        codes = jnp.asarray(int4.pack(np.asarray(codes)))
    return run(gemv_kernel, Codes(codes, scales[:, 0] if scheme == "q8_row" else scales), x[None])[0]


def rope_halves(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    frequencies: Float[Array, " pairs"],
) -> Float[Array, "batch seq heads head_dim"]:
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return run(rope_kernel, x, jnp.cos(angles), jnp.sin(angles))


def attention_decode(
    q: Float[Array, "batch heads head_dim"],
    k: Float[Array, "batch capacity kv_heads head_dim"],
    v: Float[Array, "batch capacity kv_heads head_dim"],
    lengths: Int[Array, " batch"],
    *,
    window: int | None,
) -> Float[Array, "batch heads head_dim"]:
    return run(decode_kernel, q, _cached(k), _cached(v), lengths, window=window).reshape(q.shape)


def attention_prefill(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch capacity kv_heads head_dim"],
    v: Float[Array, "batch capacity kv_heads head_dim"],
    offsets: Int[Array, " batch"],
    *,
    window: int | None,
) -> Float[Array, "batch queries heads head_dim"]:
    return run(prefill_kernel, q, _cached(k), _cached(v), offsets, window=window).reshape(q.shape)


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
    """In the layout of a cache of ours, whose capacity is a multiple of 8."""
    return jnp.pad(a.swapaxes(1, 2), ((0, 0), (0, 0), (0, -a.shape[1] % 8), (0, 0)), constant_values=jnp.nan)


# A model's ops, for where kernels can be called, but for attention: that rounds weights, which its contracts allow for.
OPS = PALLAS._replace(attend=XLA.attend)
