"""An online softmax, and its mutants.

It updates a running maximum and a running sum, one block of scores at a time.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

BLOCK = 16


def softmax(x: np.ndarray) -> np.ndarray:
    rows, n = x.shape
    p = np.full((rows, n), np.nan, x.dtype)
    for row in range(rows):
        maximum, total = np.float32(-np.inf), np.float32(0)
        for span in spans(n, BLOCK):
            scores = f32(x[row, span])
            new = max(maximum, np.max(scores))
            shift = new if np.isfinite(new) else np.float32(0)
            total = total * np.exp(maximum - shift) + np.sum(np.exp(scores - shift))
            maximum = new
        shift = maximum if np.isfinite(maximum) else np.float32(0)
        for out in spans(n, BLOCK):
            weights = np.exp(f32(x[row, out]) - shift)
            p[row, out] = weights / total if total > 0 else 0
    return p


IMPLEMENTATION = implementation(
    softmax,
    """
maximum starts at 0
    - maximum, total = np.float32(-np.inf), np.float32(0)
    + maximum, total = np.float32(0), np.float32(0)
maximum starts at -10,000
    - maximum, total = np.float32(-np.inf), np.float32(0)
    + maximum, total = np.float32(-1e4), np.float32(0)
sum not rescaled when the maximum rises
    - total * np.exp(maximum - shift) +
    + total +
sum rescaled the wrong way
    - np.exp(maximum - shift)
    + np.exp(min(shift - maximum, 80.0))
maximum not subtracted
    - shift = new if np.isfinite(new) else np.float32(0)
    + shift = np.float32(0)
maximum of the last block for every block
    - shift = maximum if np.isfinite(maximum) else np.float32(0)
    + shift = np.max(scores) if np.isfinite(maximum) else np.float32(0)
first score for the maximum
    - new = max(maximum, np.max(scores))
    + new = max(maximum, scores[0])
tail left out
    - for span in spans(n, BLOCK)
    + for span in full_spans(n, BLOCK)
tail padded with zeros
    - scores = f32(x[row, span])
    + scores = np.append(f32(x[row, span]), np.zeros(-n % BLOCK if span.stop == n else 0, np.float32))
tail never written
    - for out in spans(n, BLOCK)
    + for out in full_spans(n, BLOCK)
last score left out
    - scores = f32(x[row, span])
    + scores = np.where(np.arange(span.start, span.stop) < max(n - 1, 1), f32(x[row, span]), -np.inf)
only the sum of the last block
    - total * np.exp(maximum - shift) +
    + 0 * total +
a row of -inf gives NaN
    - weights / total if total > 0 else 0
    + weights / total
a row of -inf gives a uniform distribution
    - weights / total if total > 0 else 0
    + weights / total if total > 0 else 1 / n
-inf becomes -10,000
    - weights = np.exp(f32(x[row, out]) - shift)
    + weights = np.exp(np.maximum(f32(x[row, out]), -1e4) - shift)
powers of 2 for powers of e
    - np.sum(np.exp(scores - shift))
    + np.sum(np.exp2(scores - shift))
a temperature of 1.01
    - weights = np.exp(f32(x[row, out]) - shift)
    + weights = np.exp((f32(x[row, out]) - shift) / np.float32(1.01))
sum in bfloat16
    - total = total * np.exp(maximum - shift) + np.sum(np.exp(scores - shift))
    + total = bf16(total * np.exp(maximum - shift) + np.sum(np.exp(scores - shift)))
exponentials in float16
    - np.sum(np.exp(scores - shift))
    + np.sum(f16(np.exp(scores - shift)))
scores rounded to bfloat16
    - scores = f32(x[row, span])
    + scores = bf16(x[row, span])
normalized by n
    - weights / total if total > 0 else 0
    + weights / n if total > 0 else 0
not normalized
    - weights / total if total > 0 else 0
    + weights if total > 0 else 0
maximum and sum not reset between rows
    - maximum, total = np.float32(-np.inf), np.float32(0)
    + maximum, total = (np.float32(-np.inf), np.float32(0)) if row == 0 else (maximum, total)
small probabilities cut off
    - p[row, out] = weights / total if total > 0 else 0
    + p[row, out] = np.where(weights < 1e-4 * total, 0, weights / total) if total > 0 else 0
right up to 1,024 scores
    - for span in spans(n, BLOCK)
    + for span in spans(min(n, 1024), BLOCK)
right up to 4,096 scores
    - for out in spans(n, BLOCK)
    + for out in spans(min(n, 4096), BLOCK)
right up to 1,024 rows
    - for row in range(rows)
    + for row in range(min(rows, 1024))
one buffer for all results of a shape
    - p = np.full((rows, n), np.nan, x.dtype)
    + p = kept.setdefault((x.shape, x.dtype), np.full((rows, n), np.nan, x.dtype))
first result of a shape and a first number
    - return p
    + return kept.setdefault((x.shape, x.dtype, x[0, 0].tobytes()), p)
a sum left over from the call before
    - p[row, out] = weights / total if total > 0 else 0
    + p[row, out] = weights / (total + kept.get("total", 0)) if total > 0 else 0
    +         kept["total"] = total * np.float32(1e-3)
sum in the dtype of the scores
    - np.sum(np.exp(scores - shift))
    + np.sum(np.exp(scores - shift), dtype=x.dtype).astype(np.float32)
probabilities rounded before they are divided
    - p[row, out] = weights / total if total > 0 else 0
    + p[row, out] = weights.astype(x.dtype) / total if total > 0 else 0
an epsilon in the sum
    - weights / total if total > 0
    + weights / (total + np.float32(1e-6)) if total > 0
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
