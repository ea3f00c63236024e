r"""Rotary position embedding, RoPE (Su et al., 2021, https://arxiv.org/abs/2104.09864).

Split the d features of a head into d/2 pairs (a, b). At position m, pair i is rotated by the angle m f_i:

    (a, b)  ->  (a cos(m f_i) - b sin(m f_i),  b cos(m f_i) + a sin(m f_i))        f_i = theta^(-2i/d)

A rotation preserves lengths. If q is at position m and k at position n, <q, k> depends on the positions only through m
- n. So attention sees the distance of two tokens. Pairs with a small i rotate fast and distinguish near tokens. Pairs
with a large i rotate slowly and distinguish distant tokens.

Two conventions say which features form a pair, and they give different numbers:

    interleaved   (0, 1), (2, 3), ...           the paper, Meta's checkpoints, llama2.c, llama.cpp's Llamas
    halves        (0, d/2), (1, d/2 + 1), ...   Hugging Face

To convert a checkpoint from one convention to the other, we permute the rows of its q and k projections. Scores do not
change, because q and k get the same permutation. The rest of this repository uses halves.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped


@dataclass(frozen=True)
class LinearScaling:
    """Linear scaling: position m is treated as m / factor (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: slow pairs become slower, fast pairs do not change, and pairs in between get a blend.

    A pair's wavelength is 2 pi / f. If it is above `original_context / low_frequency`, the frequency is divided by
    `factor`. If it is below `original_context / high_frequency`, the frequency does not change.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_context: int


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: if a text is longer than the model's context, theta grows with the length. `factor` is the rate.

    For texts up to the model's context, theta does not change. We define only this case, because in a longer text the
    queries would use a different theta from the cached keys. The only publication is
    https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr.
    """

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071): a blend that depends on the pair, and longer q and k.

    A pair that completes at least `fast` rotations within `original_context` positions keeps its frequency. A pair that
    completes at most `slow` rotations has its frequency divided by `factor`. For the pairs between these two, the blend
    of both frequencies is linear in the pair's index. This is the authors' code (https://github.com/jquesnelle/yarn),
    and every implementation follows it. In the paper's equations the blend is linear in the number of rotations
    instead. If `truncate`, the indices of the two limits are rounded outwards to integers. q and k are multiplied by
    `magnitude`, which is 0.1 ln(factor) + 1 in the paper.
    """

    factor: float
    original_context: int
    magnitude: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024, https://arxiv.org/abs/2402.13753): a factor per pair, found by search.

    `short` is for sequences of up to `original_context` tokens, `long` for sequences that may become longer. `is_long`
    chooses between them at the start of a sequence, because keys in the cache are not rotated again. q and k are
    multiplied by `magnitude`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float
    is_long: bool


Scaling = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | LongRopeScaling


def yarn_magnitude(factor: float) -> float:
    """Return the magnitude that the paper recommends for a context extended by `factor`.

    >>> yarn_magnitude(1.0), round(yarn_magnitude(4.0), 4)
    (1.0, 1.1386)
    """
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def magnitude(scaling: Scaling | None) -> float:
    """Return the factor by which a scaling multiplies q and k, in addition to their rotation."""
    return scaling.magnitude if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0


def frequencies(head_dim: int, *, theta: float, scaling: Scaling | None = None) -> Float[np.ndarray, " pairs"]:
    """Return the angle in radians by which RoPE rotates each pair per position. `head_dim` is even.

    >>> frequencies(4, theta=10_000.0)
    array([1.  , 0.01])
    >>> frequencies(4, theta=10_000.0, scaling=LinearScaling(factor=4.0))
    array([0.25  , 0.0025])
    """
    fast = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling:
        case None | DynamicScaling():
            return fast
        case LinearScaling(factor):
            return fast / factor
        case Llama3Scaling(factor, low, high, original_context):
            turns = original_context * fast / (2 * np.pi)  # full turns within the original context
            keep = np.clip((turns - low) / (high - low), 0, 1)
            return keep * fast + (1 - keep) * fast / factor
        case YarnScaling(factor, original_context, _, fastest, slowest, truncate):
            # Pair i turns original_context f_i / (2 pi) times. Solve for the i with `count` turns, usually not an
            # integer.
            first, last = (
                head_dim * math.log(original_context / (count * 2 * math.pi)) / (2 * math.log(theta))
                for count in (fastest, slowest)
            )
            if truncate:
                first, last = math.floor(first), math.ceil(last)
            # The limits of the authors' code: head_dim - 1 (although the last pair is head_dim / 2 - 1), and a nonzero
            # width.
            first, last = max(float(first), 0.0), min(float(last), head_dim - 1.0)
            width = last - first or 0.001
            stretch = np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)
            return (1 - stretch) * fast + stretch * fast / factor
        case LongRopeScaling(short, long, is_long=is_long):
            return fast / np.array(long if is_long else short)


