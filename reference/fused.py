r"""Fused ops: a norm, a product, and then a bias, a residual, RoPE or SwiGLU, all in one kernel.

    norm_linear    y = W n + b                                       n = rmsnorm(x)
    norm_gate_up   y = swiglu(gate, up)                              [gate; up] = W n + b
    norm_qkv       RoPE rotates q and k; k and v go to a cache       [q; k; v] = W n + b
    linear_add     y = W x + b + r

Each op is a sequence of layers from other pages, so this page adds no mathematics. Fusing saves memory
traffic, which limits decoding (Ivanov et al., 2021, https://arxiv.org/abs/2007.00072): n, gate, up, and q
and k before RoPE never leave the processor. A kernel may round these intermediate results; the definition
rounds nothing.
"""

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.add import add
from llamaspec.reference.linear import linear
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import rope_halves
from llamaspec.reference.swiglu import swiglu


def norm_linear(
    x: Float[np.ndarray, "batch cols"],
    norm: Float[np.ndarray, " cols"],
    weight: Float[np.ndarray, "rows cols"],
    bias: Float[np.ndarray, " rows"] | None,
    *,
    eps: float,
) -> Float[np.ndarray, "batch rows"]:
    """Normalize each vector, multiply it by the weight, and add the bias. A model computes its logits in this way.

    >>> norm_linear(np.array([[3.0, 3.0]]), np.array([1.0, 2.0]), np.array([[1.0, 1.0]]), np.array([0.5]), eps=0.0)
    array([[3.5]])
    """
    return linear(rmsnorm(x, norm, eps=eps), weight, bias)


def linear_add(
    x: Float[np.ndarray, "batch cols"],
    weight: Float[np.ndarray, "rows cols"],
    bias: Float[np.ndarray, " rows"] | None,
    residual: Float[np.ndarray, "batch rows"],
) -> Float[np.ndarray, "batch rows"]:
    """Multiply each vector by the weight, and add the bias and the residual, as in the output and down projections.

    >>> linear_add(np.array([[1.0, 2.0]]), np.array([[1.0, 1.0]]), np.array([0.5]), np.array([[10.0]]))
    array([[13.5]])
    """
    return add(residual, linear(x, weight, bias))


def norm_gate_up(
    x: Float[np.ndarray, "batch cols"],
    norm: Float[np.ndarray, " cols"],
    weight: Float[np.ndarray, "gate_up cols"],
    bias: Float[np.ndarray, " gate_up"] | None,
    *,
    eps: float,
) -> Float[np.ndarray, "batch ffn"]:
    """Normalize each vector, multiply it by `weight`, and apply SwiGLU.

    `weight` has the rows of gate, then the rows of up.

    >>> weight = np.array([[0.0, 0.0], [1.0, 1.0]])  # gate, up
    >>> norm_gate_up(np.array([[3.0, 3.0]]), np.ones(2), weight, np.log([3.0, 1.0]), eps=0.0).round(4)
    array([[1.6479]])
    """
    gate, up = np.split(linear(rmsnorm(x, norm, eps=eps), weight, bias), 2, axis=-1)
    return swiglu(gate, up)


def norm_qkv(
    x: Float[np.ndarray, "batch cols"],
    norm: Float[np.ndarray, " cols"],
    weight: Float[np.ndarray, "rows cols"],
    bias: Float[np.ndarray, " rows"] | None,
    k_cache: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    v_cache: Float[np.ndarray, "batch capacity kv_heads head_dim"],
    positions: Int[np.ndarray, " batch"],
    frequencies: Float[np.ndarray, " pairs"],
    *,
    eps: float,
) -> tuple[
    Float[np.ndarray, "batch heads head_dim"],
    Float[np.ndarray, "batch capacity kv_heads head_dim"],
    Float[np.ndarray, "batch capacity kv_heads head_dim"],
]:
    """Compute the query of one new token per sequence, and return caches with the token's key and value at `positions`.

    `weight` has the rows of q, then k, then v, one head after the other. The other rows of the caches do not change.

    >>> cache = np.zeros((1, 2, 1, 2))
    >>> weight = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 2.0], [0.0, 3.0], [0.0, 0.0]])  # one head each
    >>> q, k, v = norm_qkv(np.array([[3.0, 3.0]]), np.ones(2), weight, None, cache, cache,
    ...                    np.array([1]), np.array([np.pi / 2]), eps=0.0)
    >>> q.round(4).tolist(), k.round(4)[0, :, 0].tolist(), v.round(4)[0, :, 0].tolist()
    ([[[0.0, 1.0]]], [[0.0, 0.0], [-2.0, 0.0]], [[0.0, 0.0], [3.0, 0.0]])
    """
    batch, _, kv_heads, head_dim = k_cache.shape
    qkv = linear(rmsnorm(x, norm, eps=eps), weight, bias).reshape(batch, 1, -1, head_dim)  # one token per sequence
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=2)
    q, k = (rope_halves(part, positions[:, None], frequencies) for part in (q, k))
    k_cache, v_cache = k_cache.astype(np.float64), v_cache.astype(np.float64)
    for row, position in enumerate(positions.tolist()):
        k_cache[row, position], v_cache[row, position] = k[row, 0], v[row, 0]
    return q[:, 0], k_cache, v_cache
