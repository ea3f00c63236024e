r"""Converts Llama 3's rescaling of RoPE to and from the GGUF tensor rope_freqs.weight.

The tensor has one factor for each pair of features; RoPE divides the pair's frequency by this factor. The factors
follow from the four numbers of `reference.rope.Llama3Scaling`: factor, low, high and original (the context before
rescaling). A GGUF file may lack these numbers, so we compute them from the factors. For pair i with the unscaled
frequency f_i,

    1 / factor_i = k_i + (1 - k_i) / factor        k_i = clip(slope f_i + shift, 0, 1)
    slope = original / (2 pi (high - low))         shift = -low / (high - low)

So the largest of the factors is `factor`. The factors do not determine `original`: if we multiply original, low and
high by the same number, the factors stay the same.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Float, Float32

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.reference.rope import LinearScaling, Llama3Scaling, Scaling, frequencies

ORIGINAL_CONTEXT = 8192  # the context of Llama 3, from which all rescaled Llamas derive
USUAL = (1.0, 4.0)  # low and high of Llama 3, which we prefer if the factors do not determine low and high

# llama.cpp computes k in float32: a power, a wavelength, a quotient, a difference and a quotient. The error of k is
# about 16 roundings of numbers up to high / (high - low), 4/3 in Llama 3. The error of a factor is at most `factor`
# times as large.
ROUNDINGS = 32 * 2.0**-24


def to_factors(scaling: Llama3Scaling, *, head_dim: int, theta: float) -> Float32[np.ndarray, " pairs"]:
    """Compute the contents of rope_freqs.weight: the factor for each pair of features."""
    unscaled = frequencies(head_dim, theta=theta)
    return (unscaled / frequencies(head_dim, theta=theta, scaling=scaling)).astype(np.float32)


def from_factors(
    factors: Float[np.ndarray, " pairs"], *, head_dim: int, theta: float, path: str, original_context: int | None = None
) -> Scaling | None:
    """Find the rescaling of RoPE that has these factors, up to rounding in float32; None if all factors are 1.

    Raises `CheckpointError` if neither a linear rescaling nor Llama 3's has these factors.

    >>> llama3 = Llama3Scaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=8192)
    >>> factors = to_factors(llama3, head_dim=128, theta=500_000.0)
    >>> from_factors(factors, head_dim=128, theta=500_000.0, path="x.gguf") == llama3
    True
    """
    with np.errstate(invalid="ignore"):  # a signaling NaN
        factors = factors.astype(np.float64)
    if factors.shape != (head_dim // 2,):
        what = f"expected {head_dim // 2}: half of head_dim, {head_dim}"
        raise refused(path, f"the tensor rope_freqs.weight has {factors.size} factors, {what}")
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise refused(path, "rope_freqs.weight holds a factor that is not a positive number")
    if np.all(factors == factors[0]):
        return None if factors[0] == 1 else LinearScaling(float(factors[0]))

    with np.errstate(all="ignore"):  # meaningless factors give NaN
        scaling = _fitted(factors, head_dim, theta, original_context or ORIGINAL_CONTEXT)
    if scaling is None:
        raise refused(path, "the factors in rope_freqs.weight do not fit Llama 3's rescaling of RoPE")
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
    """Fit the line k = slope f + shift to the pairs with k between 0 and 1; return slope and shift.

    For the pairs with k = 0, the line is at most 0. For the pairs with k = 1, it is at least 1. `f` must decrease from
    pair to pair. `blur` is the largest rounding error of k. Returns None if k increases from pair to pair, or if no
    pair has k = 0.
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
    else:  # Fewer than two points do not determine the slope: we use the least slope that fits zeros and ones.
        anchors = [slow, *points, *([fast] if fast else [])]
        steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(anchors)]
        slope = max(steps)
    at, value = points[0] if points else slow
    return (slope, value - slope * at) if slope > 0 else None
