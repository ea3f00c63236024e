"""Writes arrays as strings that a browser turns back into the same numbers."""

import base64
import math
from typing import Any

import numpy as np

CELLS = 1024  # largest number of values of an array on the page; longer arrays are cut


def packed(array: np.ndarray) -> str:
    """Encode the numbers of an array as little-endian float32, in base64.

    >>> packed(np.array([1.0, 2.0]))
    'AACAPwAAAEA='
    """
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")


def heat_map(name: str, axes: tuple[str, ...], array: np.ndarray, **beside: np.ndarray) -> dict[str, Any]:
    """Describe an array for a heat map: name, axes, shape, norm, and the first `CELLS` values.

    `beside` contains more arrays of the same shape, such as errors, by name. We add their first `CELLS` values.

    >>> heat_map("x", ("dim",), np.ones(2), error=np.zeros(2))["shape"]
    [2]
    """
    assert len(axes) == array.ndim and all(companion.shape == array.shape for companion in beside.values())
    parts = {"values": array, **beside}
    return {
        "name": name,
        "axes": list(axes),
        "shape": list(array.shape),
        "columns": _columns(array.shape),
        "norm": float(np.linalg.norm(array.astype(np.float64))),
        **{part: packed(numbers.ravel()[:CELLS]) for part, numbers in parts.items()},
    }


def _columns(shape: tuple[int, ...]) -> int:
    """Return the number of columns of the map: the last dimension. A vector gets about twice as many columns as rows.

    >>> _columns((4, 32)), _columns((128,)), _columns((3,))
    (32, 16, 3)
    """
    *rows, last = shape
    if rows:
        return last
    count = min(last, CELLS)
    return min(count, 1 << math.ceil(math.log2(max(1.0, math.sqrt(2 * count)))))
