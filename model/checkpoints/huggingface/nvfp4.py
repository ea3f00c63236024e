"""Reads matrices in NVFP4 (see `reference.quantizers.nvfp4`), in the layouts of two libraries.

    compressed-tensors   weight_packed, weight_scale, weight_global_scale    w = code * scale / global scale
    Model Optimizer      weight, weight_scale, weight_scale_2                w = code * scale * scale_2

A code is a number in e2m1. Two codes share a byte, the first in the low half. Each group of 16 columns has a scale in
e4m3; a group of Model Optimizer's W4A8_NVFP4_FP8 has 32 columns. All codes are multiples of 1/2, so we convert them to
int8 by doubling them, and halve the scales. We round the product (or quotient) of the two scales to float32, as both
libraries do.
"""

import ml_dtypes
import numpy as np

from llamaspec.model.checkpoints.huggingface.rule import Arrays, Rule, StoredArray, nibbles
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.minifloat import E2M1
from llamaspec.reference.quantizers.nvfp4 import BLOCK

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TWICE = (2 * E2M1.decode(np.arange(16, dtype=np.uint8))).astype(np.int8)  # for each code, twice its number


class NVFP4(Rule):
    """A layout of NVFP4, with the codes in the tensor `packed` and the scale of the whole matrix in `scale`."""

    form, zeros = "int8", False

    def __init__(self, *, packed: str, scale: str, divided: bool, group: int = BLOCK):
        self.packed, self.scale, self.group = packed, scale, group
        self.divided = divided  # whether the scale of the matrix divides the groups' scales

    def group_of(self, cols: int) -> int:
        del cols
        return self.group

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {
            self.packed: StoredArray((rows, -(-cols // 2)), ("uint8",)),
            "weight_scale": StoredArray((rows, -(-cols // self.group)), (E4M3.name,)),
            self.scale: StoredArray((1,), ("float32",)),
        }

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        matrix_scale = arrays[self.scale].reshape(()).astype(np.float32)
        scales = arrays["weight_scale"][start:stop].astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # readers refuse infinite or NaN weights
            scales = (scales / matrix_scale if self.divided else scales * matrix_scale) / 2
        return Quantized(TWICE[nibbles(arrays[self.packed][start:stop])[:, :cols]], scales)
