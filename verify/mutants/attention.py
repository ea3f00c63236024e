"""Attention by the algorithm of FlashAttention, and its mutants.

An online softmax runs over blocks of keys, and rescales the weighted sum.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 8


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    o = np.full(q.shape, np.nan, q.dtype)
    for row in range(batch):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query = f32(q[row, :, head]) / np.sqrt(np.float32(head_dim))
            maximum, total = np.full((queries, 1), -np.inf, np.float32), np.zeros((queries, 1), np.float32)
            out = np.zeros((queries, head_dim), np.float32)
            for span in spans(keys, BLOCK):
                scores = query @ f32(k[row, span, shared]).T + f32(mask[row][:, span])
                new = np.maximum(maximum, np.max(scores, axis=1, keepdims=True))
                shift = np.where(np.isfinite(new), new, np.float32(0))
                rescale, p = np.exp(maximum - shift), np.exp(scores - shift)
                total = total * rescale + np.sum(p, axis=1, keepdims=True)
                out = out * rescale + p @ f32(v[row, span, shared])
                maximum = new
            o[row, :, head] = out / np.where(total == 0, np.float32(1), total)
    return o


def attention_prefill(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, offsets: np.ndarray, *, window: int | None
) -> np.ndarray:
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    o = np.full(q.shape, np.nan, q.dtype)
    for row in range(batch):
        offset = int(offsets[row])
        for head in range(heads):
            shared = head // (heads // kv_heads)
            for tile in spans(queries, BLOCK):
                query = f32(q[row, tile, head]) / np.sqrt(np.float32(head_dim))
                i = offset + np.arange(tile.start, tile.stop)[:, None]
                first = 0 if window is None else max(offset + tile.start - window + 1, 0) // BLOCK * BLOCK
                maximum, total = np.full(i.shape, -np.inf, np.float32), np.zeros(i.shape, np.float32)
                out = np.zeros(query.shape, np.float32)
                for start in range(first, offset + tile.stop, BLOCK):
                    span = slice(start, min(start + BLOCK, offset + queries))
                    j = np.arange(span.start, span.stop)
                    seen = j <= i if window is None else (j <= i) & (j > i - window)
                    scores = np.where(seen, query @ f32(k[row, span, shared]).T, -np.inf)
                    new = np.maximum(maximum, np.max(scores, axis=1, keepdims=True))
                    shift = np.where(np.isfinite(new), new, np.float32(0))
                    rescale, p = np.exp(maximum - shift), np.exp(scores - shift)
                    total = total * rescale + np.sum(p, axis=1, keepdims=True)
                    out = out * rescale + p @ f32(v[row, span, shared])
                    maximum = new
                o[row, tile, head] = out / total
    return o


def attention_decode(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, *, window: int | None
) -> np.ndarray:
    batch, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    o = np.full(q.shape, np.nan, q.dtype)
    for row in range(batch):
        length = int(lengths[row])
        first = 0 if window is None else max(length - window, 0)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query = f32(q[row, head]) / np.sqrt(np.float32(head_dim))
            parts = []
            for split in spans(length - first, BLOCK):
                span = slice(first + split.start, first + split.stop)
                scores = f32(k[row, span, shared]) @ query
                maximum = np.max(scores)
                p = np.exp(scores - maximum)
                parts.append((maximum, np.sum(p), p @ f32(v[row, span, shared])))
            highest = max((part[0] for part in parts), default=np.float32(0))
            total = sum((part[1] * np.exp(part[0] - highest) for part in parts), np.float32(0))
            out = sum((part[2] * np.exp(part[0] - highest) for part in parts), np.zeros(head_dim, np.float32))
            o[row, head] = out / total if total > 0 else 0
    return o


def attention_paged(
    q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, table: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    batch, heads, head_dim = q.shape
    page, kv_heads = k_pages.shape[1:3]
    o = np.full(q.shape, np.nan, q.dtype)
    for row in range(batch):
        length = int(lengths[row])
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query = f32(q[row, head]) / np.sqrt(np.float32(head_dim))
            maximum, total, out = np.float32(-np.inf), np.float32(0), np.zeros(head_dim, np.float32)
            for block in range(-(-length // page)):
                tokens = slice(0, min(page, length - block * page))
                place = table[row, block]
                scores = f32(k_pages[place, tokens, shared]) @ query
                new = max(maximum, np.max(scores))
                rescale, p = np.exp(maximum - new), np.exp(scores - new)
                total = total * rescale + np.sum(p)
                out = out * rescale + p @ f32(v_pages[place, tokens, shared])
                maximum = new
            o[row, head] = out / total if total > 0 else 0
    return o


ATTENTION = implementation(
    attention,
    """
scores not scaled
    -  / np.sqrt(np.float32(head_dim))
    +
