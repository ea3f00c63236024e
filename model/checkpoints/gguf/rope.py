r"""Llama 3's rescaling of RoPE in GGUF: rope_freqs.weight has a factor for each pair, which divides its frequency.

The factors follow from the four numbers of `reference.rope.Llama3Scaling`: factor, low, high and original (the context
before rescaling). A file need not hold these numbers, so we find them from the factors. For pair i with the unscaled
frequency f_i,

    1 / factor_i = k_i + (1 - k_i) / factor        k_i = clip(slope f_i + shift, 0, 1)
    slope = original / (2 pi (high - low))         shift = -low / (high - low)

So the largest factor is `factor`. The factors do not determine `original`: for each value there are a low and a high,
both proportional to it, that give the same factors.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Float, Float32

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.reference.rope import LinearScaling, Llama3Scaling, Scaling, frequencies

ORIGINAL_CONTEXT = 8192  # of Llama 3, the origin of all rescaled Llamas
USUAL = (1.0, 4.0)  # low and high of Llama 3; few pairs may not determine them

# llama.cpp computes k in float32: a power, a wavelength, a quotient, a difference and a quotient. The error of k is
# about 16 roundings of numbers up to high / (high - low), 4/3 in Llama 3. `factor` multiplies this error at most.
ROUNDINGS = 32 * 2.0**-24


def to_factors(scaling: Llama3Scaling, *, head_dim: int, theta: float) -> Float32[np.ndarray, " pairs"]:
    """Return the factor of each pair."""
    unscaled = frequencies(head_dim, theta=theta)
    return (unscaled / frequencies(head_dim, theta=theta, scaling=scaling)).astype(np.float32)


def from_factors(
    factors: Float[np.ndarray, " pairs"], *, head_dim: int, theta: float, path: str, original_context: int | None = None
) -> Scaling | None:
    """Find a rescaling with these factors, up to float32's roundings. Raises `CheckpointError` if there is none.

    >>> llama3 = Llama3Scaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=8192)
    >>> factors = to_factors(llama3, head_dim=128, theta=500_000.0)
    >>> from_factors(factors, head_dim=128, theta=500_000.0, path="x.gguf") == llama3
    True
    """
    with np.errstate(invalid="ignore"):  # a signaling NaN
        factors = factors.astype(np.float64)
    if factors.shape != (head_dim // 2,):
        raise refused(path, f"rope_freqs.weight has {factors.size} factors, but heads of {head_dim} have half as many")
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise refused(path, "rope_freqs.weight holds a factor that is not a positive number")
    if np.all(factors == factors[0]):
        return None if factors[0] == 1 else LinearScaling(float(factors[0]))

    with np.errstate(all="ignore"):  # meaningless factors give NaN
        scaling = _fitted(factors, head_dim, theta, original_context or ORIGINAL_CONTEXT)
    if scaling is None:
        raise refused(path, "rope_freqs.weight holds factors that are not those of Llama 3's rescaling of RoPE")
    return scaling


def _fitted(factors: Float[np.ndarray, " pairs"], head_dim: int, theta: float, original: int) -> Llama3Scaling | None:
    factor, unscaled = float(np.max(factors)), frequencies(head_dim, theta=theta)
    line = _line(unscaled, (1 / factors - 1 / factor) / (1 - 1 / factor), blur=ROUNDINGS * factor)
    if line is None:
        return None
    slope, shift = line
    low, high = (original * (k - shift) / (2 * np.pi * slope) for k in (0, 1))
    rounded = float(f"{low:.4g}"), float(f"{high:.4g}")
    for low_frequency, high_frequency in (
        USUAL,
        rounded,
        (low, high),
    ):  # We prefer round numbers if they fit.
        scaling = Llama3Scaling(factor, float(low_frequency), float(high_frequency), original)
        if 0 < scaling.low_frequency < scaling.high_frequency:
            again = unscaled / frequencies(head_dim, theta=theta, scaling=scaling)
            if np.all(np.abs(again - factors) <= ROUNDINGS * factor * factors):
                return scaling
    return None


def _line(f: Float[np.ndarray, " pairs"], k: Float[np.ndarray, " pairs"], *, blur: float) -> tuple[float, float] | None:
    """Fit the line k = slope f + shift to the pairs with k between 0 and 1; returns slope and shift.

    The line is also at most 0 where k is 0, and at least 1 where k is 1. `f` must fall from pair to pair, and `blur` is
    the error of k. Returns None if k rises, or is 0 for no pair.
    """
    zeros, ones = np.flatnonzero(k <= blur), np.flatnonzero(k >= 1 - blur)
    between = np.flatnonzero((k > blur) & (k < 1 - blur))
    if not zeros.size or np.any(np.diff(k) > blur):
        return None
    slow = (f[zeros[0]], 0.0)  # the fastest fully scaled pair
    fast = (f[ones[-1]], 1.0) if ones.size else None
    points = [(f[i], k[i]) for i in between]
    if len(points) >= 2:
        slope = (points[0][1] - points[-1][1]) / (points[0][0] - points[-1][0])
    else:  # Fewer than two points do not determine it: we take the least slope that fits zeros and ones.
        anchors = [slow, *points, *([fast] if fast else [])]
        steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(anchors)]
        slope = max(steps)
    at, value = points[0] if points else slow
    return (slope, value - slope * at) if slope > 0 else None
