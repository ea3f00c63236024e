"""GroupNorm (Wu & He, 2018, https://arxiv.org/abs/1803.08494): the number of channels must be divisible by `groups`."""

import numpy as np

from llamaspec.verify.contract import independent
from llamaspec.verify.declare import declare, sizes, values
from llamaspec.verify.mutant import f32, implementation


def group_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, groups: int, eps: float) -> np.ndarray:
    """Center and scale each group of channels of x [batch channels pixels] together."""
    batch, channels, pixels = x.shape
    parts = x.reshape(batch, groups, channels // groups * pixels)
    centered = parts - np.mean(parts, axis=-1, keepdims=True)
    normal = centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + eps)
    return normal.reshape(batch, channels, pixels) * weight.reshape(channels, 1) + bias.reshape(channels, 1)


CONTRACT = declare(
    group_norm,
    arrays={"x": "batch groups*width pixels", "weight": "groups*width", "bias": "groups*width"},
    sizes={"batch": [1, 2, 3], "groups": [1, 2, 3, 8], "width": [1, 2, 3, 4], "pixels": sizes(8, 32, most=65)},
    options={"eps": [1e-5, 0.5]},
    draws={"x": values(-6, 6)},
    laws=[independent("an image", "x")],
)


def right(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, groups: int, eps: float) -> np.ndarray:
    """Compute in float32, a group at a time, and round once."""
    y = np.full(x.shape, np.nan, x.dtype)
    width = x.shape[1] // groups
    for image in range(len(x)):
        for group in range(groups):
            channels = slice(group * width, (group + 1) * width)
            wide = f32(x[image, channels])
            mean = np.sum(wide) / np.float32(wide.size)
            variance = np.sum((wide - mean) ** 2) / np.float32(wide.size)
            normal = (wide - mean) / np.sqrt(variance + np.float32(eps))
            y[image, channels] = normal * f32(weight[channels, None]) + f32(bias[channels, None])
    return y


MUTANTS = implementation(
    right,
    """
mean left out
    - mean = np.sum(wide) / np.float32(wide.size)
    + mean = np.float32(0)
statistics of a channel
    - mean = np.sum(wide) / np.float32(wide.size)
    + mean = np.sum(wide, axis=1, keepdims=True) / np.float32(wide.shape[1])
divided by the number of pixels
    - variance = np.sum((wide - mean) ** 2) / np.float32(wide.size)
    + variance = np.sum((wide - mean) ** 2) / np.float32(wide.shape[1])
variance of a sample
    - variance = np.sum((wide - mean) ** 2) / np.float32(wide.size)
    + variance = np.sum((wide - mean) ** 2) / np.float32(max(wide.size - 1, 1))
eps outside the root
    - np.sqrt(variance + np.float32(eps))
    + (np.sqrt(variance) + np.float32(eps))
every group takes every second channel
    - channels = slice(group * width, (group + 1) * width)
    + channels = slice(group, None, groups)
weight of the first group
    - f32(weight[channels, None])
    + f32(weight[:width, None])
bias left out
    -  + f32(bias[channels, None])
    +
right up to 64 groups
    - range(groups)
    + range(min(groups, 64))
right up to 1,024 pixels
    - np.sum(wide)
    + np.sum(wide[:, :1024])
""",
    op="group_norm",
)
