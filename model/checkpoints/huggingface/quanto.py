"""Matrices in the layouts of optimum-quanto (https://github.com/huggingface/optimum-quanto).

QuantizedModelForCausalLM.save_pretrained() writes quanto_qmap.json: the type of each quantized module's weights.

    type              tensors under weight.                                   a weight
    qint8             _data int8, _scale [rows, 1]                            code * scale
    qfloat8_e4m3fn    _data e4m3, _scale [rows, 1]                            code * scale
    (qfloat8)
    qint4, qint2      _data._data bytes, _scale, _shift [rows * groups, 1]    code * scale - shift

The codes of qint4 and qint2 form a table with one row per group. To pack it, quanto cuts the table into 2 parts (qint4)
or 4 parts (qint2) with the same number of rows. A byte holds one code of each part, the first part in the lowest bits.
The group size is the largest of 128, 96, 64 and 32 that divides the number of columns. If none divides it, or if a row
has at most 128 columns, the whole row is one group.
"""

import numpy as np

from llamaspec.model.checkpoints.checkpoint import CodesWithMinima, Form, refused
from llamaspec.model.checkpoints.huggingface.compressed import E4M3
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.huggingface.targets import EVERY, ByTarget, check_target
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers.blocks import Quantized

DATA, PACKED, SCALE, SHIFT = "weight._data", "weight._data._data", "weight._scale", "weight._shift"
GROUPS = (128, 96, 64, 32)
INSTEAD = "load the model by optimum-quanto, and save the dequantize()d weights; or take the original"


class ByteCodes(Rule):
    """The layouts of optimum-quanto with one byte per code: qint8 and qfloat8."""

    zeros = False

    def __init__(self, form: Form):
        self.form = form

    def group_of(self, cols: int) -> int:
        return cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        dtype = "int8" if self.form == "int8" else E4M3.name
        return {DATA: StoredArray((rows, cols), (dtype,)), SCALE: StoredArray((rows, 1), FLOATS)}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        codes = arrays[DATA][start:stop]
        return Quantized(
            codes if self.form == "int8" else codes.view(np.uint8), arrays[SCALE][start:stop].astype(np.float32)
        )


class BitCodes(Rule):
    """The layouts of qint4 and qint2."""

    form, zeros = "int4_min", False

    def __init__(self, bits: int):
        self.bits = bits

    def group_of(self, cols: int) -> int:
        return next((group for group in GROUPS if cols % group == 0), cols) if cols > GROUPS[0] else cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        group = self.group_of(cols)
        groups = rows * cols // group
        grid = StoredArray((groups, 1), FLOATS)
        packed = StoredArray((-(-groups * self.bits // 8), group), ("uint8",))
        return {PACKED: packed, SCALE: grid, SHIFT: grid}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> CodesWithMinima:
        group, packed = self.group_of(cols), arrays[PACKED]
        groups = cols // group
        place, row = np.divmod(np.arange(start * groups, stop * groups), len(packed))
        codes = packed[row] >> (self.bits * place).astype(np.uint8)[:, None] & np.uint8((1 << self.bits) - 1)
        scales, shifts = (
            arrays[name][start * groups : stop * groups].astype(np.float32).reshape(-1, groups)
            for name in (SCALE, SHIFT)
        )
        return CodesWithMinima(codes.reshape(stop - start, cols), scales, -shifts)


TYPES: dict[str, Rule] = {
    "qint8": ByteCodes("int8"),
    "qfloat8": ByteCodes("fp8"),
    "qfloat8_e4m3fn": ByteCodes("fp8"),
    "qint4": BitCodes(4),
    "qint2": BitCodes(2),
}


def read_quanto(fields: Fields) -> Rule:
    """Read the layouts in quanto_qmap.json. Raises `CheckpointError` if one is not supported."""
    if "weights" in fields.values:  # the settings by which transformers quantizes a model as it loads plain weights
        kind = short(fields.values["weights"])
        raise refused(fields.path, f"quantization_config: quanto with weights {kind} is not supported; {INSTEAD}")
    modules: dict[str, list[str]] = {}
    for name in sorted(fields.values.keys() - {"quant_method"}):
        kind = fields.object(name).get("weights")
        if kind != "none":
            if not isinstance(kind, str) or kind not in TYPES:
                what = f"{short(name)}: weights of type {short(kind)} are not supported (only {', '.join(TYPES)})"
                raise refused(fields.path, f"{what}; {INSTEAD}")
            check_target(name, fields)
            modules.setdefault(kind, []).append(name)
    if not modules:
        raise refused(fields.path, "no module has quantized weights")
    first, *more = modules
    if not more:
        return TYPES[first]
    return ByTarget([(names, TYPES[kind]) for kind, names in modules.items()] + [([EVERY], TYPES[first])])
