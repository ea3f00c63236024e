"""Fused ops as in a decode kernel, and their mutants.

The sum of squares and the product are computed in blocks of columns.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 32


def norm_linear(
    x: np.ndarray, norm: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *, eps: float
) -> np.ndarray:
    batch, (rows, cols) = len(x), weight.shape
    y = np.full((batch, rows), np.nan, x.dtype)
    for b in range(batch):
        vector, squares = f32(x[b]), np.float32(0)
        for span in spans(cols, BLOCK):
            squares += np.sum(vector[span] * vector[span])
        scale = 1 / np.sqrt(squares / np.float32(cols) + np.float32(eps))
        sums = np.zeros(rows, np.float32)
        for span in spans(cols, BLOCK):
            staged = vector[span] * scale * f32(norm[span])
            sums += f32(weight[:, span]) @ staged
        y[b] = sums if bias is None else sums + f32(bias)
    return y


def linear_add(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, residual: np.ndarray) -> np.ndarray:
    batch, (rows, cols) = len(x), weight.shape
    y = np.full((batch, rows), np.nan, x.dtype)
    for b in range(batch):
        sums = np.zeros(rows, np.float32)
        for span in spans(cols, BLOCK):
            sums += f32(weight[:, span]) @ f32(x[b, span])
        total = sums if bias is None else sums + f32(bias)
        y[b] = total + f32(residual[b])
    return y


def norm_gate_up(
    x: np.ndarray, norm: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, *, eps: float
) -> np.ndarray:
    batch, cols = x.shape
    ffn = len(weight) // 2
    y = np.full((batch, ffn), np.nan, x.dtype)
    for b in range(batch):
        vector = f32(x[b])
        scale = 1 / np.sqrt(np.sum(vector * vector) / np.float32(cols) + np.float32(eps))
        staged = vector * scale * f32(norm)
        for tile in spans(ffn, BLOCK):
            up_rows = slice(ffn + tile.start, ffn + tile.stop)
            gate, up = f32(weight[tile]) @ staged, f32(weight[up_rows]) @ staged
            if bias is not None:
                gate, up = gate + f32(bias[tile]), up + f32(bias[up_rows])
            y[b, tile] = gate / (1 + np.exp(-gate)) * up
    return y


def norm_qkv(
    x: np.ndarray,
    norm: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    positions: np.ndarray,
    frequencies: np.ndarray,
    *,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch, kv_heads, head_dim = len(x), *k_cache.shape[2:]
    pairs = head_dim // 2
    heads = len(weight) // head_dim - 2 * kv_heads
    q, k_cache, v_cache = np.full((batch, heads, head_dim), np.nan, x.dtype), k_cache.copy(), v_cache.copy()
    for b in range(batch):
        vector = f32(x[b])
        scale = 1 / np.sqrt(np.mean(vector * vector) + np.float32(eps))
        staged = vector * scale * f32(norm)
        y = f32(weight) @ staged
        y = y if bias is None else y + f32(bias)
        y = y.reshape(-1, head_dim)
        at = positions[b]
        angle = np.float32(at) * f32(frequencies)
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = y[:, :pairs], y[:, pairs:]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
        q[b] = turned[:heads]
        k_cache[b, at] = turned[heads : heads + kv_heads]
        v_cache[b, at] = y[heads + kv_heads :]
    return q, k_cache, v_cache


NORM_LINEAR = implementation(
    norm_linear,
    """
eps outside the root
    - np.sqrt(squares / np.float32(cols) + np.float32(eps))
    + (np.sqrt(squares / np.float32(cols)) + np.float32(eps))
eps of another model
    - np.float32(eps)
    + np.float32(1e-5)
sum for mean
    - squares / np.float32(cols)
    + squares
