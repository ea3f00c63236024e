r"""A mixture of experts (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538), as Mixtral routes it.

    p = softmax(W_r x)        T = the n most probable experts        y = sum_{e in T} p_e / (sum_{t in T} p_t) f_e(x)

Each expert f_e is a separate SwiGLU feed-forward layer. The softmax is over all experts. Then the probabilities of the
chosen experts are divided by their sum (Mixtral, https://arxiv.org/abs/2401.04088). The result equals a softmax over
only the chosen experts. Qwen3-MoE (https://arxiv.org/abs/2505.09388) may skip this division: y = sum_{e in T} p_e
f_e(x). All experts must be stored, but only n of them are read per token. Qwen2-MoE (https://arxiv.org/abs/2407.10671)
adds a shared expert, sigmoid(w x) f_s(x), for every token. In gpt-oss (https://arxiv.org/abs/2508.10925) the router and
the experts have biases, and each f_e is a clamped SwiGLU layer.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.clamped_swiglu import clamped_swiglu
from llamaspec.reference.linear import linear
from llamaspec.reference.softmax import softmax
from llamaspec.reference.swiglu import swiglu


class Biases(NamedTuple):
    """The biases of a router and its experts."""

    router: Float[np.ndarray, " experts"]
    gate: Float[np.ndarray, "experts ffn"]
    up: Float[np.ndarray, "experts ffn"]
    down: Float[np.ndarray, "experts dim"]


def route(
    x: Float[np.ndarray, "tokens dim"],
    router: Float[np.ndarray, "experts dim"],
    *,
    experts_per_token: int,
    renormalized: bool = True,
    bias: Float[np.ndarray, " experts"] | None = None,
) -> tuple[Int[np.ndarray, "tokens chosen"], Float[np.ndarray, "tokens chosen"]]:
    """Choose the experts of each token, the most probable first, and compute their weights.

    Among equally probable experts, the one with the lower index comes first.

    >>> route(np.array([[1.0]]), np.log([[1.0], [6.0], [3.0]]), experts_per_token=2)
    (array([[1, 2]]), array([[0.66666667, 0.33333333]]))
    >>> route(np.array([[1.0]]), np.log([[1.0], [6.0], [3.0]]), experts_per_token=2, renormalized=False)
    (array([[1, 2]]), array([[0.6, 0.3]]))
    """
    p = softmax(linear(x, router, bias))
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, :experts_per_token]
    weights = np.take_along_axis(p, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True) if renormalized else weights


def moe(
    x: Float[np.ndarray, "tokens dim"],
    router: Float[np.ndarray, "experts dim"],
    gate: Float[np.ndarray, "experts ffn dim"],
    up: Float[np.ndarray, "experts ffn dim"],
    down: Float[np.ndarray, "experts dim ffn"],
    *,
    experts_per_token: int,
    renormalized: bool = True,
    biases: Biases | None = None,
    gated: Callable[[np.ndarray, np.ndarray], np.ndarray] = swiglu,
) -> Float[np.ndarray, "tokens dim"]:
    """Send each token through its experts and add their weighted outputs, in float64.

    `gated(a, b)` is the nonlinearity of an expert, for a = gate x and b = up x.

    >>> one = np.ones((2, 1, 1))
    >>> moe(np.array([[2.0]]), np.array([[0.0], [9.0]]), one, one, one, experts_per_token=1).round(4)  # silu(2) 2
    array([[3.5232]])
    """
    y = np.zeros(x.shape, np.float64)
    bias = None if biases is None else biases.router
    chosen, weights = route(x, router, experts_per_token=experts_per_token, renormalized=renormalized, bias=bias)
    for expert in range(len(router)):
        token, rank = np.nonzero(chosen == expert)
        by_gate, by_up, by_down = (None, None, None) if biases is None else (vectors[expert] for vectors in biases[1:])
        hidden = gated(linear(x[token], gate[expert], by_gate), linear(x[token], up[expert], by_up))
        y[token] += weights[token, rank, None] * linear(hidden, down[expert], by_down)
    return y


def biased_moe(
    x: Float[np.ndarray, "tokens dim"],
    router: Float[np.ndarray, "experts dim"],
    gate: Float[np.ndarray, "experts ffn dim"],
    up: Float[np.ndarray, "experts ffn dim"],
    down: Float[np.ndarray, "experts dim ffn"],
    router_bias: Float[np.ndarray, " experts"],
    gate_bias: Float[np.ndarray, "experts ffn"],
    up_bias: Float[np.ndarray, "experts ffn"],
    down_bias: Float[np.ndarray, "experts dim"],
    *,
    experts_per_token: int,
) -> Float[np.ndarray, "tokens dim"]:
    """Send each token through its experts as in gpt-oss, with biases and clamped SwiGLU, in float64.

    >>> one, no, yes = np.ones((2, 1, 1)), np.zeros((2, 1)), np.ones((2, 1))
    >>> biased_moe(one[0], one[:, 0], one, one, one, np.array([0.0, 9.0]), no, no, yes, experts_per_token=1).round(4)
    ... # sigmoid(1.702) (1 + 1), and 1 from the bias
    array([[2.6916]])
    """
    biases = Biases(router_bias, gate_bias, up_bias, down_bias)
    chosen = experts_per_token
    return moe(x, router, gate, up, down, experts_per_token=chosen, biases=biases, gated=clamped_swiglu)


def shared_expert(
    x: Float[np.ndarray, "tokens dim"],
    score: Float[np.ndarray, "one dim"],
    gate: Float[np.ndarray, "shared dim"],
    up: Float[np.ndarray, "shared dim"],
    down: Float[np.ndarray, "dim shared"],
) -> Float[np.ndarray, "tokens dim"]:
    """Send every token x through the shared expert, and multiply the output by sigmoid(score x), in float64.

    >>> one = np.ones((1, 1))
    >>> shared_expert(np.array([[2.0]]), 0 * one, one, one, one).round(4)  # half of 3.5232
    array([[1.7616]])
    """
    weight = (1 + np.tanh(linear(x, score) / 2)) / 2  # the sigmoid [tokens, 1], in a form that cannot overflow
    return weight * linear(swiglu(linear(x, gate), linear(x, up)), down)
