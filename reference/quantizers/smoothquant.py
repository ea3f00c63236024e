r"""SmoothQuant: what is hard to quantize is moved from the activations to the weights.

    s_j = max |X_j|^alpha / max |W_j|^(1 - alpha)        W x = (W diag(s)) (x / s)

over the features j of the input (Xiao et al., 2022, https://arxiv.org/abs/2211.10438). A few of them are a
hundred times larger than the others in every token, which costs the others their digits when a token has one
scale. The product is the same; dividing x by s costs nothing at run time, since the norm before it has a
weight to divide (`fold`). Afterwards W diag(s) and x / s are quantized as usual: a row of weights, a token of
activations (`symmetric`, a block (1, cols)).

Guaranteed: for alpha = 1/2 each feature's largest number is the same on both sides, the root of
max |X_j| max |W_j|, as s_j^2 = max |X_j| / max |W_j| turns max |X_j| / s_j and max |W_j| s_j into it; the product
changes by the roundings of s W and x / s alone. Features that are 0 in all of X or in all of W have s = 1. Layers
with the same input (q, k and v; gate and up) share s: W is all their rows. Signs leave s as it is, and 2^k X with 2^k
W turn it into 2^(k (2 alpha - 1)) s: at 1/2 powers of two change nothing. There what is smoothed is a fixed point,
too: its s is 1 (all up to float64's roundings). The laws of what is then rounded are those of `symmetric`, so that
Q(-w) = -Q(w).
"""

import numpy as np
from jaxtyping import Float, Float64

from llamaspec.reference.quantizers import symmetric


def factors(
    x_tops: Float[np.ndarray, " cols"], w: Float[np.ndarray, "rows cols"], *, alpha: float
) -> Float64[np.ndarray, " cols"]:
    """s, where `x_tops` is max |X_j| over the calibration's tokens.

    Raises ValueError where s is not finite, or alpha not between 0 and 1.

    >>> factors(np.array([16.0, 1.0, 0.0]), np.array([[1.0, -4.0, 2.0]]), alpha=0.5)
    array([4. , 0.5, 1. ])
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha}")
    w_tops = np.max(np.abs(w.astype(np.float64)), axis=0)
    x_tops = x_tops.astype(np.float64)
    if not (np.isfinite(x_tops).all() and np.isfinite(w_tops).all()):
        raise ValueError("activations and weights must be finite")
    dead = (x_tops == 0) | (w_tops == 0)
    return np.where(dead, 1, x_tops**alpha / np.where(dead, 1, w_tops) ** (1 - alpha))


def smooth(w: Float[np.ndarray, "rows cols"], s: Float64[np.ndarray, " cols"]) -> Float64[np.ndarray, "rows cols"]:
    """W diag(s).

    >>> smooth(np.array([[1.0, -4.0]]), np.array([4.0, 0.5]))
    array([[ 4., -2.]])
    """
    return w.astype(np.float64) * s


def fold(norm: Float[np.ndarray, " cols"], s: Float64[np.ndarray, " cols"]) -> Float64[np.ndarray, " cols"]:
    """The weight of the norm before the layer, such that it gives x / s.

    >>> fold(np.array([1.0, 2.0]), np.array([4.0, 0.5]))
    array([0.25, 4.  ])
    """
    return norm.astype(np.float64) / s


def activations(x: Float[np.ndarray, "*batch cols"]) -> Float64[np.ndarray, "*batch cols"]:
    """Round x / s to int8: a token has a scale of its own, found as it comes ("per-token, dynamic" in the paper).

    vLLM's kernels multiply by fl(127 / max |x|), where this divides by fl(max |x| / 127): near ties they may differ.
    Raises ValueError unless all is finite.

    >>> activations(np.array([[127.0, 2.5], [0.0, 0.0]]))
    array([[127.,   2.],
           [  0.,   0.]])
    """
    return symmetric.dequantize(symmetric.quantize(x, bits=8, block=(1,) * (x.ndim - 1) + x.shape[-1:]))
