"""Precisions: the rounding errors that a dtype allows a kernel, and the range of its numbers."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

import numpy as np

U = 2.0**-24  # largest relative error of a correct rounding to float32; every kernel accumulates in float32
TINY = 2.0**-126  # the smallest normal float32; hardware may flush smaller numbers to zero


@dataclass(frozen=True)
class Precision:
    """A dtype of inputs and outputs; computations in between are in float32."""

    name: str
    unit: float  # largest relative error of a correct rounding; 0 for float32, since results are float32 already
    smallest: float  # largest absolute error of a correct rounding of a tiny number
    normal: float  # the smallest normal number
    largest: float

    @cached_property
    def dtype(self) -> np.dtype:
        """NumPy's dtype. Only bfloat16 needs the package ml_dtypes, which does not exist for browsers."""
        return np.dtype(getattr(import_module("ml_dtypes"), self.name) if self.name == "bfloat16" else self.name)


# GPUs and XLA flush subnormal float32 and bfloat16 numbers to zero, but keep subnormal float16 numbers, which are 2^-24
# apart.
PRECISIONS = {
    "float32": Precision("float32", 0.0, TINY, TINY, (2 - 2.0**-23) * 2.0**127),
    "bfloat16": Precision("bfloat16", 2.0**-8, TINY, TINY, (2 - 2.0**-7) * 2.0**127),
    "float16": Precision("float16", 2.0**-11, 2.0**-25, 2.0**-14, 65504.0),
}


def precision(name: str) -> Precision:
    """Look up a dtype by name. Raises ValueError for an unsupported dtype."""
    if name not in PRECISIONS:
        raise ValueError(f"expected one of the dtypes {', '.join(PRECISIONS)}; got {name}")
    return PRECISIONS[name]
