"""RoPE of a head's first features, computed position by position, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def partial_rope(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, *, magnitude: float) -> np.ndarray:
    batch, seq = x.shape[:2]
    pairs = len(frequencies)
    y = x.copy()
    for row in range(batch):
        for i in range(seq):
            angle = np.float32(positions[row, i]) * f32(frequencies)
            cos, sin = np.float32(magnitude) * np.cos(angle), np.float32(magnitude) * np.sin(angle)
            a, b = f32(x[row, i, :, :pairs]), f32(x[row, i, :, pairs : 2 * pairs])
            y[row, i, :, :pairs] = a * cos - b * sin
            y[row, i, :, pairs : 2 * pairs] = b * cos + a * sin
    return y


IMPLEMENTATION = implementation(
    partial_rope,
    """
halves of the head, not of the turned features
    - a, b = f32(x[row, i, :, :pairs]), f32(x[row, i, :, pairs : 2 * pairs])
    + half = x.shape[-1] // 2
    +             a, b = f32(x[row, i, :, :pairs]), f32(x[row, i, :, half : half + pairs])
pairs of neighbors
    - a, b = f32(x[row, i, :, :pairs]), f32(x[row, i, :, pairs : 2 * pairs])
    + a, b = f32(x[row, i, :, 0 : 2 * pairs : 2]), f32(x[row, i, :, 1 : 2 * pairs : 2])
the last features turned, not the first
    - y = x.copy()
    + x = np.roll(x, 2 * pairs, axis=-1)
    +     y = x.copy()
kept features are 0
    - y = x.copy()
    + y = np.where(np.arange(x.shape[-1]) < 2 * pairs, x, np.zeros_like(x))
kept features made longer, too
    - return y
    + y[..., 2 * pairs :] = f32(y[..., 2 * pairs :]) * np.float32(magnitude)
    +     return y
kept features of the first position for every position
    - return y
    + y[..., 2 * pairs :] = x[:, :1, :, 2 * pairs :]
    +     return y
kept features through bfloat16
    - return y
    + y[..., 2 * pairs :] = bf16(x[..., 2 * pairs :])
    +     return y
magnitude left out
    - np.float32(magnitude) * np.cos(angle), np.float32(magnitude) * np.sin(angle)
    + np.cos(angle), np.sin(angle)
magnitude only of the cosine
    - np.float32(magnitude) * np.sin(angle)
    + np.sin(angle)
magnitude put on twice
    - y[row, i, :, :pairs] = a * cos - b * sin
    + y[row, i, :, :pairs] = (a * cos - b * sin) * np.float32(magnitude)
magnitude put on the angle
    - angle = np.float32(positions[row, i])
    + angle = np.float32(magnitude) * np.float32(positions[row, i])
magnitude in bfloat16
    - np.float32(magnitude) * np.cos(angle), np.float32(magnitude) * np.sin(angle)
    + bf16(magnitude) * np.cos(angle), bf16(magnitude) * np.sin(angle)
divided by the magnitude
    - np.float32(magnitude) * np.cos(angle), np.float32(magnitude) * np.sin(angle)
    + np.cos(angle) / np.float32(magnitude), np.sin(angle) / np.float32(magnitude)
turned the other way
    - y[row, i, :, :pairs] = a * cos - b * sin
    + sin = -sin
    +             y[row, i, :, :pairs] = a * cos - b * sin
position plus one
    - positions[row, i]
    + (positions[row, i] + 1)
positions of the first row for every row
    - positions[row, i]
    + positions[0, i]
frequencies in reverse
    - f32(frequencies)
    + f32(frequencies)[::-1]
right up to 64 pairs
    - cos, sin = np.float32(magnitude) * np.cos(angle)
    + angle = angle * (np.arange(pairs) < 64)
    +             cos, sin = np.float32(magnitude) * np.cos(angle)
right up to 32 heads
    - return y
    + y[:, :, 32:] = x[:, :, 32:]
    +     return y
right up to 4,096 positions
    - return y
    + y[:, 4096:] = x[:, 4096:]
    +     return y
""",
)
