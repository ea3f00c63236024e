"""Blocks: the groups of weights with a common scale.

A quantizer splits a tensor into tiles of the same shape, the block, and finds a scale for each tile. For a
matrix [rows, cols], `(rows, cols)` means one scale per tensor, `(1, cols)` one per channel (a row, the weights
of one output), and `(1, 64)` one per group of 64 along a row.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float32, Float64, Integer, Shaped

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Quantized(NamedTuple):
    """A quantized tensor: a small integer for each weight, and a scale for each block."""

    codes: Integer[np.ndarray, "*shape"]
    scales: Shaped[np.ndarray, "*grid"]


def finite(w: Float[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Convert `w` to float64. Every quantizer starts with this.

    Raises ValueError if there are no weights, or if a weight is not finite or too large for float32. Implementations of
    a format treat such weights in different ways, and a model with such weights is broken anyway.
    """
    if not w.size:
        raise ValueError(f"a tensor of shape {w.shape} has no weights to quantize")
    w = w.astype(np.float64)
    wrong = ~(np.abs(w) <= FLOAT32_MAX)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"weights must be finite numbers of float32, but the weight at {at} is {w[at]}")
    return w


def split(w: Shaped[np.ndarray, "*shape"], block: tuple[int, ...]) -> Shaped[np.ndarray, "*grid members"]:
    """Split `w` into tiles, each flattened. Raises ValueError unless `block` divides the shape.

    >>> split(np.arange(8).reshape(2, 4), (2, 2))
    array([[[0, 1, 4, 5],
            [2, 3, 6, 7]]])
    """
    if len(block) != w.ndim or any(b < 1 or n % b for n, b in zip(w.shape, block, strict=True)):
        raise ValueError(f"blocks of {block} do not divide a tensor of shape {w.shape}")
    grid = tuple(n // b for n, b in zip(w.shape, block, strict=True))
    tiles = w.reshape([n for pair in zip(grid, block, strict=True) for n in pair])
    return np.moveaxis(tiles, range(1, 2 * w.ndim, 2), range(-w.ndim, 0)).reshape(*grid, -1)


def join(blocks: Shaped[np.ndarray, "*grid members"], block: tuple[int, ...]) -> Shaped[np.ndarray, "*shape"]:
    """Undo `split`."""
    grid = blocks.shape[:-1]
    tiles = np.moveaxis(blocks.reshape(*grid, *block), range(-len(block), 0), range(1, 2 * len(block), 2))
    return tiles.reshape([n * b for n, b in zip(grid, block, strict=True)])


def spread(scales: Shaped[np.ndarray, "*grid"], shape: tuple[int, ...]) -> Shaped[np.ndarray, "*shape"]:
    """Repeat each block's scale for all weights of the block, in a tensor of `shape`.

    Raises ValueError unless blocks of equal size tile the tensor.

    >>> spread(np.array([[1.0, 2.0]]), (2, 4))
    array([[1., 1., 2., 2.],
           [1., 1., 2., 2.]])
    """
    for axis, (n, blocks) in enumerate(zip(shape, scales.shape, strict=True)):
        if not blocks or n % blocks:
            raise ValueError(f"{n} weights cannot be split into {blocks} equal blocks")
        scales = np.repeat(scales, n // blocks, axis=axis)
    return scales


def in_float16(x: Float32[np.ndarray, "*shape"]) -> Float16[np.ndarray, "*shape"]:
    """Round `x` to float16 for storage. Raises ValueError if a number is too large for float16."""
    with np.errstate(over="ignore"):
        stored = x.astype(np.float16)
    if not np.isfinite(stored).all():
        raise ValueError(f"a block needs a scale or minimum of {np.max(np.abs(x))}, but the largest float16 is 65504")
    return stored
