"""Backward of attention by the algorithm of FlashAttention, and its mutants.

It runs in tiles of keys, with saved softmax sums and D = sum(o do) per query.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 16


def attention_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, do: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    scale = np.float32(1 / np.sqrt(head_dim))
    dq, dk, dv = (np.zeros(a.shape, np.float32) for a in (q, k, v))
    for row in range(batch):
        for head in range(heads):
            shared = head * kv_heads // heads
            queried, slopes = f32(q[row, :, head]), f32(do[row, :, head])
            top, total = np.full(queries, -np.inf, np.float32), np.zeros(queries, np.float32)
            output = np.zeros((queries, head_dim), np.float32)
            for span in spans(keys, BLOCK):  # the forward pass
                scores = queried @ f32(k[row, span, shared]).T * scale + f32(mask[row, :, span])
                larger = np.maximum(top, scores.max(axis=1))
                shift = np.where(np.isneginf(larger), np.float32(0), larger)
                weights = np.exp(scores - shift[:, None])
                fade = np.exp(top - shift)
                total = total * fade + weights.sum(axis=1)
                output = output * fade[:, None] + weights @ f32(v[row, span, shared])
                top = larger
            total = np.where(total == 0, np.float32(1), total)
            shift = np.where(np.isneginf(top), np.float32(0), top)
            delta = np.sum(output / total[:, None] * slopes, axis=1)
            for tile in spans(keys, BLOCK):
                key_tile, value_tile = f32(k[row, tile, shared]), f32(v[row, tile, shared])
                scores = queried @ key_tile.T * scale + f32(mask[row, :, tile])
                p = np.exp(scores - shift[:, None]) / total[:, None]
                ds = p * (slopes @ value_tile.T - delta[:, None])
                dq[row, :, head] += ds @ key_tile * scale
                dk[row, tile, shared] += ds.T @ queried * scale
                dv[row, tile, shared] += p.T @ slopes
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


IMPLEMENTATION = implementation(
    attention_backward,
    """
delta left out
    - slopes @ value_tile.T - delta[:, None]
    + slopes @ value_tile.T
delta added
    - slopes @ value_tile.T - delta[:, None]
    + slopes @ value_tile.T + delta[:, None]
delta of an output that is not divided
    - output / total[:, None] * slopes
    + output * slopes
scale left out of dq
    - ds @ key_tile * scale
    + ds @ key_tile
scale left out of dk
    - ds.T @ queried * scale
    + ds.T @ queried
scale twice in dq
    - ds @ key_tile * scale
    + ds @ key_tile * scale * scale
scale of the model's width
    - np.sqrt(head_dim)
    + np.sqrt(head_dim * heads)
heads that share a key overwrite dk
    - dk[row, tile, shared] += ds.T
    + dk[row, tile, shared] = ds.T
heads that share a value overwrite dv
    - dv[row, tile, shared] += p.T
    + dv[row, tile, shared] = p.T
tiles overwrite dq
    - dq[row, :, head] += ds
    + dq[row, :, head] = ds
heads assigned in turn
    - head * kv_heads // heads
    + head % kv_heads
tail of the keys left out
    - for tile in spans(keys, BLOCK)
    + for tile in full_spans(keys, BLOCK)
tail left out of the forward pass
    - for span in spans(keys, BLOCK)
    + for span in full_spans(keys, BLOCK)
mask left out
    - scores = queried @ key_tile.T * scale + f32(mask[row, :, tile])
    + scores = queried @ key_tile.T * scale
probabilities not divided
    - np.exp(scores - shift[:, None]) / total[:, None]
    + np.exp(scores - shift[:, None])
maximum left out of the second pass
    - p = np.exp(scores - shift[:, None])
    + p = np.exp(scores)
dv from gradients of scores
    - p.T @ slopes
    + ds.T @ slopes
dk from the output's slopes
    - ds.T @ queried
    + ds.T @ slopes
keys for values in dp
    - slopes @ value_tile.T - delta
    + slopes @ key_tile.T - delta
a maximum that starts at 0
    - np.full(queries, -np.inf, np.float32)
    + np.zeros(queries, np.float32)
rows that see nothing divide by 0
    - np.where(total == 0, np.float32(1), total)
    + total
sum not rescaled by a new maximum
    - total = total * fade + weights.sum(axis=1)
    + total = total + weights.sum(axis=1)
output not rescaled by a new maximum
    - output = output * fade[:, None]
    + output = output
last query left out of dk
    - ds.T @ queried * scale
    + ds.T[:, : max(queries - 1, 1)] @ queried[: max(queries - 1, 1)] * scale
ds in bfloat16 for inputs of float32
    - dq[row, :, head] += ds @ key_tile
    + dq[row, :, head] += bf16(ds) @ key_tile
p in float16
    - p.T @ slopes
    + f16(p).T @ slopes
delta in bfloat16
    - delta = np.sum(output / total[:, None] * slopes, axis=1)
    + delta = bf16(np.sum(output / total[:, None] * slopes, axis=1))
mask of the first sequence for all
    - key_tile.T * scale + f32(mask[row, :, tile])
    + key_tile.T * scale + f32(mask[0, :, tile])
right up to 4,096 queries
    - dq[row, :, head] += ds @ key_tile * scale
    + dq[row, :4096, head] += (ds @ key_tile * scale)[:4096]
right up to 4,096 keys
    - dv[row, tile, shared] += p.T @ slopes
    + dv[row, tile, shared] += p.T @ slopes * (tile.start < 4096)
""",
)
