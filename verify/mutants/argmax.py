"""Argmax of each row, and its mutants.

It reads one block of scores at a time, and keeps the best score so far.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 64


def argmax(x: np.ndarray) -> np.ndarray:
    rows, n = x.shape
    best = np.zeros(rows, np.int32)
    for row in range(rows):
        largest = np.float32(-np.inf)
        for span in spans(n, BLOCK):
            scores = f32(x[row, span])
            at = int(np.argmax(scores))
            if scores[at] > largest:
                largest = scores[at]
                best[row] = span.start + at
    return best


IMPLEMENTATION = implementation(
    argmax,
    """
last of several that are equal, between blocks
    - scores[at] > largest
    + scores[at] >= largest
last of several that are equal, inside a block
    - at = int(np.argmax(scores))
    + at = len(scores) - 1 - int(np.argmax(scores[::-1]))
largest starts at 0
    - largest = np.float32(-np.inf)
    + largest = np.float32(0)
largest starts at -10,000
    - largest = np.float32(-np.inf)
    + largest = np.float32(-1e4)
smallest instead of largest
    - at = int(np.argmax(scores))
    + at = int(np.argmin(scores))
magnitudes compared
    - scores = f32(x[row, span])
    + scores = np.abs(f32(x[row, span]))
compared in bfloat16
    - scores = f32(x[row, span])
    + scores = bf16(x[row, span])
compared in float16
    - scores = f32(x[row, span])
    + scores = f16(x[row, span])
index inside the block
    - best[row] = span.start + at
    + best[row] = at
index from 1
    - best[row] = span.start + at
    + best[row] = span.start + at + 1
index in bfloat16
    - best[row] = span.start + at
    + best[row] = bf16(span.start + at)
tail left out
    - spans(n, BLOCK)
    + full_spans(n, BLOCK)
last score left out
    - scores = f32(x[row, span])
    + scores = np.where(np.arange(span.start, span.stop) < max(n - 1, 1), f32(x[row, span]), -np.inf)
only the first block
    - spans(n, BLOCK)
    + spans(n, BLOCK)[:1]
first row for every row
    - x[row, span]
    + x[0, span]
0 larger than -0
    - at = int(np.argmax(scores))
    + at = int(np.argmax(scores + np.where(np.signbit(scores), 0, np.float32(1e-30))))
right up to 4,096 scores
    - spans(n, BLOCK)
    + spans(min(n, 4096), BLOCK)
index in 16 bits
    - best[row] = span.start + at
    + best[row] = (span.start + at) & 0xFFFF
right up to 1,024 rows
    - for row in range(rows)
    + for row in range(min(rows, 1024))
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
