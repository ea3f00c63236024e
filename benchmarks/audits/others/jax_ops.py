"""Functions of jax, and jax's Triton kernels, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp

softmax = jax.jit(partial(jax.nn.softmax, axis=-1))
argmax = jax.jit(partial(jnp.argmax, axis=-1))
add = jax.jit(jnp.add)


@jax.jit
def softmax_of_what_is_seen(x):
    """Compute softmax. A row with only -inf gives zeros, while `jax.nn.softmax` gives NaN."""
    return jnp.where(jnp.any(jnp.isfinite(x), axis=-1, keepdims=True), jax.nn.softmax(x, axis=-1), 0)


@jax.jit
def swiglu(gate, up):
    """Compute SwiGLU in float32, rounded once."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


@jax.jit
def embedding(tokens, table):
    return table[tokens]


@jax.jit
def gemm(x, weight):
    return jnp.matmul(x, weight.T, precision="highest", preferred_element_type=jnp.float32)


@jax.jit
def gemv(x, weight):
    return jnp.matmul(weight, x, precision="highest", preferred_element_type=jnp.float32)


@jax.jit
def linear(x, weight, bias):
    y = gemm(x, weight)
    return y if bias is None else y + bias.astype(jnp.float32)


@partial(jax.jit, static_argnames=("scale", "cap"))
def attention_weights(q, k, mask, *, scale, cap):
    """Call `jax.nn.softmax` on capped scores."""
    q, k = (jnp.asarray(a, jnp.float32) for a in (q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest")
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    return jax.nn.softmax(scores + mask[:, None], axis=-1)


@jax.jit
def shared_expert(x, score, gate, up, down):
    """Call `jax.nn.silu` and `jax.nn.sigmoid`."""
    row, score, gate, up = (a.astype(jnp.float32) for a in (x, score, gate, up))
    product = partial(jnp.matmul, precision="highest")
    hidden = (jax.nn.silu(product(row, gate.T)) * product(row, up.T)).astype(x.dtype).astype(jnp.float32)
    return (jax.nn.sigmoid(product(row, score.T)) * product(hidden, down.astype(jnp.float32).T)).astype(x.dtype)


@jax.jit
def attention(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=(mask == 0)[:, None])


@partial(jax.jit, static_argnames="window")
def attention_decode(q, k, v, lengths, *, window):
    if window is None:
        return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths)[:, 0]
    at = jnp.arange(k.shape[1])
    mask = (at < lengths[:, None]) & (at >= lengths[:, None] - window)
    return jax.nn.dot_product_attention(q[:, None], k, v, mask=mask[:, None, None])[:, 0]


def triton_softmax(x):
    from jax.experimental.pallas.ops.gpu.softmax import softmax

    return softmax(x, interpret=True)


def triton_rmsnorm(x, weight, *, eps):
    """Call `rms_norm`, with a bias of zeros and with x in three dimensions: it requires both."""
    from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm

    return rms_norm(x[None], weight, jnp.zeros_like(weight), eps=eps, interpret=True)[0]


def triton_attention_decode(q, k, v, lengths, *, window):
    from jax.experimental.pallas.ops.gpu.decode_attention import gqa

    k, v = (jnp.pad(a, ((0, 0), (0, -a.shape[1] % 32), (0, 0), (0, 0))) for a in (k, v))
    start = None if window is None else jnp.maximum(lengths - window, 0)
    return gqa(q, k, v, start_idx=start, kv_seq_len=lengths, block_k=16, k_splits=2, interpret=True)


def triton_attention_prefill(q, k, v, offsets, *, window):
    """Attend over a whole prompt; its length must be a multiple of the block size."""
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    sizes = BlockSizes(block_q=16, block_k=16)
    return mha(q, k, v, None, sm_scale=q.shape[-1] ** -0.5, causal=True, block_sizes=sizes, interpret=True)


def triton_attention_paged(q, k_pages, v_pages, table, lengths):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q = q * q.shape[-1] ** -0.5
    k, v = (pages.transpose(2, 0, 1, 3) for pages in (k_pages, v_pages))
    return paged_attention(q, k, v, table, lengths, pages_per_compute_block=1, k_splits=1, interpret=True)
