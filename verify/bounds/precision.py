"""Precisions: the roundings that a dtype allows a kernel, and the numbers that the kernel must cope with."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

U = 2.0**-24  # largest relative error of a correct rounding to float32, in which every kernel adds up
TINY = 2.0**-126  # the smallest normal float32; smaller numbers may be flushed to zero


@dataclass(frozen=True)
class Precision:
    """A dtype in which arrays come and go; between, everything is float32."""

    name: str
    dtype: np.dtype
    unit: float  # largest relative error of a correct rounding; 0 for float32, which numbers are already
    smallest: float  # largest absolute error of a correct rounding of a tiny number
    normal: float  # the smallest normal number
    largest: float


def _precision(name: str, *, unit: float, smallest: float) -> Precision:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    limits = ml_dtypes.finfo(dtype)
    return Precision(name, dtype, unit, smallest, float(limits.smallest_normal), float(limits.max))


# GPUs and XLA flush subnormal float32 and bfloat16 numbers to zero, but keep those of float16, which are 2^-24 apart.
PRECISIONS = {
    "float32": _precision("float32", unit=0.0, smallest=TINY),
    "bfloat16": _precision("bfloat16", unit=2.0**-8, smallest=TINY),
    "float16": _precision("float16", unit=2.0**-11, smallest=2.0**-25),
}


def precision(name: str) -> Precision:
    """Look up a dtype. Raises ValueError for one that contracts do not speak of."""
    if name not in PRECISIONS:
        raise ValueError(f"arrays are {', '.join(PRECISIONS)}; got {name}")
    return PRECISIONS[name]
