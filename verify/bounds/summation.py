r"""Rounding errors of one float32 sum of known terms, by a statistical model.

A sum of n terms t_1 .. t_n >= 0 rounds n - 1 times, once for each partial sum s_k that it makes. By Theorem 2.6 of
Hallman & Ipsen (2021, https://arxiv.org/abs/2107.01604), its error is to first order the sum of these roundings, for
any order of the additions:

    e = sum_k e_k        |e_k| <= u s_k        |e| <= u A with A = sum_k s_k

The model: e_k is uniform between -u s_k and u s_k, so its variance is (u s_k)^2 / 3. (The distance between two float32
numbers is between u s_k and 2 u s_k, so the true variance is smaller.) A sum of independent uniform variables is
sub-Gaussian with the sum of their variances: it exceeds `SIGMAS` = 7 standard deviations with a probability of at most
2 e^(-49/2) < 5e-11 (Ipsen & Zhou, 2020, https://arxiv.org/abs/1906.10465, use Azuma's inequality in the same way).

Roundings are not independent if terms are equal. A partial sum is a multiple of its unit in the last place, the ulp;
so the rounding of s + t depends only on t modulo the ulp, and equal terms have equal roundings, until the ulp doubles.
In such cases, Higham & Mary (2019, https://doi.org/10.1137/18M1226312) measure errors of n u instead of sqrt(n) u. We
count terms as equal if they differ by less than a fraction of the ulp of the whole sum S. Let c be the number of terms
in the largest class of equal terms. One random number decides the roundings of a class, so by Cauchy's inequality

    variance of e <= sum over classes (sum_{k in class} u s_k)^2 / 3 <= c u^2 sum_k s_k^2 / 3 <= c u^2 S A / 3
    |e| <= u min(7 sqrt(c S A / 3), A)

The model misses one case: unequal terms that agree modulo the ulp also have equal roundings, but we count them as
independent, so a sum of such terms may have a larger error than the model allows.

The orders of a sum differ in A, and so in the error that the model allows, if the n terms are about equally large:

    order                    A               all terms differ (c = 1)     all terms are equal (c = n)
    running                  n S / 2         2.9 sqrt(n) u S              n u S / 2
    sqrt(n) blocks           sqrt(n) S       4.0 n^(1/4) u S              sqrt(n) u S
    pairwise                 log2(n) S       4.0 sqrt(log2(n)) u S        log2(n) u S

Blocks are running sums of sqrt(n) terms, and then a running sum of their sqrt(n) totals: each of the two steps has
partial sums of sqrt(n) S / 2 in total. A pairwise sum has log2(n) levels, and the partial sums of a level add up to S.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from llamaspec.verify.bounds.precision import U

SIGMAS = 7.0  # standard deviations that the model allows
PER_ULP = 4  # terms that agree to an ulp of the sum, divided by this number, count as equal


class Roundings(NamedTuple):
    """The rounding errors that the model allows in a sum, for two orders of its additions."""

    running: Float[np.ndarray, "..."]  # one term after the other
    blocked: Float[np.ndarray, "..."]  # in sqrt(n) blocks
    terms: Integer[np.ndarray, "..."]  # n, without terms that are too small to count

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Roundings":
        """Apply `change`, which only moves elements, to every array."""
        return Roundings(*map(change, self))

    def plus(self, other: "Roundings") -> "Roundings":
        """Add the errors of two sums that a result depends on."""
        return Roundings(
            self.running + other.running, self.blocked + other.blocked, np.maximum(self.terms, other.terms)
        )


def no_sum() -> Roundings:
    """Return the model of a result without a long sum: it allows no rounding errors."""
    return Roundings(np.zeros(()), np.zeros(()), np.zeros((), int))


def roundings(
    weights: Float[np.ndarray, "... n"], add: Callable[[Float[np.ndarray, "... n"]], Float[np.ndarray, "... m"]]
) -> Roundings:
    """Return the errors that the model allows in float32 sums of `weights`, or of weights times factors.

    `add` computes the exact sums, and may multiply by the factors: `lambda weights: weights @ np.abs(v)`. Weights and
    factors must be >= 0. The running sum may begin with the first or with the last term. A term below u S,
    where S is the exact sum, changes the computed sum by at most its own size, so we add its size to the error.

    >>> equal = roundings(np.ones((1, 8192)), lambda weights: weights.sum(axis=-1, keepdims=True))
    >>> (equal.running / 8192 / U).round(), (equal.blocked / 8192 / U).round()
    (array([[4096.]]), array([[92.]]))
    """
    total = weights.sum(axis=-1, keepdims=True)
    counts = weights > U * total
    terms = np.count_nonzero(counts, axis=-1, keepdims=True)
    place = np.cumsum(counts, axis=-1) - 1  # [... n], of each term among the terms that count
    large = np.where(counts, weights, 0)
    sums = add(large)
    below = add(weights) - sums
    repeats = _repeats(weights, total, counts)
    blocks = np.maximum(np.ceil(np.sqrt(terms)), 1)

    backward = terms - 1 - place

    # A term is part of all partial sums that follow it: here are their numbers, for each term.
    running = np.maximum(add(large * (backward + 1)), add(large * (place + 1)))
    blocked = np.maximum(
        *(add(large * (2 * blocks - order % blocks - order // blocks)) for order in (place, backward))
    )  # in the term's own block, and among the totals of blocks
    return Roundings(
        _allowed(sums, running, repeats) + below,
        _allowed(sums, blocked, np.minimum(repeats, blocks)) + below,
        np.broadcast_to(terms, sums.shape),
    )


def _allowed(total: np.ndarray, partial: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    """Return u min(7 sqrt(c S A / 3), A), the largest error that the model allows.

    S is `total`, A is `partial`, and c is `repeats`.
    """
    return U * np.minimum(SIGMAS * np.sqrt(repeats * total * partial / 3), partial)


def _repeats(weights: np.ndarray, total: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Count the largest class of equal weights, for each sum."""
    if not weights.shape[-1]:
        return np.ones(total.shape)
    places = np.arange(weights.shape[-1])
    classes = np.floor(weights * (PER_ULP / (2 * U)) / np.where(total > 0, total, 1))
    classes = np.sort(np.where(counts, classes, -1.0 - places), axis=-1)
    starts = np.concatenate([np.ones_like(classes[..., :1], bool), np.diff(classes, axis=-1) != 0], axis=-1)
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=-1)
    return np.max(places - first, axis=-1, keepdims=True) + 1.0
