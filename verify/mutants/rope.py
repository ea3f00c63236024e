"""RoPE, computed head by head, and its mutants."""

import numpy as np

from llamaspec.verify.mutant import f32, implementation


def rope_halves(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    batch, seq, heads, head_dim = x.shape
    pairs = head_dim // 2
    y = np.full(x.shape, np.nan, x.dtype)
    for row in range(batch):
        for i in range(seq):
            angle = np.float32(positions[row, i]) * f32(frequencies)
            cos, sin = np.cos(angle), np.sin(angle)
            for head in range(heads):
                a, b = f32(x[row, i, head, :pairs]), f32(x[row, i, head, pairs:])
                y[row, i, head, :pairs] = a * cos - b * sin
                y[row, i, head, pairs:] = b * cos + a * sin
    return y


def rope_interleaved(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    y = np.full(x.shape, np.nan, x.dtype)
    angles = positions[:, :, None, None].astype(np.float32) * f32(frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = f32(x[..., 0::2]), f32(x[..., 1::2])
    y[..., 0::2] = a * cos - b * sin
    y[..., 1::2] = b * cos + a * sin
    return y


HALVES = implementation(
    rope_halves,
    """
pairs of neighbors
    - a, b = f32(x[row, i, head, :pairs]), f32(x[row, i, head, pairs:])
    + a, b = f32(x[row, i, head, 0::2]), f32(x[row, i, head, 1::2])
position plus one
    - positions[row, i]
    + (positions[row, i] + 1)
position minus one
    - positions[row, i]
    + max(positions[row, i] - 1, 0)
positions from 0 in every chunk (tiny-llm #46)
    - positions[row, i]
    + (positions[row, i] - positions[row, 0])
positions of the first row for every row
    - positions[row, i]
    + positions[0, i]
position of the first token for every token
    - positions[row, i]
    + positions[row, 0]
head numbers added to angles
    - a, b = f32(x[row, i, head, :pairs])
    + cos, sin = np.cos(angle + head), np.sin(angle + head)
    +                 a, b = f32(x[row, i, head, :pairs])
turned the other way
    - cos, sin = np.cos(angle), np.sin(angle)
    + cos, sin = np.cos(angle), -np.sin(angle)
sine and cosine swapped
    - cos, sin = np.cos(angle), np.sin(angle)
    + sin, cos = np.cos(angle), np.sin(angle)
sign of the second half
    - b * cos + a * sin
    + b * cos - a * sin
second half from the first half's result
    - y[row, i, head, pairs:] = b * cos + a * sin
    + y[row, i, head, pairs:] = b * cos + f32(y[row, i, head, :pairs]) * sin
second half left as it is
    - y[row, i, head, pairs:] = b * cos + a * sin
    + y[row, i, head, pairs:] = b
one frequency for all pairs
    - f32(frequencies)
    + f32(frequencies)[:1]
frequencies in reverse
    - f32(frequencies)
    + f32(frequencies)[::-1]
frequency of the neighbor
    - f32(frequencies)
    + f32(np.roll(frequencies, 1))
position in bfloat16, where 257 is 256
    - np.float32(positions[row, i])
    + bf16(positions[row, i])
position in float16
    - np.float32(positions[row, i])
    + np.minimum(f16(min(positions[row, i], 60000)), positions[row, i])
position stops at 4096
    - positions[row, i]
    + min(positions[row, i], 4096)
angle in bfloat16
    - angle = np.float32(positions[row, i]) * f32(frequencies)
    + angle = bf16(np.float32(positions[row, i]) * f32(frequencies))
sine and cosine in bfloat16
    - cos, sin = np.cos(angle), np.sin(angle)
    + cos, sin = bf16(np.cos(angle)), bf16(np.sin(angle))
sine and cosine in float16
    - cos, sin = np.cos(angle), np.sin(angle)
    + cos, sin = f16(np.cos(angle)), f16(np.sin(angle))
only the first head
    - for head in range(heads)
    + for head in range(1)
scaled frequencies ignored
    - f32(frequencies)
    + f32(frequencies[0] if pairs == 1 else (frequencies[1] / frequencies[0]) ** np.arange(pairs))
stretched frequencies ignored
    - f32(frequencies)
    + f32(frequencies / frequencies[0])
position stops at 131,072
    - positions[row, i]
    + min(positions[row, i], 131_071)
right up to 128 positions
    - positions[row, i]
    + positions[row, i % 128]
right up to 32 heads
    - for head in range(heads)
    + for head in range(min(heads, 32))
right up to heads of 128
    - cos, sin = np.cos(angle), np.sin(angle)
    + cos, sin = np.cos(angle), np.sin(angle) * (np.arange(pairs) < 64)
right up to 4,096 positions
    - positions[row, i]
    + positions[row, i % 4096]
right up to 4,096 heads
    - for head in range(heads)
    + for head in range(min(heads, 4096))
""",
)
INTERLEAVED = implementation(
    rope_interleaved,
    """
pairs of halves
    - a, b = f32(x[..., 0::2]), f32(x[..., 1::2])
    + a, b = np.split(f32(x), 2, axis=-1)
result in halves
    - return y
    + return np.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1)
odd features from the even ones' result
    - b * cos + a * sin
    + b * cos + f32(y[..., 0::2]) * sin
turned the other way
    - cos, sin = np.cos(angles), np.sin(angles)
    + cos, sin = np.cos(angles), -np.sin(angles)
odd features left as they are
    - y[..., 1::2] = b * cos + a * sin
    + y[..., 1::2] = b
position plus one
    - positions[:, :, None, None]
    + (1 + positions[:, :, None, None])
positions of the first row for every row
    - positions[:, :, None, None]
    + positions[:1, :, None, None]
positions along the heads
    - a, b = f32(x[..., 0::2]), f32(x[..., 1::2])
    + cos, sin = (np.repeat(t[:, :1], x.shape[1], axis=1) for t in (cos, sin))
    +     a, b = f32(x[..., 0::2]), f32(x[..., 1::2])
angle in float16
    - f32(frequencies)
    + f16(frequencies)
scaled frequencies ignored
    - f32(frequencies)
    + f32((frequencies[-1] / frequencies[0]) ** (np.arange(len(frequencies)) / max(len(frequencies) - 1, 1)))
right up to 1,024 positions
    - positions[:, :, None, None]
    + positions[:, np.arange(x.shape[1]) % 1024, None, None]
position in 20 bits
    - positions[:, :, None, None]
    + (positions[:, :, None, None] & 0xFFFFF)
right up to 4,096 positions
    - positions[:, :, None, None]
    + positions[:, np.arange(x.shape[1]) % 4096, None, None]
""",
)
