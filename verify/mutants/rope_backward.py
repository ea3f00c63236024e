"""Backward of RoPE by halves, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def rope_halves_backward(dy: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    angles = positions[..., None, None].astype(np.float32) * f32(frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(f32(dy), 2, axis=-1)
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1).astype(dy.dtype)


IMPLEMENTATION = implementation(
    rope_halves_backward,
    """
turned forward again
    - [a * cos + b * sin, b * cos - a * sin]
    + [a * cos - b * sin, b * cos + a * sin]
passed through
    - [a * cos + b * sin, b * cos - a * sin]
    + [a, b]
a reflection
    - b * cos - a * sin
    + a * sin - b * cos
halves swapped
    - [a * cos + b * sin, b * cos - a * sin]
    + [b * cos - a * sin, a * cos + b * sin]
pairs interleaved
    - a, b = np.split(f32(dy), 2, axis=-1)
    + a, b = f32(dy)[..., 0::2], f32(dy)[..., 1::2]
position one too far
    - positions[..., None, None].astype(np.float32)
    + (positions[..., None, None] + 1).astype(np.float32)
positions of the first sequence for all
    - positions[..., None, None].astype(np.float32)
    + np.broadcast_to(positions[:1], positions.shape)[..., None, None].astype(np.float32)
position from 0
    - positions[..., None, None].astype(np.float32)
    + (positions - positions[:, :1])[..., None, None].astype(np.float32)
first frequency for all pairs
    - f32(frequencies)
    + f32(frequencies[0])
angles in bfloat16
    - positions[..., None, None].astype(np.float32) * f32(frequencies)
    + bf16(positions[..., None, None].astype(np.float32) * f32(frequencies))
sine in float16
    - np.cos(angles), np.sin(angles)
    + np.cos(angles), f16(np.sin(angles))
right up to 4,096 positions
    - a, b = np.split(f32(dy), 2, axis=-1)
    + a, b = np.split(f32(dy[:, np.arange(dy.shape[1]) % 4096]), 2, axis=-1)
""",
)
