r"""From logits to a token: filters that shape a distribution, and the draw.

Everything before the draw computes a distribution over the vocabulary, so it can be tested without
randomness. `distribution` applies the filters in this order:

    repetition penalty   logit <- logit / r if logit > 0, else logit r, for tokens seen before
                         (Keskar et al., 2019, https://arxiv.org/abs/1909.05858, always divide; Hugging
                         Face's fix is to multiply negative logits)
    temperature          p = softmax(logits / T); T = 0 is greedy: all probability on the largest logit
    top-k                keep a token if fewer than k are more probable
                         (Fan et al., 2018, https://arxiv.org/abs/1805.04833)
    top-p                keep a token if the more probable tokens together have less than `top_p`
                         (Holtzman et al., 2019, https://arxiv.org/abs/1904.09751)
    min-p                keep a token if its probability is at least `min_p` times the largest one
                         (Nguyen et al., 2024, https://arxiv.org/abs/2407.01082)

Each filter is followed by a renormalization. Tokens of equal probability are kept or dropped together,
so no filter depends on the order of a sort. The draw maps one uniform number u to a token by the
inverse cumulative distribution, in the order of the vocabulary. The same u and the same distribution
always give the same token, in any implementation.
"""

import numpy as np
from jaxtyping import Bool, Float

from llamaspec.reference.softmax import softmax


def penalize(
    logits: Float[np.ndarray, " vocab"], seen: Bool[np.ndarray, " vocab"], *, penalty: float
) -> Float[np.ndarray, " vocab"]:
    """Make `seen` tokens less likely. A penalty of 1 changes nothing.

    >>> penalize(np.array([2.0, -2.0, 2.0]), np.array([True, True, False]), penalty=2.0)
    array([ 1., -4.,  2.])
    """
    logits = logits.astype(np.float64)
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def temper(logits: Float[np.ndarray, " vocab"], *, temperature: float) -> Float[np.ndarray, " vocab"]:
    """Compute the distribution at a temperature. At 0, the largest logit gets probability 1 (the lowest index on ties).

    >>> temper(np.log([1.0, 3.0, 4.0]), temperature=1.0)
    array([0.125, 0.375, 0.5  ])
    >>> temper(np.array([1.0, 7.0, 7.0]), temperature=0.0)
    array([0., 1., 0.])
    """
    logits = logits.astype(np.float64)
    if temperature == 0:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
    below = logits - np.max(logits)  # shift first, so that a small temperature does not overflow
    with np.errstate(over="ignore"):
        return softmax(below / temperature)


def keep_top_k(p: Float[np.ndarray, " vocab"], *, k: int) -> Float[np.ndarray, " vocab"]:
    """Keep the `k` most probable tokens, or more if the last ones tie. 0 keeps all.

    >>> keep_top_k(np.array([0.5, 0.125, 0.25, 0.125]), k=2).round(4)
    array([0.6667, 0.    , 0.3333, 0.    ])
    """
    if k == 0 or k >= len(p):
        return p
    return _keep(p, p >= np.sort(p)[-k])


def keep_top_p(p: Float[np.ndarray, " vocab"], *, top_p: float) -> Float[np.ndarray, " vocab"]:
    """Keep the most probable tokens that together reach `top_p`, a number above 0. 1 keeps all.

    >>> keep_top_p(np.array([0.5, 0.125, 0.25, 0.125]), top_p=0.6).round(4)
    array([0.6667, 0.    , 0.3333, 0.    ])
    """
    if top_p >= 1:
        return p
    order = np.argsort(p)[::-1]
    before = np.cumsum(p[order]) - p[order]  # probability of all tokens before in the order
    rank = np.searchsorted(-p[order], -p)  # the first place in the order with this probability
    return _keep(p, before[rank] < top_p)


def keep_min_p(p: Float[np.ndarray, " vocab"], *, min_p: float) -> Float[np.ndarray, " vocab"]:
    """Keep tokens with at least `min_p` times the largest probability. 0 keeps all.

    >>> keep_min_p(np.array([0.5, 0.125, 0.25, 0.125]), min_p=0.5).round(4)
    array([0.6667, 0.    , 0.3333, 0.    ])
    """
    return _keep(p, p >= min_p * np.max(p))


def distribution(
    logits: Float[np.ndarray, " vocab"],
    seen: Bool[np.ndarray, " vocab"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> Float[np.ndarray, " vocab"]:
    """Compute the distribution of the next token: apply all filters, in the order of this module's docstring.

    >>> distribution(np.log([1.0, 3.0, 4.0]), np.array([False, False, True]),
    ...              temperature=1.0, top_k=2, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    array([0.        , 0.42857143, 0.57142857])
    """
    p = temper(penalize(logits, seen, penalty=repetition_penalty), temperature=temperature)
    return keep_min_p(keep_top_p(keep_top_k(p, k=top_k), top_p=top_p), min_p=min_p)


def draw(p: Float[np.ndarray, " vocab"], u: float) -> int:
    """Return the first token with a cumulative probability above `u`. `u` is a random number in [0, 1).

    >>> p = np.array([0.0, 0.25, 0.75])
    >>> draw(p, 0.0), draw(p, 0.2), draw(p, 0.25)
    (1, 1, 2)
    """
    cumulative = np.cumsum(p)
    return int(np.argmax(cumulative > u * cumulative[-1]))


def _keep(p: np.ndarray, mask: np.ndarray) -> np.ndarray:
    p = np.where(mask, p, 0)
    return p / p.sum()
