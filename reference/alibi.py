r"""ALiBi: attention with linear biases (Press, Smith & Lewis, 2021, https://arxiv.org/abs/2108.12409).

    score_hij = <q_ih, k_jh> / sqrt(head_dim) - s_h (i - j)        s_h = 2^(-8 (h + 1) / heads),  h = 0, 1, ...

i is the position of a query, j of a key, and s_h the slope of head h. Embeddings, q and k contain no positions.
Instead, a score is reduced by the distance i - j times the slope. If all <q, k> are equal, a key has exp(-s_h) times
the weight of the next key. So the first head attends mostly to near keys, and the last head to nearly all keys. The
biases are not periodic and not learned, so a text may be longer than the training texts.

The formula for s_h is for a number of heads that is a power of two. For any other number of heads, let p be the largest
power of two below it. The authors' code takes the p slopes of p heads, and then every other slope of 2 p heads:
2^(-4/p), 2^(-12/p), ...

Adding a constant to a row does not change its softmax. So an implementation may add s_h j in place of - s_h (i - j).
This is one number per key, the same for all queries. No Llama uses ALiBi. Compare it with `rope`, which rotates q and
k. There, too, scores depend on positions only through distances.
"""

import numpy as np
from jaxtyping import Float

from llamaspec.reference.attention import causal_mask


def alibi_slopes(heads: int) -> Float[np.ndarray, " heads"]:
    """Compute the slope s_h of each head. Raises ValueError if `heads` is below 1.

    >>> alibi_slopes(4), alibi_slopes(3)
    (array([0.25      , 0.0625    , 0.015625  , 0.00390625]), array([0.0625    , 0.00390625, 0.25      ]))
    """
    if heads < 1:
        raise ValueError(f"attention needs at least one head, got {heads}")
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is not above `heads`
    regular = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([regular, between])


def alibi_mask(heads: int, queries: int, keys: int, *, offset: int = 0) -> Float[np.ndarray, "heads queries keys"]:
    """Make the causal mask of `attention`, with the biases added. The first query is at position `offset`.

    `attention` uses one mask for all heads, so here heads are a batch axis: q, k and v are [heads, seq, 1, head_dim].

    >>> alibi_mask(1, 2, 3, offset=1)[0] * 256
    array([[ -1.,   0., -inf],
           [ -2.,  -1.,   0.]])
    """
    distance = offset + np.arange(queries)[:, None] - np.arange(keys)
    return causal_mask(queries, keys, offset=offset) - alibi_slopes(heads)[:, None, None] * distance