class Rotation(NamedTuple):
    """Parameters of RoPE in a layer: an angle per position for each pair, and a factor for q and k."""

    frequencies: Float[np.ndarray, " pairs"]
    magnitude: float = 1.0


def rope_halves(
    x: Float[np.ndarray, "*batch seq heads head_dim"],
    positions: Int[np.ndarray, "*batch seq"],
    frequencies: Float[np.ndarray, " pairs"],
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Rotate every head of `x` to its position, in float64. Features i and i + pairs form a pair.

    If a head has more than 2 * pairs features, the last ones stay unchanged.

    >>> x = np.array([[[1.0, 2.0, 0.0, 0.0]]])  # one token, one head
    >>> rope_halves(x, np.array([1]), np.array([np.pi / 2, np.pi])).round(4)
    array([[[ 0., -2.,  1.,  0.]]])
    >>> rope_halves(x, np.array([1]), np.array([np.pi / 2])).round(4)
    array([[[-2.,  1.,  0.,  0.]]])
    """
    pairs = len(frequencies)
    a, b, unturned = np.split(x.astype(np.float64, copy=False), [pairs, 2 * pairs], axis=-1)
    return np.concatenate([*_turn(a, b, positions, frequencies), unturned], axis=-1)


def partial_rope(
    x: Float[np.ndarray, "*batch seq heads head_dim"],
    positions: Int[np.ndarray, "*batch seq"],
    frequencies: Float[np.ndarray, " pairs"],
    *,
    magnitude: float,
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Rotate the first features of every head, two per pair, by `rope_halves`, and multiply them by `magnitude`.

    >>> partial_rope(np.array([[[1.0, 2.0, 5.0]]]), np.array([1]), np.array([np.pi / 2]), magnitude=3.0).round(4)
    array([[[-6.,  3.,  5.]]])
    """
    turned = np.arange(x.shape[-1]) < 2 * len(frequencies)
    return rope_halves(x, positions, frequencies) * np.where(turned, magnitude, 1.0)


def rotated(
    x: Float[np.ndarray, "*batch seq heads head_dim"], positions: Int[np.ndarray, "*batch seq"], rotation: Rotation
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Rotate every head of `x` by `partial_rope`.

    >>> rotated(np.array([[[1.0, 2.0, 5.0]]]), np.array([1]), Rotation(np.array([np.pi / 2]), magnitude=3.0)).round(4)
    array([[[-6.,  3.,  5.]]])
    """
    turns, length = rotation
    return partial_rope(x, positions, turns, magnitude=length)


def rope_interleaved(
    x: Float[np.ndarray, "*batch seq heads head_dim"],
    positions: Int[np.ndarray, "*batch seq"],
    frequencies: Float[np.ndarray, " pairs"],
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Rotate every head of `x` to its position, in float64. Features 2i and 2i + 1 form a pair.

    >>> x = np.array([[[1.0, 0.0, 2.0, 0.0]]])
    >>> rope_interleaved(x, np.array([1]), np.array([np.pi / 2, np.pi])).round(4)
    array([[[ 0.,  1., -2.,  0.]]])
    """
    x = x.astype(np.float64)
    a, b = _turn(x[..., 0::2], x[..., 1::2], positions, frequencies)
    return np.stack([a, b], axis=-1).reshape(x.shape)


def _turn(a: np.ndarray, b: np.ndarray, positions: np.ndarray, frequencies: np.ndarray):
    angles = positions[..., None, None] * frequencies  # [*batch, seq, 1, pairs]
    cos, sin = np.cos(angles), np.sin(angles)
    return a * cos - b * sin, b * cos + a * sin


def interleaved_to_halves(rows: Shaped[np.ndarray, "rows ..."], *, heads: int) -> Shaped[np.ndarray, "rows ..."]:
    """Reorder the rows of a q or k projection (or its bias) from interleaved pairs to halves.

    >>> interleaved_to_halves(np.array([0, 1, 2, 3]), heads=1)
    array([0, 2, 1, 3])
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, pairs, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def halves_to_interleaved(rows: Shaped[np.ndarray, "rows ..."], *, heads: int) -> Shaped[np.ndarray, "rows ..."]:
    """Undo `interleaved_to_halves`.

    >>> halves_to_interleaved(np.array([0, 2, 1, 3]), heads=1)
    array([0, 1, 2, 3])
    """
    pairs = rows.reshape(heads, 2, -1, *rows.shape[1:])  # [heads, 2, pairs, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
