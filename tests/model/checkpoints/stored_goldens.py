"""Decode the tensors in golden files of checkpoint layouts, and read them as weights.

The files store dtype, shape and base64 bytes of each tensor.
"""

import base64
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from llamaspec.model.checkpoints.checkpoint import Codes
from llamaspec.model.checkpoints.codes import exact_weights
from llamaspec.model.checkpoints.huggingface.rule import Rule

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def arrays_of(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Decode the tensors of one golden case, by name."""

    def array(tensor: Mapping[str, Any]) -> np.ndarray:
        dtype = np.dtype(NARROW.get(tensor["dtype"], tensor["dtype"]))
        return np.frombuffer(base64.b64decode(tensor["data"]), dtype).reshape(tensor["shape"])

    return {name: array(tensor) for name, tensor in tensors.items()}


def weights_read(rule: Rule, arrays: Mapping[str, np.ndarray], shape: tuple[int, int], *, rows: int) -> np.ndarray:
    """Read the weights of a matrix from its arrays, `rows` rows at a time, as opening a checkpoint does.

    The arrays must have the shapes and dtypes that `rule` expects. The caller compares their names.
    """
    height, cols = shape
    stored = rule.stored(height, cols)
    for name, array in arrays.items():
        assert array.shape == stored[name].shape and array.dtype.name in stored[name].dtypes
    rule.check(arrays, height, cols)
    codes = Codes(rule.form, rule.group_of(cols), rule.zeros, bytes=0, parts=lambda: iter(()))
    parts = (rule.part(arrays, start, start + rows, cols) for start in range(0, height, rows))
    return np.concatenate([exact_weights(codes, part) for part in parts])