mean over whole blocks
    - np.float32(cols)
    + np.float32(-(-cols // BLOCK) * BLOCK)
norm's weight left out
    -  * f32(norm[span])
    +
norm's weight squared
    -  * f32(norm[span])
    +  * f32(norm[span]) ** 2
norm's weight of the first block for every block
    - norm[span]
    + norm[: span.stop - span.start]
not normalized
    - vector[span] * scale *
    + vector[span] *
normalized twice
    - vector[span] * scale *
    + vector[span] * scale * scale *
1/rms of the first vector for every vector
    - vector, squares = f32(x[b]), np.float32(0)
    + vector, squares = f32(x[b]), np.float32(0) if b == 0 else squares
last block of columns left out of the squares
    - squares += np.sum(vector[span] * vector[span])
    + squares += np.sum(vector[span] * vector[span]) * (span.stop < cols or span.start == 0)
bias left out
    - sums if bias is None else sums + f32(bias)
    + sums
bias twice
    - sums + f32(bias)
    + sums + 2 * f32(bias)
bias inside the norm
    - sums if bias is None else sums + f32(bias)
    + sums if bias is None else sums + f32(bias) * scale
bias added for each block of columns
    - sums if bias is None else sums + f32(bias)
    + sums if bias is None else sums + len(spans(cols, BLOCK)) * f32(bias)
product in bfloat16
    - sums += f32(weight[:, span]) @ staged
    + sums = bf16(sums + f32(weight[:, span]) @ staged)
normed vector in bfloat16 for float32 weights
    - @ staged
    + @ bf16(staged)
squares in float16
    - squares += np.sum(vector[span] * vector[span])
    + squares += np.sum(f16(vector[span] * vector[span]))
rows beyond 4,096 never written
    - y[b] = sums if bias is None else sums + f32(bias)
    + y[b, :4096] = (sums if bias is None else sums + f32(bias))[:4096]
right up to 1,024 columns
    - squares += np.sum(vector[span] * vector[span])
    + squares += np.sum(vector[span] * vector[span]) * (span.stop <= 1024)
right up to 8,192 columns
    - f32(weight[:, span]) @ staged
    + f32(weight[:, span]) @ staged * (span.stop <= 8192)
right up to 16 vectors
    - vector, squares = f32(x[b]), np.float32(0)
    + vector, squares = f32(x[b % 16]), np.float32(0)
right up to 4,096 vectors
    - vector, squares = f32(x[b]), np.float32(0)
    + vector, squares = f32(x[b % 4096]), np.float32(0)
""",
)
LINEAR_ADD = implementation(
    linear_add,
    """
residual left out
    - total + f32(residual[b])
    + total
residual twice
    - total + f32(residual[b])
    + total + 2 * f32(residual[b])
residual subtracted
    - total + f32(residual[b])
    + total - f32(residual[b])
residual of the first vector for every vector
    - residual[b]
    + residual[0]
residual of the row before
    - residual[b]
    + np.roll(residual[b], 1)
residual added for each block of columns
    - total + f32(residual[b])
    + total + len(spans(cols, BLOCK)) * f32(residual[b])
product rounded to bfloat16 before the residual
    - total + f32(residual[b])
    + bf16(total) + f32(residual[b])
residual in float16
    - f32(residual[b])
    + f16(residual[b])
residual only for the first block of rows
    - f32(residual[b])
    + f32(residual[b]) * (np.arange(rows) < 8)
input instead of the residual, if shapes allow
    - f32(residual[b])
    + f32(x[b] if rows == cols else residual[b])
bias left out
    - sums if bias is None else sums + f32(bias)
    + sums
bias only for the first vector
    - sums if bias is None else sums + f32(bias)
    + sums if bias is None or b else sums + f32(bias)
bias twice
    - sums + f32(bias)
    + sums + 2 * f32(bias)
bias only without a residual
    - total + f32(residual[b])
    + (total if not np.any(residual[b]) else sums) + f32(residual[b])
tail of the columns left out
    - spans(cols, BLOCK)
    + full_spans(cols, BLOCK)
sums not reset between vectors
    - sums = np.zeros(rows, np.float32)
    + sums = np.zeros(rows, np.float32) if b == 0 else sums
right up to 4,096 rows
    - total + f32(residual[b])
    + total + f32(residual[b]) * (np.arange(rows) < 4096)
right up to 2,048 columns
    - f32(weight[:, span]) @ f32(x[b, span])
    + f32(weight[:, span]) @ f32(x[b, span]) * (span.stop <= 2048)
right up to 64 vectors
    - residual[b]
    + residual[min(b, 63)]
right up to 4,096 vectors
    - residual[b]
    + residual[min(b, 4095)]
""",
)
NORM_GATE_UP = implementation(
    norm_gate_up,
    """
gate and up swapped
    - gate / (1 + np.exp(-gate)) * up
    + up / (1 + np.exp(-up)) * gate
rows of gate and up interleaved
    - gate, up = f32(weight[tile]) @ staged, f32(weight[up_rows]) @ staged
    + gate, up = f32(weight[0::2][tile]) @ staged, f32(weight[1::2][tile]) @ staged
up of the tile before
    - up_rows = slice(ffn + tile.start, ffn + tile.stop)
    + up_rows = slice(ffn + max(tile.start - 1, 0), ffn + max(tile.start - 1, 0) + tile.stop - tile.start)
up not normalized
    - f32(weight[up_rows]) @ staged
    + f32(weight[up_rows]) @ (vector * f32(norm))
GELU for SiLU
    - gate / (1 + np.exp(-gate)) * up
    + gate / (1 + np.exp(-1.702 * gate)) * up
sigmoid for SiLU
    - gate / (1 + np.exp(-gate)) * up
    + 1 / (1 + np.exp(-gate)) * up
ReLU for SiLU
    - gate / (1 + np.exp(-gate)) * up
    + np.maximum(gate, 0) * up
bias of gate for up
    - up + f32(bias[up_rows])
    + up + f32(bias[tile])
bias only for gate
    - up + f32(bias[up_rows])
    + up
bias after the gating
    - y[b, tile] = gate / (1 + np.exp(-gate)) * up
    + y[b, tile] = gate / (1 + np.exp(-gate)) * up + (0 if bias is None else f32(bias[tile]))
eps outside the root
    - np.sqrt(np.sum(vector * vector) / np.float32(cols) + np.float32(eps))
    + (np.sqrt(np.sum(vector * vector) / np.float32(cols)) + np.float32(eps))
1/rms only times gate
    - staged = vector * scale * f32(norm)
    + staged = vector * f32(norm)
    +         weight = np.concatenate([f32(weight[:ffn]) * scale, f32(weight[ffn:])]) if b == 0 else weight
norm's weight left out
    -  * f32(norm)
    +
norm's weight plus one, as Gemma has it
    -  * f32(norm)
    +  * (1 + f32(norm))
gate clipped, as gpt-oss does
    - gate / (1 + np.exp(-gate)) * up
    + np.minimum(gate, 7) / (1 + np.exp(-np.minimum(gate, 7))) * up
gate and up rounded to bfloat16
    - gate / (1 + np.exp(-gate)) * up
    + bf16(gate) / (1 + np.exp(-bf16(gate))) * bf16(up)
last tile never written
    - spans(ffn, BLOCK)
    + full_spans(ffn, BLOCK)
right up to 1,024 rows of gate
    - f32(weight[tile]) @ staged, f32
    + f32(weight[tile if tile.stop <= 1024 else slice(tile.stop - tile.start)]) @ staged, f32
right up to 1,024 columns
    - staged = vector * scale * f32(norm)
    + staged = vector * scale * f32(norm) * (np.arange(cols) < 1024)
right up to 16 vectors
    - vector = f32(x[b])
    + vector = f32(x[b % 16])
right up to 4,096 vectors
    - vector = f32(x[b])
    + vector = f32(x[b % 4096])
""",
)
NORM_QKV = implementation(
    norm_qkv,
    """
k not turned
    - k_cache[b, at] = turned[heads : heads + kv_heads]
    + k_cache[b, at] = y[heads : heads + kv_heads]
v turned
    - v_cache[b, at] = y[heads + kv_heads :]
    + v_cache[b, at] = turned[heads + kv_heads :]
q not turned
    - q[b] = turned[:heads]
    + q[b] = y[:heads]
q scaled by 1 / sqrt(head_dim) already
    - q[b] = turned[:heads]
    + q[b] = turned[:heads] / np.sqrt(np.float32(head_dim))
k and v swapped
    - v_cache[b, at] = y[heads + kv_heads :]
    + k_cache[b, at], v_cache[b, at] = y[heads + kv_heads :], turned[heads : heads + kv_heads]
keys of the values' rows
    - turned[heads : heads + kv_heads]
    + turned[heads + kv_heads :]
keys and values interleaved
    - k_cache[b, at] = turned[heads : heads + kv_heads]
    + k_cache[b, at] = turned[heads::2][:kv_heads]
appended a row late
    - v_cache[b, at] = y
    + v_cache[b, min(at + 1, k_cache.shape[1] - 1)] = y
keys appended a row early
    - k_cache[b, at] = turned
    + k_cache[b, max(at - 1, 0)] = turned
appended at the position of the first sequence
    - v_cache[b, at] = y
    + v_cache[b, positions[0]] = y
all in the cache of the first sequence
    - k_cache[b, at] = turned
    + k_cache[0, at] = turned
turned by the position before
    - angle = np.float32(at) * f32(frequencies)
    + angle = np.float32(max(at - 1, 0)) * f32(frequencies)
turned by the first sequence's position
    - angle = np.float32(at) * f32(frequencies)
    + angle = np.float32(positions[0]) * f32(frequencies)
turned the other way
    - first * cos - second * sin, second * cos + first * sin
    + first * cos + second * sin, second * cos - first * sin
pairs of neighbors
    - first, second = y[:, :pairs], y[:, pairs:]
    + first, second = y[:, 0::2], y[:, 1::2]
scaled frequencies ignored
    - f32(frequencies)
    + f32(frequencies[0] if pairs == 1 else (frequencies[1] / frequencies[0]) ** np.arange(pairs))
bias of the first head for every head
    - y + f32(bias)
    + y + np.resize(f32(bias[:head_dim]), len(y))
bias only for q
    - y + f32(bias)
    + y + f32(bias) * (np.arange(len(y)) < heads * head_dim)
bias twice
    - y + f32(bias)
    + y + 2 * f32(bias)
eps outside the root
    - np.sqrt(np.mean(vector * vector) + np.float32(eps))
    + (np.sqrt(np.mean(vector * vector)) + np.float32(eps))
norm's weight left out
    -  * f32(norm)
    +
q normed, k and v not
    - y = f32(weight) @ staged
    + y = f32(weight) @ staged
    +         y[heads * head_dim :] /= scale
row before cleared
    - v_cache[b, at] = y
    + v_cache[b, at - 1 : at] = 0
    +         v_cache[b, at] = y
rows after cleared
    - v_cache[b, at] = y
    + v_cache[b, at + 1 :] = 0
    +         v_cache[b, at] = y
right up to position 1,023
    - v_cache[b, at] = y
    + v_cache[b, at % 1024] = y
positions in float16
    - np.float32(at)
    + f16(at)
right up to groups of 8
    - q[b] = turned[:heads]
    + q[b] = turned[np.minimum(np.arange(heads), kv_heads * 8 - 1)]
right up to 8 key heads
    - v_cache[b, at] = y[heads + kv_heads :]
    + v_cache[b, at, :8] = y[heads + kv_heads :][:8]
right up to heads of 128
    - cos, sin = np.cos(angle), np.sin(angle)
    + cos, sin = (table * (np.arange(pairs) < 64) for table in (np.cos(angle), np.sin(angle)))
right up to 4,096 columns
    - f32(weight) @ staged
    + f32(weight[:, :4096]) @ staged[:4096]
right up to position 65,535
    - v_cache[b, at] = y
    + v_cache[b, at % 65_536] = y
right up to 4,096 key heads
    - v_cache[b, at] = y[heads + kv_heads :]
    + v_cache[b, at, :4096] = y[heads + kv_heads :][:4096]
""",
)
