r"""ALiBi: attention with linear biases (Press, Smith & Lewis, 2021, https://arxiv.org/abs/2108.12409).

    score_hij = <q_ih, k_jh> / sqrt(head_dim) - s_h (i - j)        s_h = 2^(-8 (h + 1) / heads),  h = 0, 1, ...

Neither embeddings nor q and k know positions; a key costs its distance times the slope of the head. The first head
looks at what is near, the last one nearly everywhere: with all else equal, a key weighs exp(-s_h) of the one after it.
Nothing is periodic and nothing is learned, so a text may be longer than any that was trained on.

The slopes above are for a number of heads that is a power of two. For others, the authors' code takes those of the
largest power of two p below, and then every other one of 2 p heads, 2^(-4/p), 2^(-12/p), ...

As a softmax does not change when a row is shifted, - s_h (i - j) may be replaced by s_h j: a number a key, whatever the
query. No Llama uses this. It is here to be compared with `rope`, which also sees distances only, by turning q and k.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.attention import causal_mask


def alibi_slopes(heads: int) -> Float[np.ndarray, " heads"]:
    """Compute s of each head. Raises ValueError for fewer than one.

    >>> alibi_slopes(4), alibi_slopes(3)
    (array([0.25      , 0.0625    , 0.015625  , 0.00390625]), array([0.0625    , 0.00390625, 0.25      ]))
    """
    if heads < 1:
        raise ValueError(f"attention has at least one head, not {heads}")
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is not above `heads`
    regular = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([regular, between])


def alibi_mask(heads: int, queries: int, keys: int, *, offset: int = 0) -> Float[np.ndarray, "heads queries keys"]:
    """Add the biases to the causal mask of `attention`. The first query is at `offset`.

    `attention` takes one mask for all heads, so heads are its batch here: q, k and v are [heads, seq, 1, head_dim].

    >>> alibi_mask(1, 2, 3, offset=1)[0] * 256
    array([[ -1.,   0., -inf],
           [ -2.,  -1.,   0.]])
    """
    distance = offset + np.arange(queries)[:, None] - np.arange(keys)
    return causal_mask(queries, keys, offset=offset) - alibi_slopes(heads)[:, None, None] * distance
