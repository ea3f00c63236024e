"""The product of integer codes with x in fixed point, and its mutants.

The numbers of x have three digits to the base 256, and sums are exact.
"""

import numpy as np

from llamaspec.verify.mutant import f32, implementation, spans
from llamaspec.verify.mutants.quantized import size

GROUP = 128


def gemv_fixed_point(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> np.ndarray:
    rows, cols = codes.shape
    group = min(size(scheme, cols), GROUP)
    y = np.zeros(rows, np.float32)
    for g, span in enumerate(spans(cols, group)):
        part = f32(x[span])
        exponent = max(int(np.frexp(np.max(np.abs(part)))[1]), -100)
        steps = np.rint(np.ldexp(part.astype(np.float64), 21 - exponent)).astype(np.int64)
        low = (steps + 128) % 256 - 128
        middle = ((steps - low) // 256 + 128) % 256 - 128
        high = (steps - low - 256 * middle) // 65536
        digits = [digit.astype(np.int8).astype(np.int64) for digit in (low, middle, high)]
        sums = [codes[:, span].astype(np.int64) @ digit for digit in digits]
        total = f32(sums[0]) + np.float32(256) * f32(sums[1]) + np.float32(65536) * f32(sums[2])
        scale = scales[:, 0 if scheme == "q8_row" else g]
        y += total * np.ldexp(np.float32(1), exponent - 21) * scale
    return y.astype(x.dtype)


IMPLEMENTATION = implementation(
    gemv_fixed_point,
    """
highest digit left out
    -  + np.float32(65536) * f32(sums[2])
    +
middle digit left out
    -  + np.float32(256) * f32(sums[1])
    +
lowest digit left out
    - total = f32(sums[0]) + np
    + total = np
digits of 255 for 256
    - np.float32(256) * f32(sums[1])
    + np.float32(255) * f32(sums[1])
digits without signs
    - low = (steps + 128) % 256 - 128
    + low = steps % 256
exponent of the first group for every group
    - np.frexp(np.max(np.abs(part)))[1]
    + np.frexp(np.max(np.abs(f32(x[:group]))))[1]
exponent of the whole vector
    - np.frexp(np.max(np.abs(part)))[1]
    + np.frexp(np.max(np.abs(f32(x))))[1]
exponent of the largest number, not of the largest magnitude
    - np.max(np.abs(part))
    + np.abs(np.max(part))
exponent one too small to hold the largest, cut off
    - steps = np.rint(np.ldexp(part.astype(np.float64), 21 - exponent)).astype(np.int64)
    + steps = np.clip(np.rint(np.ldexp(part.astype(np.float64), 21 - exponent)), -(2**20), 2**20).astype(np.int64)
exponent used twice
    - exponent - 21) * scale
    + 2 * exponent - 21) * scale
16 bits for 22
    - steps = np.rint(np.ldexp(part.astype(np.float64), 21 - exponent)).astype(np.int64)
    + steps = np.rint(np.ldexp(part.astype(np.float64), 13 - exponent)).astype(np.int64) * 256
8 bits, as W8A8 has them
    - steps = np.rint(np.ldexp(part.astype(np.float64), 21 - exponent)).astype(np.int64)
    + steps = np.rint(np.ldexp(part.astype(np.float64), 7 - exponent)).astype(np.int64) * 16384
scale of the group before
    - 0 if scheme == "q8_row" else g
    + 0 if scheme == "q8_row" else max(g - 1, 0)
scale of the first row for every row
    - * scale
    + * scale[0]
scale left out
    -  * scale
    +
codes without signs
    - codes[:, span].astype(np.int64) @ digit
    + np.abs(codes[:, span].astype(np.int64)) @ digit
sums in 16 bits
    - total = f32(sums[0]) + np
    + total = f32(sums[0].astype(np.int16)) + np
tail group left out
    - spans(cols, group)
    + full_spans(cols, group)
right up to 64 groups
    - y += total
    + y += (g < 64) * total
right up to 1,024 rows
    - y += total
    + y += (np.arange(rows) < 1024) * total
right up to 4,096 columns
    - part = f32(x[span])
    + part = f32(x[span]) * (span.stop <= 4096)
right up to 4,096 rows
    - y += total
    + y += (np.arange(rows) < 4096) * total
""",
)
