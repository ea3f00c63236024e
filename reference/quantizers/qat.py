r"""Quantization-aware training: the forward pass rounds, the backward pass does as if it had not.

    y_i = s (q_i - z)        q_i = clip(p_i, lowest, highest)        p_i = rint(x_i / s) + z
    dL/dx_i = dL/dy_i  where  lowest <= p_i <= highest,  and 0 elsewhere

The true gradient of rounding is 0 almost everywhere. The straight-through estimator (Bengio et al., 2013,
https://arxiv.org/abs/1308.3432) takes that of the clip alone, which learns. As in PyTorch it is p,
already rounded, that decides: up to half a step beyond the grid the gradient still passes.

Guaranteed: y is a fixed point, |x - y| <= s / 2 where the gradient passes (up to float64's roundings): there nothing is
clipped, rint moves x / s by half at most, and y / s is an integer, which rint keeps. And y is what `affine` or
`symmetric` would store, if s and z are theirs. Powers of two in x and s pass into y; Q(-x) = -Q(x) where z is as far
from both ends.

A number that is not finite is refused, as by every quantizer here: a weight that became one is lost, and the
training with it. (PyTorch makes the lowest number of the grid of a NaN.) A gradient that is not finite passes through.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64

from llamaspec.reference.quantizers.blocks import finite


class Fake(NamedTuple):
    """y, and where the gradient passes."""

    values: Float64[np.ndarray, "*shape"]
    passes: Bool[np.ndarray, "*shape"]


def fake_quantize(
    x: Float[np.ndarray, "*shape"],
    scales: Float[np.ndarray, "*#shape"],
    zeros: Float[np.ndarray, "*#shape"],
    *,
    lowest: int,
    highest: int,
) -> Fake:
    """The forward pass. `x` is finite, `scales` are positive, `zeros` integers between `lowest` and `highest`.

    Raises ValueError otherwise.

    >>> fake_quantize(np.array([0.6, 1.6, -9.0]), np.array(1.0), np.array(0.0), lowest=-1, highest=1)
    Fake(values=array([ 1.,  1., -1.]), passes=array([ True, False, False]))
    """
    if not np.all((scales > 0) & np.isfinite(scales)) or not np.all(
        (zeros == np.rint(zeros)) & (lowest <= zeros) & (zeros <= highest)
    ):
        raise ValueError(f"scales must be positive and finite, zero points integers from {lowest} to {highest}")
    s, z = scales.astype(np.float64), zeros.astype(np.float64)
    codes = np.rint(finite(x) / s) + z
    return Fake((np.clip(codes, lowest, highest) - z) * s, (codes >= lowest) & (codes <= highest))


def gradient(upstream: Float[np.ndarray, "*shape"], fake: Fake) -> Float64[np.ndarray, "*shape"]:
    """The backward pass: dL/dx from dL/dy.

    >>> fake = fake_quantize(np.array([0.6, 1.6, -9.0]), np.array(1.0), np.array(0.0), lowest=-1, highest=1)
    >>> gradient(np.array([5.0, 6.0, 7.0]), fake)
    array([5., 0., 0.])
    """
    return np.where(fake.passes, upstream.astype(np.float64), 0.0)
