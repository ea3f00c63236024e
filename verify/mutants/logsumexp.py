"""Log-sum-exp, and its mutants.

The maximum and the sum of each span of scores are combined at the end.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans

SPAN = 64


def logsumexp(x: np.ndarray) -> np.ndarray:
    rows, n = x.shape
    y = np.full(rows, np.nan, np.float32)
    for row in range(rows):
        maxima, sums = [], []
        for span in spans(n, SPAN):
            scores = f32(x[row, span])
            top = np.max(scores)
            maxima.append(top)
            sums.append(np.sum(np.exp(scores - (top if np.isfinite(top) else np.float32(0)))))
        top = np.max(maxima)
        total = sum((s * np.exp(m - top) for m, s in zip(maxima, sums, strict=True)), np.float32(0))
        y[row] = top + np.log(total)
    return y


IMPLEMENTATION = implementation(
    logsumexp,
    """
maximum not subtracted
    - y[row] = top + np.log(total)
    + y[row] = np.log(np.sum(np.exp(f32(x[row]))))
maximum not added again
    - top + np.log(total)
    + np.log(total)
maximum subtracted again
    - top + np.log(total)
    + np.log(total) - top
logarithm to the base 2
    - np.log(total)
    + np.log2(total)
powers of 2
    - np.sum(np.exp(scores
    + np.sum(np.exp2(scores
log of the mean
    - np.log(total)
    + np.log(total / np.float32(n))
sums of spans not rescaled
    - s * np.exp(m - top)
    + s
sums rescaled the wrong way
    - s * np.exp(m - top)
    + s * np.exp(min(top - m, 80))
maximum of the first span for every span
    - top = np.max(maxima)
    + top = maxima[0]
last span left out
    - spans(n, SPAN)
    + full_spans(n, SPAN)
last score left out
    - scores = f32(x[row, span])
    + scores = np.where(np.arange(span.start, span.stop) < max(n - 1, 1), f32(x[row, span]), -np.inf)
tail padded with zeros
    - scores = f32(x[row, span])
    + scores = np.append(f32(x[row, span]), np.zeros(-n % SPAN if span.stop == n else 0, np.float32))
maximum at least 0
    - scores = f32(x[row, span])
    + scores = np.append(f32(x[row, span]), np.float32(0)) if span.start == 0 else f32(x[row, span])
an epsilon in the sum
    - np.log(total)
    + np.log(total + np.float32(1e-6))
log of 1 + sum
    - np.log(total)
    + np.log1p(total)
sum in bfloat16
    - np.log(total)
    + np.log(bf16(total))
result in float16
    - y[row] = top + np.log(total)
    + y[row] = f16(top + np.log(total))
first row for every row
    - x[row, span]
    + x[0, span]
right up to 64 spans
    - top = np.max(maxima)
    + maxima, sums = maxima[:64], sums[:64]
    +         top = np.max(maxima)
right up to 1,024 rows
    - for row in range(rows)
    + for row in range(min(rows, 1024))
right up to 4,096 rows
    - for row in range(rows)
    + for row in range(min(rows, 4096))
""",
)
