r"""Rotary position embedding, RoPE (Su et al., 2021, https://arxiv.org/abs/2104.09864).

Split a head of size d into d/2 pairs. At position m, pair i turns by the angle m f_i:

    (a, b)  ->  (a cos(m f_i) - b sin(m f_i),  b cos(m f_i) + a sin(m f_i))        f_i = theta^(-2i/d)

A rotation keeps lengths, and turning q by m and k by n leaves <q, k> a function of m - n alone:
that is how attention sees distance. Fast pairs (small i) tell near tokens apart, slow ones far.

Which two features are a pair is a convention, and the two in use give different numbers:

    interleaved   (0, 1), (2, 3), ...           the paper, Meta's checkpoints, llama2.c, llama.cpp's Llamas
    halves        (0, d/2), (1, d/2 + 1), ...   Hugging Face

A checkpoint moves from one to the other by permuting the rows of its q and k projections; scores do
not change, since q and k are permuted alike. The rest of this repository computes in halves.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Shaped


@dataclass(frozen=True)
class LinearScaling:
    """Stretch a context by `factor`: position m is treated as m / factor (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rescaling: slow pairs are stretched, fast ones kept, those between blended.

    A pair's wavelength is 2 pi / f. Wavelengths above `original_context / low_frequency` divide
    their frequency by `factor`, those below `original_context / high_frequency` keep it.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_context: int


Scaling = LinearScaling | Llama3Scaling


def frequencies(head_dim: int, *, theta: float, scaling: Scaling | None = None) -> Float[np.ndarray, " pairs"]:
    """The angle, in radians, by which each pair turns per position. `head_dim` is even.

    >>> frequencies(4, theta=10_000.0)
    array([1.  , 0.01])
    >>> frequencies(4, theta=10_000.0, scaling=LinearScaling(factor=4.0))
    array([0.25  , 0.0025])
    """
    fast = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling:
        case None:
            return fast
        case LinearScaling(factor):
            return fast / factor
        case Llama3Scaling(factor, low, high, original_context):
            turns = original_context * fast / (2 * np.pi)  # full turns within the original context
            keep = np.clip((turns - low) / (high - low), 0, 1)
            return keep * fast + (1 - keep) * fast / factor


def rope_halves(
    x: Float[np.ndarray, "*batch seq heads head_dim"],
    positions: Int[np.ndarray, "*batch seq"],
    frequencies: Float[np.ndarray, " pairs"],
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Rotate every head of `x` to its position; features i and i + head_dim/2 are a pair. Float64.

    >>> x = np.array([[[1.0, 2.0, 0.0, 0.0]]])  # one token, one head
    >>> rope_halves(x, np.array([1]), np.array([np.pi / 2, np.pi])).round(4)
    array([[[ 0., -2.,  1.,  0.]]])
    """
    a, b = np.split(x.astype(np.float64, copy=False), 2, axis=-1)
    return np.concatenate(_turn(a, b, positions, frequencies), axis=-1)


def rope_interleaved(
    x: Float[np.ndarray, "*batch seq heads head_dim"],
    positions: Int[np.ndarray, "*batch seq"],
    frequencies: Float[np.ndarray, " pairs"],
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Rotate every head of `x` to its position; features 2i and 2i + 1 are a pair. Float64.

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
    """Reorder the rows of a q or k projection (or its bias) made for interleaved pairs, for use with halves.

    >>> interleaved_to_halves(np.array([0, 1, 2, 3]), heads=1)
    array([0, 2, 1, 3])
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, pairs, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def halves_to_interleaved(rows: Shaped[np.ndarray, "rows ..."], *, heads: int) -> Shaped[np.ndarray, "rows ..."]:
    """The inverse of `interleaved_to_halves`.

    >>> halves_to_interleaved(np.array([0, 2, 1, 3]), heads=1)
    array([0, 1, 2, 3])
    """
    pairs = rows.reshape(heads, 2, -1, *rows.shape[1:])  # [heads, 2, pairs, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
