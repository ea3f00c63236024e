r"""Quantization-aware training: the forward pass rounds, and the backward pass ignores the rounding.

    y_i = s (q_i - z)        q_i = clip(p_i, lowest, highest)        p_i = rint(x_i / s) + z
    dL/dx_i = dL/dy_i  where  lowest <= p_i <= highest,  and 0 elsewhere

L is the loss, x are weights or activations, and lowest to highest is the range of the codes. The true gradient of
rounding is 0 almost everywhere, so nothing would be learned. The straight-through estimator (Bengio et al., 2013,
https://arxiv.org/abs/1308.3432) uses only the gradient of the clip. As in PyTorch, the condition tests p_i, which is
already rounded. So the gradient also passes for numbers up to half a step beyond the grid.

Guaranteed, up to float64 rounding: |x - y| <= s / 2 where the gradient passes, because nothing is clipped there, and
rint changes x / s by at most 1/2. Fixed point: quantizing y gives y, because y / s is an integer, which rint does not
change. With the s and z of `affine` or `symmetric`, y equals their dequantized weights. Powers of two: 2^k x with the
scale 2^k s gives 2^k y. Sign: Q(-x) = -Q(x), where Q(x) = y, if z is in the middle of the grid.

Numbers that are not finite are refused, as in every quantizer here, because such a weight ruins the training. (PyTorch
turns a NaN into the lowest number of the grid.) A gradient that is not finite passes through.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64

from llamaspec.reference.quantizers.blocks import finite


class Fake(NamedTuple):
    """Result of fake quantization: the rounded y, and a mask of the entries that pass a gradient."""

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
    """Compute y (the forward pass), and the mask of the entries that pass a gradient.

    Raises ValueError unless `x` is finite, `scales` are positive, and `zeros` are integers from `lowest` to `highest`.

    >>> fake_quantize(np.array([0.6, 1.6, -9.0]), np.array(1.0), np.array(0.0), lowest=-1, highest=1)
    Fake(values=array([ 1.,  1., -1.]), passes=array([ True, False, False]))
    """
    if not np.all((scales > 0) & np.isfinite(scales)) or not np.all(
        (zeros == np.rint(zeros)) & (lowest <= zeros) & (zeros <= highest)
    ):
        raise ValueError(
            f"scales must be positive and finite, and zero points must be integers from {lowest} to {highest}"
        )
    s, z = scales.astype(np.float64), zeros.astype(np.float64)
    codes = np.rint(finite(x) / s) + z
    return Fake((np.clip(codes, lowest, highest) - z) * s, (codes >= lowest) & (codes <= highest))


def gradient(upstream: Float[np.ndarray, "*shape"], fake: Fake) -> Float64[np.ndarray, "*shape"]:
    """Compute dL/dx (the backward pass). `upstream` is dL/dy.

    >>> fake = fake_quantize(np.array([0.6, 1.6, -9.0]), np.array(1.0), np.array(0.0), lowest=-1, highest=1)
    >>> gradient(np.array([5.0, 6.0, 7.0]), fake)
    array([5., 0., 0.])
    """
    return np.where(fake.passes, upstream.astype(np.float64), 0.0)
