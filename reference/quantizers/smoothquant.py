r"""SmoothQuant: move the difficulty of quantizing from the activations to the weights.

    s_j = max |X_j|^alpha / max |W_j|^(1 - alpha)        W x = (W diag(s)) (x / s)

(Xiao et al., 2022, https://arxiv.org/abs/2211.10438.) j is a feature of the input, X_j are its values over the
calibration tokens, and W_j is column j of W. In every token, a few features are a hundred times larger than the others.
If a token has a single scale, the other features keep only a few digits. So we divide feature j by s_j and multiply
column j by s_j, which does not change the product. The division costs nothing at run time, because we divide the weight
of the norm before the layer instead (`fold`). Then W diag(s) and x / s are quantized as usual, with one scale per row
of weights and per token (`symmetric`, block (1, cols)).

Guaranteed: for alpha = 1/2, feature j of X / s and column j of W diag(s) have the same largest magnitude, sqrt(max
|X_j| max |W_j|). The reason is that s_j^2 = max |X_j| / max |W_j|. The product W x changes only by the rounding of W
diag(s) and x / s. If X_j or W_j is all zeros, s_j = 1. Layers with a common input (q, k and v; gate and up) have a
common s. To compute it, stack their rows in one W.

Sign: -X and -W have the same s as X and W. Powers of two: 2^k X and 2^k W have 2^(k (2 alpha - 1)) s, which is s for
alpha = 1/2. Fixed point: for alpha = 1/2, smoothing X / s and W diag(s) again gives factors of 1 (up to float64
rounding). The quantized tensors have the laws of `symmetric`, such as Q(-w) = -Q(w).
"""

import numpy as np
from jaxtyping import Float, Float64

from llamaspec.reference.quantizers import symmetric


def factors(
    x_tops: Float[np.ndarray, " cols"], w: Float[np.ndarray, "rows cols"], *, alpha: float
) -> Float64[np.ndarray, " cols"]:
    """Compute the factors s. `x_tops` has max |X_j| over the calibration tokens.

    Raises ValueError if s is not finite, or alpha is not between 0 and 1.

    >>> factors(np.array([16.0, 1.0, 0.0]), np.array([[1.0, -4.0, 2.0]]), alpha=0.5)
    array([4. , 0.5, 1. ])
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    w_tops = np.max(np.abs(w.astype(np.float64)), axis=0)
    x_tops = x_tops.astype(np.float64)
    if not (np.isfinite(x_tops).all() and np.isfinite(w_tops).all()):
        raise ValueError("activations and weights must be finite, but some are NaN or infinite")
    dead = (x_tops == 0) | (w_tops == 0)
    return np.where(dead, 1, x_tops**alpha / np.where(dead, 1, w_tops) ** (1 - alpha))


def smooth(w: Float[np.ndarray, "rows cols"], s: Float64[np.ndarray, " cols"]) -> Float64[np.ndarray, "rows cols"]:
    """Return W diag(s): multiply column j of `w` by s_j.

    >>> smooth(np.array([[1.0, -4.0]]), np.array([4.0, 0.5]))
    array([[ 4., -2.]])
    """
    return w.astype(np.float64) * s


def fold(norm: Float[np.ndarray, " cols"], s: Float64[np.ndarray, " cols"]) -> Float64[np.ndarray, " cols"]:
    """Divide the weight of the norm before the layer by s, so that the norm returns x / s.

    >>> fold(np.array([1.0, 2.0]), np.array([4.0, 0.5]))
    array([0.25, 4.  ])
    """
    return norm.astype(np.float64) / s


def activations(x: Float[np.ndarray, "*batch cols"]) -> Float64[np.ndarray, "*batch cols"]:
    """Round x / s to int8, with one scale per token, computed at run time ("per-token, dynamic" in the paper).

    We divide by fl(max |x| / 127). vLLM's kernels multiply by fl(127 / max |x|), so the results may differ near ties.
    Raises ValueError unless all numbers are finite.

    >>> activations(np.array([[127.0, 2.5], [0.0, 0.0]]))
    array([[127.,   2.],
           [  0.,   0.]])
    """
    return symmetric.dequantize(symmetric.quantize(x, bits=8, block=(1,) * (x.ndim - 1) + x.shape[-1:]))
