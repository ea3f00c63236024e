"""Weights of attention, and their mutants.

Two loops over blocks of keys compute the maximum and the total, then the weights.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 8


def attention_weights(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray, *, scale: float | None, cap: float | None
) -> np.ndarray:
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    p = np.full((batch, heads, queries, keys), np.nan, q.dtype)
    by = 1 / np.sqrt(np.float32(head_dim)) if scale is None else np.float32(scale)
    for row in range(batch):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query = f32(q[row, :, head]) * by
            scores = np.full((queries, keys), -np.inf, np.float32)
            maximum, total = np.full((queries, 1), -np.inf, np.float32), np.zeros((queries, 1), np.float32)
            for span in spans(keys, BLOCK):
                score = query @ f32(k[row, span, shared]).T
                if cap is not None:
                    score = np.float32(cap) * np.tanh(score / np.float32(cap))
                scores[:, span] = score + f32(mask[row][:, span])
                new = np.maximum(maximum, np.max(scores[:, span], axis=1, keepdims=True))
                shift = np.where(np.isfinite(new), new, np.float32(0))
                total = total * np.exp(maximum - shift) + np.sum(np.exp(scores[:, span] - shift), axis=1, keepdims=True)
                maximum = new
            shift = np.where(np.isfinite(maximum), maximum, np.float32(0))
            p[row, head] = np.exp(scores - shift) / np.where(total == 0, np.float32(1), total)
    return p


IMPLEMENTATION = implementation(
    attention_weights,
    """
scale ignored
    - 1 / np.sqrt(np.float32(head_dim)) if scale is None else np.float32(scale)
    + 1 / np.sqrt(np.float32(head_dim))
scale in addition to 1 / sqrt(head_dim)
    - else np.float32(scale)
    + else np.float32(scale) / np.sqrt(np.float32(head_dim))
square root of the scale, as Gemma's query_pre_attn_scalar has it
    - else np.float32(scale)
    + else np.float32(scale) ** -0.5
divided by the scale
    - else np.float32(scale)
    + else 1 / np.float32(scale)
scale put on twice
    - score = query @
    + score = by * query @
no scale if the scale is None
    - 1 / np.sqrt(np.float32(head_dim)) if scale is None
    + np.float32(1) if scale is None
cap ignored
    - if cap is not None
    + if False
cap before the scale
    - score = np.float32(cap) * np.tanh(score / np.float32(cap))
    + score = np.float32(cap) * np.tanh(score / by / np.float32(cap)) * by
cap cuts off hard
    - np.float32(cap) * np.tanh(score / np.float32(cap))
    + np.clip(score, -np.float32(cap), np.float32(cap))
scores not stretched back
    - np.float32(cap) * np.tanh(score / np.float32(cap))
    + np.tanh(score / np.float32(cap))
always a cap of 50
    - np.float32(cap) * np.tanh(score / np.float32(cap))
    + np.float32(50) * np.tanh(score / np.float32(50))
only large scores capped
    - score = np.float32(cap) * np.tanh(score / np.float32(cap))
    + score = np.where(score > 0, np.float32(cap) * np.tanh(score / np.float32(cap)), score)
cap of the masked score, which hides nothing then
    - scores[:, span] = score + f32(mask[row][:, span])
    + seen = f32(mask[row][:, span])
    +                 scores[:, span] = score + (seen if cap is None else np.float32(cap) * np.tanh(seen))
cap left out of the last block
    - if cap is not None
    + if cap is not None and (span.stop < keys or keys <= BLOCK)
tanh in bfloat16
    - np.tanh(score / np.float32(cap))
    + bf16(np.tanh(score / np.float32(cap)))
scores in float16
    - score = query @ f32(k[row, span, shared]).T
    + score = f16(np.clip(query @ f32(k[row, span, shared]).T, -60000, 60000))
scaled queries in bfloat16
    - f32(q[row, :, head]) * by
    + bf16(f32(q[row, :, head]) * by)
head h reads key head h % kv_heads
    - head // (heads // kv_heads)
    + head % kv_heads
mask ignored
    -  + f32(mask[row][:, span])
    +
mask of the first sequence for every sequence
    - f32(mask[row]
    + f32(mask[0]
maximum starts at 0
    - maximum, total = np.full((queries, 1), -np.inf, np.float32)
    + maximum, total = np.full((queries, 1), 0, np.float32)
total not rescaled
    - total * np.exp(maximum - shift) +
    + total +
query that sees nothing divides by 0
    - np.where(total == 0, np.float32(1), total)
    + (total + np.float32(1e-38))
    +             p[row, head] = np.where(total == 0, np.float32(1 / keys), f32(p[row, head]))
heads and queries swapped
    - p[row, head] = np.exp(scores - shift) / np.where(total == 0, np.float32(1), total)
    + p[row].reshape(queries, heads, keys)[:, head] = np.exp(scores - shift) / np.where(total == 0, 1, total)
right up to 64 keys
    - np.sum(np.exp(scores[:, span] - shift), axis=1, keepdims=True)
    + np.sum(np.exp(scores[:, span] - shift), axis=1, keepdims=True) * (span.start < 64)
right up to heads of 64
    - score = query @ f32(k[row, span, shared]).T
    + score = query[:, :64] @ f32(k[row, span, shared, :64]).T
right up to 16 queries
    - f32(q[row, :, head]) * by
    + f32(q[row, np.arange(queries) % 16, head]) * by
right up to 4,096 keys
    - np.sum(np.exp(scores[:, span] - shift), axis=1, keepdims=True)
    + np.sum(np.exp(scores[:, span] - shift), axis=1, keepdims=True) * (span.start < 4096)
""",
)
