"""Ternary matrices in the layout of transformers' "bitnet" (https://arxiv.org/abs/2402.17764), quantized offline.

weight         codes plus 1, two bits each: byte row i has matrix rows i, i + n, i + 2n and i + 3n, the first in
               the lowest bits, where n is a quarter of the rows
weight_scale   one number for the matrix; a weight is its code (-1, 0 or 1) divided by this number
"""

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers.blocks import Quantized


class BitNet(Rule):
    """The layout with four rows to a byte."""

    form, zeros = "int8", False

    def group_of(self, cols: int) -> int:
        return cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {"weight": StoredArray((-(-rows // 4), cols), ("uint8",)), "weight_scale": StoredArray((1,), FLOATS)}

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        if rows % 4:
            raise ValueError(f"{rows} rows are no four equal parts")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        packed = arrays["weight"]
        quarter, row = np.divmod(np.arange(start, stop), len(packed))
        codes = (packed[row] >> (2 * quarter[:, None]).astype(np.uint8) & 3).astype(np.int8) - np.int8(1)
        with np.errstate(divide="ignore"):  # readers refuse a scale that is not finite
            scale = 1 / arrays["weight_scale"].astype(np.float32).reshape(1, 1)
        return Quantized(codes, np.repeat(scale, stop - start, axis=0))


def read_bitnet(fields: Fields) -> Rule:
    """Read a BitNet layout from a quantization_config. Raises `CheckpointError` if it is not supported."""
    kind, mode = fields.values.get("linear_class", "bitlinear"), fields.values.get("quantization_mode", "offline")
    if (kind, mode) != ("bitlinear", "offline") or fields.boolean("use_rms_norm", False):
        what = f"bitnet with {short(kind)}, {short(mode)}"
        raise refused(fields.path, f"quantization_config: {what} is not read (only bitlinear, offline, without norms)")
    return BitNet()
