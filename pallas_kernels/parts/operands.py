"""A check of the shapes and dtypes of a kernel's arrays."""

import jax
import numpy as np
from jax.typing import DTypeLike

from llamaspec.pallas_kernels.unsupported import Unsupported


def check_operand(
    op: str, name: str, array: jax.Array | jax.ShapeDtypeStruct | None, shape: tuple[int, ...], dtype: DTypeLike
) -> None:
    """Raise ValueError for a wrong shape, and Unsupported for a wrong dtype. `array` may be None."""
    if array is None or (array.shape == shape and array.dtype == dtype):
        return
    words = f"{op} takes {name} {list(shape)} in {np.dtype(dtype)}, got {list(array.shape)} in {array.dtype}"
    raise ValueError(words) if array.shape != shape else Unsupported(words)
