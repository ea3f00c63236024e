"""Attention with sinks, in blocks of keys, and its mutants.

The online softmax starts from the sink.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 8


def sink_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray, mask: np.ndarray) -> np.ndarray:
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    o = np.full(q.shape, np.nan, q.dtype)
    for row in range(batch):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query = f32(q[row, :, head]) / np.sqrt(np.float32(head_dim))
            sink = f32(sinks[head])
            maximum, total = np.full((queries, 1), sink, np.float32), np.ones((queries, 1), np.float32)
            out = np.zeros((queries, head_dim), np.float32)
            for span in spans(keys, BLOCK):
                scores = query @ f32(k[row, span, shared]).T + f32(mask[row][:, span])
                new = np.maximum(maximum, np.max(scores, axis=1, keepdims=True))
                rescale, p = np.exp(maximum - new), np.exp(scores - new)
                total = total * rescale + np.sum(p, axis=1, keepdims=True)
                out = out * rescale + p @ f32(v[row, span, shared])
                maximum = new
            o[row, :, head] = out / total
    return o


IMPLEMENTATION = implementation(
    sink_attention,
    """
sink only in the maximum
    - np.ones((queries, 1), np.float32)
    + np.zeros((queries, 1), np.float32)
total starts at 1 for every sink, as in a softmax with 1 in its denominator
    - np.full((queries, 1), sink, np.float32)
    + np.zeros((queries, 1), np.float32)
sink in the denominator without the maximum
    - o[row, :, head] = out / total
    + total = total - np.exp(sink - maximum) + np.exp(sink)
    +             o[row, :, head] = out / total
sink forgotten with the first larger score
    - total = total * rescale + np.sum(p, axis=1, keepdims=True)
    + total = total * np.where(span.start == 0, rescale == 1, rescale) + np.sum(p, axis=1, keepdims=True)
sink not rescaled
    - total = total * rescale + np.sum(p, axis=1, keepdims=True)
    + total = (total if span.start == 0 else total * rescale) + np.sum(p, axis=1, keepdims=True)
sink counted once a block
    - maximum = new
    + total = total + (span.start > 0) * np.exp(sink - new)
    +                 maximum = new
sink counted twice
    - np.ones((queries, 1), np.float32)
    + np.full((queries, 1), 2, np.float32)
sink of the first head for every head
    - sinks[head]
    + sinks[0]
sink of the key head
    - sinks[head]
    + sinks[shared]
sinks of the heads in reverse
    - sinks[head]
    + sinks[heads - 1 - head]
sink scaled as scores are
    - sink = f32(sinks[head])
    + sink = f32(sinks[head]) / np.sqrt(np.float32(head_dim))
sink added to every score
    - + f32(mask[row][:, span])
    + + f32(mask[row][:, span]) + sink
sign of the sink
    - sink = f32(sinks[head])
    + sink = -f32(sinks[head])
sink in bfloat16 for float32
    - sink = f32(sinks[head])
    + sink = bf16(sinks[head])
the first key for a sink
    - out = out * rescale + p @ f32(v[row, span, shared])
    + out = out * rescale + (p * (span.start + np.arange(p.shape[1]) > 0)) @ f32(v[row, span, shared])
weights divided by the keys' total
    - np.ones((queries, 1), np.float32)
    + np.full((queries, 1), 1e-30, np.float32)
mask left out
    -  + f32(mask[row][:, span])
    +
-10,000 for -inf
    - f32(mask[row][:, span])
    + np.maximum(f32(mask[row][:, span]), -1e4)
tail of the keys left out
    - spans(keys, BLOCK)
    + full_spans(keys, BLOCK)
head h to key head h % kv_heads
    - head // (heads // kv_heads)
    + head % kv_heads
weighted sum not rescaled
    - out = out * rescale +
    + out = out +
scores not scaled
    -  / np.sqrt(np.float32(head_dim))
    +
right up to 4,096 keys
    - spans(keys, BLOCK)
    + spans(min(keys, 4096), BLOCK)
""",
)
