"""Each kernel's op in plain jax.numpy, compiled by XLA: the baseline for the times of our kernels.

Each function has the arguments, shapes and dtypes of the kernel with the same name, and computes in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llamaspec.model.ops.block import rmsnorm as _rmsnorm
from llamaspec.model.ops.products import dot
from llamaspec.model.weights.forms.fp8 import FP8
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, ScaledE4M3


def gemv(w, x, *, norm=None, eps: float = 1e-5, bias=None, residual=None, out: Any = None):
    n = x if norm is None else _rmsnorm(x, norm, eps=eps).astype(x.dtype)
    y = _biased(_product(n, w), bias)
    y = y if residual is None else y + residual.astype(jnp.float32)
    return y.astype(out or x.dtype)


def coded_gemm(w, x):
    return _product(x, w)


def _biased(y, bias):
    return y if bias is None else y + bias.astype(jnp.float32)


def _product(x, w):
    """Compute W x. XLA multiplies codes by scales inside the product if it can."""
    if isinstance(w, tuple):
        return jnp.concatenate([_product(x, part) for part in w], axis=-1)
    if isinstance(w, ScaledE4M3):
        wide = FP8.decode(w.codes) * (FP8.unit * w.scales[:, None])
        return dot(x, wide.astype(x.dtype))
    if not isinstance(w, ScaledCodes):
        return dot(x, w)
    rows, cols = w.shape
    scales = w.scales.reshape(rows, -1, 1)
    wide = _levels(w).reshape(rows, scales.shape[1], -1).astype(jnp.float32) * scales
    if w.minima is not None:
        wide = wide + w.minima[..., None]
    return dot(x, wide.astype(x.dtype).reshape(rows, cols))


def _levels(w: ScaledCodes):
    if not w.in_words:
        return w.codes
    codes = int4.unpacked(w.codes, w.order, w.low_bits)
    if w.levels is not None:
        return jnp.asarray(w.levels.integers, jnp.float32)[codes] * w.levels.unit
    return codes if w.minima is not None else int4.signed(codes, w.bits)


def norm_gate_up(w, x, norm, *, eps: float, bias=None):
    return swiglu(_biased(_product(_rmsnorm(x, norm, eps=eps).astype(x.dtype), w), bias)).astype(x.dtype)


def norm_qkv(w, x, norm, k, v, positions, cos, sin, *, heads: int, eps: float, bias=None):
    batch, kv_heads, _, head_dim = k.shape
    y = _biased(_product(_rmsnorm(x, norm, eps=eps).astype(x.dtype), w), bias).reshape(batch, -1, head_dim)
    q, new_k, new_v = jnp.split(y, [heads, heads + kv_heads], axis=1)
    append = jax.vmap(lambda rows, new, at: lax.dynamic_update_slice(rows, new[:, None], (0, at, 0)))
    q, new_k = rope(q, cos, sin), rope(new_k, cos, sin)
    k, v = (append(a, new.astype(a.dtype), positions) for a, new in ((k, new_k), (v, new_v)))
    return q.astype(x.dtype), k, v


def attention_decode(q, k, v, lengths, *, window: int | None = None):
    return attention_prefill(q[:, None], k, v, lengths - 1, window=window)[:, 0]


def attention_paged(q, k, v, table, lengths, *, window: int | None = None):
    k, v = (pages[table].swapaxes(1, 2) for pages in (k, v))  # [batch, kv_heads, max_pages, page, head_dim]
    k, v = (a.reshape(*a.shape[:2], -1, a.shape[-1]) for a in (k, v))
    return attention_decode(q, k, v, lengths, window=window)


def attention_prefill(q, k, v, offsets, *, window: int | None = None):
    batch, seq, heads, head_dim = q.shape
    q = q.reshape(batch, seq, k.shape[1], -1, head_dim)
    scores = _einsum("bskgd,bktd->bkgst", q, k) * head_dim**-0.5
    at = offsets[:, None] + jnp.arange(seq)
    key, query = jnp.arange(k.shape[2]), at[:, None, None, :, None]
    seen = key <= query if window is None else (key <= query) & (key > query - window)
    p = softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
    return _einsum("bkgst,bktd->bskgd", p, v).astype(v.dtype).reshape(batch, seq, heads * head_dim)


def _einsum(axes: str, a, b):
    return jnp.einsum(axes, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def rmsnorm(x, weight, *, eps: float):
    return _rmsnorm(x, weight, eps=eps).astype(x.dtype)


def swiglu(gate_up):
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def rope(x, cos, sin):
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def softmax(scores):
    return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(scores.dtype)
