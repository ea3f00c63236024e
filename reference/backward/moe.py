r"""Backward of a mixture of experts (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538).

    y = sum_{e in T} w_e f_e(x)        w_e = p_e / sum_{t in T} p_t        p = softmax(W_r x)

T are the chosen experts, and W_r x the scores of all experts. The gradient of the output of f_e is w_e dy, and goes
back through f_e as in any feed-forward layer. The gradient of w_e is dw_e = <dy, f_e(x)>. The weights w_e are a softmax
over only the scores of T. So these scores get the gradient of a softmax, and all other scores get 0. The choice of T
itself is a step function with gradient 0. If the weights are not renormalized, w_e = p_e, and the softmax over all
experts passes dw back to all scores.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.backward.linear import linear_backward
from llamaspec.reference.backward.softmax import softmax_backward
from llamaspec.reference.backward.swiglu import swiglu_backward
from llamaspec.reference.linear import linear
from llamaspec.reference.moe import route
from llamaspec.reference.softmax import softmax
from llamaspec.reference.swiglu import swiglu


def moe_backward(
    x: Float[np.ndarray, "tokens dim"],
    router: Float[np.ndarray, "experts dim"],
    gate: Float[np.ndarray, "experts ffn dim"],
    up: Float[np.ndarray, "experts ffn dim"],
    down: Float[np.ndarray, "experts dim ffn"],
    dy: Float[np.ndarray, "tokens dim"],
    *,
    experts_per_token: int,
    renormalized: bool = True,
) -> tuple[
    Float[np.ndarray, "tokens dim"],
    Float[np.ndarray, "experts dim"],
    Float[np.ndarray, "experts ffn dim"],
    Float[np.ndarray, "experts ffn dim"],
    Float[np.ndarray, "experts dim ffn"],
]:
    """Compute the gradients of `reference.moe.moe` for x, the router, gate, up and down, in float64.

    >>> one = np.ones((2, 1, 1))
    >>> x, router, dy = np.array([[2.0]]), np.array([[0.0], [9.0]]), np.array([[1.0]])
    >>> moe_backward(x, router, one, one, one, dy, experts_per_token=1)[0].round(4)  # the slope of silu(x) x at 2
    array([[3.9432]])
    """
    x, dy = x.astype(np.float64, copy=False), dy.astype(np.float64, copy=False)
    chosen, weights = route(x, router, experts_per_token=experts_per_token, renormalized=renormalized)
    dx, dweights = np.zeros(x.shape), np.zeros(weights.shape)
    dgate, dup, ddown = (np.zeros(a.shape) for a in (gate, up, down))
    for expert in range(len(router)):
        token, rank = np.nonzero(chosen == expert)
        a, b = linear(x[token], gate[expert]), linear(x[token], up[expert])
        hidden = swiglu(a, b)
        dweights[token, rank] = np.sum(dy[token] * linear(hidden, down[expert]), axis=-1)
        dhidden, ddown[expert], _ = linear_backward(hidden, down[expert], weights[token, rank, None] * dy[token])
        da, db = swiglu_backward(a, b, dhidden)
        by_gate, dgate[expert], _ = linear_backward(x[token], gate[expert], da)
        by_up, dup[expert], _ = linear_backward(x[token], up[expert], db)
        dx[token] += by_gate + by_up
    if renormalized:
        dscores = np.zeros((len(x), len(router)))
        np.put_along_axis(dscores, chosen, softmax_backward(weights, dweights), axis=-1)
    else:
        dp = np.zeros((len(x), len(router)))
        np.put_along_axis(dp, chosen, dweights, axis=-1)
        dscores = softmax_backward(softmax(linear(x, router)), dp)
    by_router, drouter, _ = linear_backward(x, router, dscores)
    return dx + by_router, drouter, dgate, dup, ddown
