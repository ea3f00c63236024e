r"""Soft caps of scores and logits (Gemma 2, 2024, https://arxiv.org/abs/2408.00118; Bello et al., 2016).

    y = c tanh(x / c)

For small x, y is close to x. It is always between -c and c, so scores cannot grow without limit in training.
"""

import numpy as np
from jaxtyping import Float


def capped(x: Float[np.ndarray, "*batch n"], *, cap: float) -> Float[np.ndarray, "*batch n"]:
    """Cap every number, in float64.

    >>> capped(np.array([0.0, 1.0, -1e9]), cap=50.0).round(4)
    array([  0.    ,   0.9999, -50.    ])
    """
    return cap * np.tanh(x.astype(np.float64, copy=False) / cap)
