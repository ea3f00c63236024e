r"""GeGLU, the feed-forward layer's nonlinearity in Gemma (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    y_i = gelu(a_i) b_i

Here a = W_gate x and b = W_up x. The GELU is the tanh approximation of `reference.gelu`, with which Gemma was trained.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.gelu import gelu


def geglu(
    gate: Float[np.ndarray, "*batch ffn"],
    up: Float[np.ndarray, "*batch ffn"],
) -> Float[np.ndarray, "*batch ffn"]:
    """Return gelu(gate) * up, in float64.

    >>> geglu(np.array([0.0, 1.0, -1e4]), np.array([5.0, 2.0, 1.0])).round(4)
    array([ 0.    ,  1.6824, -0.    ])
    """
    return gelu(gate) * up.astype(np.float64, copy=False)
