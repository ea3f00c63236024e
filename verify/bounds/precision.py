"""Precisions: the rounding errors that a dtype allows a kernel, and the range of its numbers."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

U = 2.0**-24  # largest relative error of a correct rounding to float32; every kernel accumulates in float32
TINY = 2.0**-126  # the smallest normal float32; hardware may flush smaller numbers to zero


@dataclass(frozen=True)
class Precision:
    """A dtype of inputs and outputs; computations in between are in float32."""

    name: str
    dtype: np.dtype
    unit: float  # largest relative error of a correct rounding; 0 for float32, since results are float32 already
    smallest: float  # largest absolute error of a correct rounding of a tiny number
    normal: float  # the smallest normal number
    largest: float


def _precision(name: str, *, unit: float, smallest: float) -> Precision:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    limits = ml_dtypes.finfo(dtype)
    return Precision(name, dtype, unit, smallest, float(limits.smallest_normal), float(limits.max))


# GPUs and XLA flush subnormal float32 and bfloat16 numbers to zero, but keep subnormal float16 numbers, which are 2^-24
# apart.
PRECISIONS = {
    "float32": _precision("float32", unit=0.0, smallest=TINY),
    "bfloat16": _precision("bfloat16", unit=2.0**-8, smallest=TINY),
    "float16": _precision("float16", unit=2.0**-11, smallest=2.0**-25),
}


def precision(name: str) -> Precision:
    """Look up a dtype by name. Raises ValueError for an unsupported dtype."""
    if name not in PRECISIONS:
        raise ValueError(f"expected one of the dtypes {', '.join(PRECISIONS)}; got {name}")
    return PRECISIONS[name]
