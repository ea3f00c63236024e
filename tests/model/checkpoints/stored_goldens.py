"""Decode the tensors in golden files of checkpoint layouts, which store dtype, shape and base64 bytes."""

import base64
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Decode the tensors of one golden case, by name."""

    def array(tensor: Mapping[str, Any]) -> np.ndarray:
        dtype = np.dtype(NARROW.get(tensor["dtype"], tensor["dtype"]))
        return np.frombuffer(base64.b64decode(tensor["data"]), dtype).reshape(tensor["shape"])

    return {name: array(tensor) for name, tensor in tensors.items()}
