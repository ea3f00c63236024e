r"""Softmax turns scores into a distribution: all scores at once, or block by block.

    p_i = exp(x_i - m) / sum_j exp(x_j - m)        m = max_j x_j

The shift by m does not change p, but it keeps exp from overflowing: every exponent is at most 0. A
score of -inf gives a probability of exactly 0. If all scores of a row are -inf, the formula says 0/0,
and we define the result as zeros.

A kernel that reads a row block by block keeps the maximum m and the sum s so far (Milakov &
Gimelshein, 2018, https://arxiv.org/abs/1805.02867). When a block raises the maximum, the kernel
rescales the sum:

    m' = max(m, max_j x_j)        s' = s exp(m - m') + sum_j exp(x_j - m')

FlashAttention updates its weighted sum of values in the same way.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


def softmax(x: Float[np.ndarray, "*batch n"]) -> Float[np.ndarray, "*batch n"]:
    """Compute the distribution over the last axis, in float64. A row with only -inf becomes zeros.

    >>> softmax(np.array([0.0, np.log(3.0), -np.inf]))
    array([0.25, 0.75, 0.  ])
    """
    x = x.astype(np.float64, copy=False)
    weights = np.exp(x - _finite(np.max(x, axis=-1, keepdims=True, initial=-np.inf)))
    total = np.sum(weights, axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


class Running(NamedTuple):
    """State of an online softmax: a summary of the scores so far."""

    maximum: Float[np.ndarray, "*batch"]
    total: Float[np.ndarray, "*batch"]  # sum of exp(x - maximum)


def running_update(running: Running, block: Float[np.ndarray, "*batch n"]) -> Running:
    """Update the state with a block of scores. The first state is `Running(-inf, 0)`; a maximum of 0 is a classic bug.

    >>> start = Running(np.array(-np.inf), np.array(0.0))
    >>> running_update(running_update(start, np.array([1.0, 5.0])), np.array([5.0, 5.0]))  # the sum: exp(-4) + 3
    Running(maximum=array(5.), total=array(3.01831564))
    """
    block = block.astype(np.float64)
    maximum = np.asarray(np.maximum(running.maximum, np.max(block, axis=-1)))
    shift = _finite(maximum)
    rescaled = running.total * np.exp(running.maximum - shift)
    return Running(maximum, np.asarray(rescaled + np.sum(np.exp(block - shift[..., None]), axis=-1)))


def softmax_online(x: Float[np.ndarray, "*batch n"], *, block: int) -> Float[np.ndarray, "*batch n"]:
    """Compute `softmax` with the maximum and the sum of `running_update`, from `block` scores at a time.

    >>> softmax_online(np.array([0.0, np.log(3.0), -np.inf]), block=2)
    array([0.25, 0.75, 0.  ])
    """
    x = x.astype(np.float64)
    running = Running(np.full(x.shape[:-1], -np.inf), np.zeros(x.shape[:-1]))
    for start in range(0, x.shape[-1], block):
        running = running_update(running, x[..., start : start + block])
    total = np.where(running.total == 0, 1, running.total)
    return np.exp(x - _finite(running.maximum)[..., None]) / total[..., None]


def _finite(maximum: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(maximum), 0, maximum)  # -inf - -inf would be NaN
