"""Reads ternary matrices that were quantized offline, in transformers' layout "bitnet".

See https://arxiv.org/abs/2402.17764.

weight         codes plus 1, two bits per code. With n = rows / 4, row i of the bytes has rows i, i + n, i + 2n and
               i + 3n of the matrix, with row i in the lowest bits.
weight_scale   one number for the matrix; a weight is its code (-1, 0 or 1) divided by this number
"""

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers.blocks import Quantized


class BitNet(Rule):
    """The layout of "bitnet", in which each byte has the codes of four rows."""

    form, zeros = "int8", False

    def group_of(self, cols: int) -> int:
        return cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {"weight": StoredArray((-(-rows // 4), cols), ("uint8",)), "weight_scale": StoredArray((1,), FLOATS)}

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        if rows % 4:
            raise ValueError(f"the matrix has {rows} rows, expected a multiple of 4")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        packed = arrays["weight"]
        quarter, row = np.divmod(np.arange(start, stop), len(packed))
        codes = (packed[row] >> (2 * quarter[:, None]).astype(np.uint8) & 3).astype(np.int8) - np.int8(1)
        with np.errstate(divide="ignore"):  # readers refuse a scale that is not finite
            scale = 1 / arrays["weight_scale"].astype(np.float32).reshape(1, 1)
        return Quantized(codes, np.repeat(scale, stop - start, axis=0))


def read_bitnet(fields: Fields) -> Rule:
    """Read a BitNet layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    kind, mode = fields.values.get("linear_class", "bitlinear"), fields.values.get("quantization_mode", "offline")
    if (kind, mode) != ("bitlinear", "offline") or fields.boolean("use_rms_norm", False):
        what = f"bitnet with linear_class {short(kind)} and quantization_mode {short(mode)}"
        what = f"{what} is not supported (only bitlinear and offline, without use_rms_norm)"
        raise refused(fields.path, f"quantization_config: {what}")
    return BitNet()
