r"""The logarithm of a softmax's denominator. It turns logits into log probabilities.

    L = log sum_j exp(x_j) = m + log sum_j exp(x_j - m)        m = max_j x_j        log p_i = x_i - L

After subtracting the maximum, no exponential overflows and at least one is 1 (Blanchard, Higham & Higham, 2021,
https://doi.org/10.1093/imanum/draa038). L is at least m and at most m + log n.
"""

import numpy as np
from jaxtyping import Float


def logsumexp(x: Float[np.ndarray, "rows n"]) -> Float[np.ndarray, " rows"]:
    """Compute log sum exp of each row, in float64; -inf for a row with only -inf.

    >>> logsumexp(np.log([[1.0, 3.0, 4.0]])).round(4), np.log(8).round(4)
    (array([2.0794]), np.float64(2.0794))
    >>> logsumexp(np.array([[1000.0, -np.inf]]))
    array([1000.])
    """
    x = x.astype(np.float64, copy=False)
    top = np.max(x, axis=-1)
    shift = np.where(np.isneginf(top), 0, top)  # -inf - -inf would be NaN
    with np.errstate(divide="ignore"):
        return shift + np.log(np.sum(np.exp(x - shift[:, None]), axis=-1))