scores multiplied by sqrt(head_dim)
    - / np.sqrt(np.float32(head_dim))
    + * np.sqrt(np.float32(head_dim))
scores divided by head_dim
    - / np.sqrt(np.float32(head_dim))
    + / np.float32(head_dim)
scores scaled by a width padded to 8
    - np.float32(head_dim)
    + np.float32(-(-head_dim // 8) * 8)
head h to key head h % kv_heads
    - head // (heads // kv_heads)
    + head % kv_heads
key head 0 for every head
    - head // (heads // kv_heads)
    + 0
groups of 2 for any number of heads (aprender #559)
    - head // (heads // kv_heads)
    + min(head // min(heads // kv_heads, 2), kv_heads - 1)
mask left out
    -  + f32(mask[row][:, span])
    +
mask of the first sequence for every sequence
    - mask[row]
    + mask[0]
mask of the first query for every query
    - mask[row][:, span]
    + mask[row][:1, span]
mask of the first block for every block
    - mask[row][:, span]
    + mask[row][:, : span.stop - span.start]
-10,000 for -inf
    - f32(mask[row][:, span])
    + np.maximum(f32(mask[row][:, span]), -1e4)
mask multiplied in, so that hidden scores are 0
    - query @ f32(k[row, span, shared]).T + f32(mask[row][:, span])
    + (query @ f32(k[row, span, shared]).T) * np.isfinite(mask[row][:, span])
maximum starts at 0
    - np.full((queries, 1), -np.inf, np.float32)
    + np.zeros((queries, 1), np.float32)
maximum starts at -10,000
    - np.full((queries, 1), -np.inf, np.float32)
    + np.full((queries, 1), -1e4, np.float32)
one maximum for all queries
    - np.max(scores, axis=1, keepdims=True)
    + np.max(scores)
maximum not subtracted
    - shift = np.where(np.isfinite(new), new, np.float32(0))
    + shift = np.zeros_like(new)
weighted sum not rescaled
    - out = out * rescale +
    + out = out +
total not rescaled
    - total = total * rescale +
    + total = total +
tail of the keys left out
    - spans(keys, BLOCK)
    + full_spans(keys, BLOCK)
last key left out
    - spans(keys, BLOCK)
    + spans(max(keys - 1, 1), BLOCK)
tail padded with scores of 0
    - maximum = new
    + total = total + (BLOCK - p.shape[1]) * np.exp(-np.maximum(shift, -80))
    +                 maximum = new
values of the key before
    - v[row, span, shared]
    + np.roll(v[row], 1, axis=0)[span, shared]
values of the next head
    - v[row, span, shared]
    + v[row, span, (shared + 1) % kv_heads]
keys for values
    - p @ f32(v[row, span, shared])
    + p @ f32(k[row, span, shared])
a row that sees nothing gives NaN
    - np.where(total == 0, np.float32(1), total)
    + total
a row that sees nothing gives the mean of the values
    - o[row, :, head] = out /
    + out = np.where(total == 0, f32(v[row, :, shared]).mean(axis=0), out)
    +             o[row, :, head] = out /
weights in bfloat16 for float32 values
    - p @ f32(v
    + bf16(p) @ f32(v
weighted sum in float16
    - out = out * rescale + p @ f32(v[row, span, shared])
    + out = f16(out * rescale + p @ f32(v[row, span, shared]))
scores in bfloat16
    - scores = query @ f32(k[row, span, shared]).T + f32(mask[row][:, span])
    + scores = bf16(query @ f32(k[row, span, shared]).T) + f32(mask[row][:, span])
scores capped, as Gemma does
    - scores = query @ f32(k[row, span, shared]).T + f32(mask[row][:, span])
    + scores = 50 * np.tanh(query @ f32(k[row, span, shared]).T / 50) + f32(mask[row][:, span])
not normalized
    - out / np.where(total == 0, np.float32(1), total)
    + out
each block normalized by itself
    - total = total * rescale + np.sum(p, axis=1, keepdims=True)
    + total = np.sum(p, axis=1, keepdims=True)
an epsilon in the total
    - np.where(total == 0, np.float32(1), total)
    + (total + np.float32(1e-6))
one buffer for all results of a shape
    - o = np.full(q.shape, np.nan, q.dtype)
    + o = kept.setdefault((q.shape, q.dtype), np.full(q.shape, np.nan, q.dtype))
right up to 128 keys
    - spans(keys, BLOCK)
    + spans(min(keys, 128), BLOCK)
right up to 512 keys
    - maximum = new
    + maximum = new if span.stop != 512 else np.full_like(new, -np.inf)
right up to groups of 8
    - head // (heads // kv_heads)
    + head // min(heads // kv_heads, 8) % kv_heads
right up to heads of 64
    - query @ f32(k[row, span, shared]).T
    + query[:, :64] @ f32(k[row, span, shared, :64]).T
right up to 64 queries
    - f32(mask[row][:, span])
    + f32(mask[row][np.minimum(np.arange(queries), 63)][:, span])
right up to 8 key heads
    - head // (heads // kv_heads)
    + min(head // (heads // kv_heads), 7)
right up to 4,096 keys
    - spans(keys, BLOCK)
    + spans(min(keys, 4096), BLOCK)
right up to 4,096 queries
    - f32(mask[row][:, span])
    + f32(mask[row][np.minimum(np.arange(queries), 4095)][:, span])
""",
)
PREFILL = implementation(
    attention_prefill,
    """
offset left out
    - offset = int(offsets[row])
    + offset = 0
offset of the first sequence for every sequence
    - offsets[row]
    + offsets[0]
offset one too large
    - i = offset + np.arange
    + i = offset + 1 + np.arange
offset one too small
    - i = offset + np.arange
    + i = offset - 1 + np.arange
queries aligned to the end of the cache
    - i = offset + np.arange
    + i = k.shape[1] - queries + np.arange
a query does not see itself
    - j <= i if window is None
    + (j < i) | (i == 0) if window is None
a query sees the next position
    - seen = j <= i if window is None
    + seen = j <= i + 1 if window is None
window one too large
    - j > i - window
    + j >= i - window
window one too small
    - j > i - window
    + j > i - max(window - 1, 1)
window left out
    - (j <= i) & (j > i - window)
    + j <= i
window counted from the first query of a tile
    - j > i - window
    + j > i[:1] - window
window cut at whole blocks
    - j > i - window
    + j // BLOCK >= (i - window + 1) // BLOCK
first block of a window skipped
    - - window + 1, 0) // BLOCK * BLOCK
    + - window + BLOCK, 0) // BLOCK * BLOCK
last block of keys left out
    - range(first, offset + tile.stop, BLOCK)
    + range(first, max(offset + tile.stop - BLOCK, 1), BLOCK)
only the keys of this chunk
    - first = 0 if window is None
    + first = offset if window is None
last tile of queries never written
    - spans(queries, BLOCK)
    + full_spans(queries, BLOCK)
hidden scores of -10,000
    - query @ f32(k[row, span, shared]).T, -np.inf
    + query @ f32(k[row, span, shared]).T, -1e4
padding seen
    - min(start + BLOCK, offset + queries)
    + min(start + BLOCK, k.shape[1])
hidden positions multiplied by 0
    - out / total
    + out / total + 0 * np.sum(f32(v[row]))
weighted sum not rescaled
    - out = out * rescale +
    + out = out +
total not rescaled
    - total = total * rescale +
    + total = total +
maximum starts at 0
    - np.full(i.shape, -np.inf, np.float32)
    + np.zeros(i.shape, np.float32)
head h to key head h % kv_heads
    - head // (heads // kv_heads)
    + head % kv_heads
right up to 128 keys
    - range(first, offset + tile.stop, BLOCK)
    + range(first, min(offset + tile.stop, 128) if offset < 120 else offset + tile.stop, BLOCK)
right up to an offset of 1,024
    - offset = int(offsets[row])
    + offset = int(offsets[row]) % 1024
right up to 128 queries
    - for tile in spans(queries, BLOCK)
    + for tile in spans(min(queries, 128), BLOCK)
right up to groups of 8
    - head // (heads // kv_heads)
    + head // min(heads // kv_heads, 8) % kv_heads
right up to heads of 64
    - query @ f32(k[row, span, shared]).T
    + query[:, :64] @ f32(k[row, span, shared, :64]).T
right up to heads of 128
    - out = out * rescale + p @ f32(v[row, span, shared])
    + out = out * rescale + p @ (f32(v[row, span, shared]) * (np.arange(head_dim) < 128))
right up to an offset of 4,096
    - offset = int(offsets[row])
    + offset = int(offsets[row]) % 4096
""",
)
DECODE = implementation(
    attention_decode,
    """
length left out
    - length = int(lengths[row])
    + length = k.shape[1]
length one too large
    - length = int(lengths[row])
    + length = min(int(lengths[row]) + 1, k.shape[1])
length one too small
    - length = int(lengths[row])
    + length = max(int(lengths[row]) - 1, 0)
length of the first sequence for every sequence
    - lengths[row]
    + lengths[0]
longest length for every sequence
    - lengths[row]
    + max(lengths)
length rounded up to a block
    - length = int(lengths[row])
    + length = min(-(-int(lengths[row]) // BLOCK) * BLOCK, k.shape[1])
window one too large
    - length - window, 0
    + length - window - 1, 0
window one too small
    - length - window, 0
    + length - max(window - 1, 1), 0
window left out
    - first = 0 if window is None else max(length - window, 0)
    + first = 0
window used as a length
    - first = 0 if window is None else max(length - window, 0)
    + first, length = 0, length if window is None else min(length, window)
last split left out
    - spans(length - first, BLOCK)
    + full_spans(length - first, BLOCK)
sums of splits not rescaled
    - part[2] * np.exp(part[0] - highest)
    + part[2]
totals of splits not rescaled
    - part[1] * np.exp(part[0] - highest)
    + part[1]
splits averaged
    - out / total if total > 0 else 0
    + sum(part[2] / part[1] for part in parts) / len(parts) if total > 0 else 0
an empty sequence gives NaN
    - out / total if total > 0 else 0
    + out / total
maximum of a split at least 0
    - maximum = np.max(scores)
    + maximum = max(np.max(scores), np.float32(0))
head h to key head h % kv_heads
    - head // (heads // kv_heads)
    + head % kv_heads
keys of the first sequence for every sequence
    - k[row, span, shared]
    + k[0, span, shared]
values start a position late
    - v[row, span, shared]
    + np.roll(v[row], -1, axis=0)[span, shared]
scores not scaled
    -  / np.sqrt(np.float32(head_dim))
    +
padding multiplied by 0
    - out / total if total > 0 else 0
    + out / total + 0 * np.sum(f32(v[row])) if total > 0 else 0
an epsilon in the total
    - out / total if total > 0 else 0
    + out / (total + np.float32(1e-6))
right up to 64 splits
    - highest = max((part[0]
    + parts = parts[:64]
    +             highest = max((part[0]
right up to a length of 128
    - length = int(lengths[row])
    + length = min(int(lengths[row]), 128)
length in 12 bits
    - length = int(lengths[row])
    + length = int(lengths[row]) % 4096
right up to 16 sequences
    - o[row, head] = out
    + o[row % 16, head] = out
right up to groups of 8
    - head // (heads // kv_heads)
    + head // min(heads // kv_heads, 8) % kv_heads
right up to heads of 64
    - f32(k[row, span, shared]) @ query
    + f32(k[row, span, shared, :64]) @ query[:64]
right up to 32 key heads
    - head // (heads // kv_heads)
    + head // (heads // kv_heads) % 32
right up to a length of 16,384
    - length = int(lengths[row])
    + length = min(int(lengths[row]), 16_384)
""",
)
PAGED = implementation(
    attention_paged,
    """
pages read in the order of memory
    - place = table[row, block]
    + place = min(block, len(k_pages) - 1)
table of the first sequence for every sequence
    - table[row, block]
    + table[0, block]
table read transposed
    - table[row, block]
    + table.reshape(-1)[min(block * batch + row, table.size - 1)]
page after the one that is named
    - place = table[row, block]
    + place = (table[row, block] + 1) % len(k_pages)
last page whole
    - min(page, length - block * page)
    + page
last page left out
    - range(-(-length // page))
    + range(max(-(-length // page) - 1, min(length, 1)))
last page left out if it is full
    - range(-(-length // page))
    + range(length // page + (length % page > 0) - (length % page == 0 and length > page))
one position too many
    - length = int(lengths[row])
    + length = min(int(lengths[row]) + 1, table.shape[1] * page)
pages of 16, always
    - min(page, length - block * page)
    + min(page, 16, max(length - block * 16, 1))
first position of every page left out
    - tokens = slice(0, min
    + tokens = slice(min(1, page - 1, length - block * page - 1), min
values from the page of the block, keys from the table
    - v_pages[place, tokens, shared]
    + v_pages[min(block, len(v_pages) - 1), tokens, shared]
weighted sum not rescaled
    - out = out * rescale +
    + out = out +
an empty sequence gives NaN
    - out / total if total > 0 else 0
    + out / total
head h to key head h % kv_heads
    - head // (heads // kv_heads)
    + head % kv_heads
page table in 8 bits
    - place = table[row, block]
    + place = int(table[row, block]) % 256
right up to 64 blocks
    - range(-(-length // page))
    + range(min(-(-length // page), 64))
right up to pages of 64
    - min(page, length - block * page)
    + min(page, 64, length - block * page)
right up to a partition of 512 keys
    - maximum = new
    + maximum = new if (block + 1) * page != 512 else np.float32(-np.inf)
right up to groups of 8
    - head // (heads // kv_heads)
    + head // min(heads // kv_heads, 8) % kv_heads
right up to heads of 128
    - f32(k_pages[place, tokens, shared]) @ query
    + f32(k_pages[place, tokens, shared, :128]) @ query[:128]
right up to 4,096 blocks
    - range(-(-length // page))
    + range(min(-(-length // page), 4096))
""",
)
