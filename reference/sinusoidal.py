r"""Sinusoidal positions, added to the embeddings (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, 3.5).

    P_(m, 2i) = sin(m f_i)        P_(m, 2i+1) = cos(m f_i)        f_i = theta^(-2i/dim),  theta = 10,000

m is the position and i the index of a pair of features. A pair is like the hand of a clock. The fastest hand rotates by
one radian per token, and the slowest needs about 2 pi theta tokens for a full rotation. Moving by n tokens rotates hand
i by n f_i, from any position m: P_(m+n) = R_n P_m with a rotation R_n. The product

    <P_m, P_n> = sum_i cos((m - n) f_i)        |P_m|^2 = dim / 2

depends only on the distance m - n. But attention uses x + P in place of P. So the score <W_q (x + P_m), W_k (y + P_n)>
of tokens x and y also contains products of tokens and positions, and is not a function of m - n. `rope` instead rotates
q and k themselves by R in every layer. Then positions enter a score only through m - n.

No Llama uses this. Read it before `rope`, which has the same frequencies.
"""

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.rope import frequencies


def sinusoidal(
    positions: Int[np.ndarray, "*batch seq"], *, dim: int, theta: float = 10_000.0
) -> Float[np.ndarray, "*batch seq dim"]:
    """Compute the vector P of each position, in float64. `dim` is even.

    >>> sinusoidal(np.array([0, 1]), dim=4).round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]])
    """
    angles = positions[..., None] * frequencies(dim, theta=theta)  # [*batch, seq, dim / 2]
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions.shape, dim)
