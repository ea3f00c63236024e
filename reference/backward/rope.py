r"""Backward of RoPE: the gradient is rotated back.

A rotation R is orthogonal, so its transpose is its inverse, a rotation by the opposite angle:

    y = R(m f) x        dx = R(m f)^T dy = R(-m f) dy

Positions and frequencies are not learned and have no gradient.
"""

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.rope import rope_halves


def rope_halves_backward(
    dy: Float[np.ndarray, "*batch seq heads head_dim"],
    positions: Int[np.ndarray, "*batch seq"],
    frequencies: Float[np.ndarray, " pairs"],
) -> Float[np.ndarray, "*batch seq heads head_dim"]:
    """Compute the gradient of `reference.rope.rope_halves` for its input, in float64.

    >>> dy = np.array([[[0.0, -2.0, 1.0, 0.0]]])
    >>> rope_halves_backward(dy, np.array([1]), np.array([np.pi / 2, np.pi])).round(4)
    array([[[1., 2., 0., 0.]]])
    """
    return rope_halves(dy, -positions, frequencies)
