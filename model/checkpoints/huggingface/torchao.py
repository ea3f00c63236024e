"""Reads matrices in the layouts of torchao (https://github.com/pytorch/ao) from safetensors files of transformers 5.

A quantized module has the tensors _weight_qdata (codes) and _weight_scale, and _weight_zero_point if the codes are
integers. quant_type in config.json (here without its suffix Config) determines the layout:

    quant_type                             codes                                   a weight
    Int8WeightOnly, Float8WeightOnly       one byte per code                       (code - zero point) * scale
    Int8DynamicActivationInt8Weight,       one byte per code                       (code - zero point) * scale
    Float8DynamicActivationFloat8Weight
    IntxWeightOnly,                        one byte per code                       (code - zero point) * scale
    Int8DynamicActivationIntxWeight
    Int4WeightOnly, packing format PLAIN   two codes per byte, the first in the    code * scale + zero point
                                           low half; transposed scales and zeros

Each row, each group of columns in a row, or the whole matrix has a scale. Older layouts, and layouts with a string as
quant_type, are saved as pickles, which we do not read.
"""

from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import CodesWithMinima, Form, refused
from llamaspec.model.checkpoints.huggingface.compressed import E4M3, CompressedTensors
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray, nibbles
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized

CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
FORMS: dict[str, Form] = {
    "Int8WeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "IntxWeightOnlyConfig": "int8",
    "Int8DynamicActivationIntxWeightConfig": "int8",
    "Float8WeightOnlyConfig": "fp8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}
INT4 = "Int4WeightOnlyConfig"
READ = f"only {', '.join(FORMS)}, and {INT4} in the packing format PLAIN"
INSTEAD = (
    "load the model in transformers with torchao, call dequantize() and save it, or download an unquantized release"
)


class ByteCodes(CompressedTensors):
    """The layouts of torchao with one byte per code."""

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        grid = self.scales(rows, cols) if self.rows_alike else (1, 1)
        stored = {
            CODES: StoredArray((rows, cols), ("int8" if self.form == "int8" else E4M3.name,)),
            SCALE: StoredArray(grid, FLOATS),
        }
        return stored | ({ZERO: StoredArray(grid, ("int8",), optional=not self.zeros)} if self.form == "int8" else {})

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        if not self.zeros and ZERO in arrays and np.any(arrays[ZERO]):
            raise ValueError(f"{ZERO} contains numbers other than 0, but config.json states symmetric codes")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        names = {"weight": CODES, "weight_scale": SCALE, "weight_zero_point": ZERO}
        return super().part(
            {own_name: arrays[name] for own_name, name in names.items() if name in arrays}, start, stop, cols
        )


class PlainInt4(Rule):
    """The layout of Int4WeightOnly: codes of 4 bits; a weight is code * scale + zero point."""

    form, zeros = "int4_min", False

    def __init__(self, group: int):
        self.group = group

    def group_of(self, cols: int) -> int:
        del cols
        return self.group

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        grid = StoredArray((-(-cols // self.group), rows), FLOATS)
        return {CODES: StoredArray((rows, -(-cols // 2)), ("int8", "uint8")), SCALE: grid, ZERO: grid}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> CodesWithMinima:
        codes = nibbles(arrays[CODES][start:stop].view(np.uint8))[:, :cols] ^ np.uint8(8)  # -8 to 7, plus 8
        scales, middles = (arrays[name][:, start:stop].T.astype(np.float32) for name in (SCALE, ZERO))
        with np.errstate(over="ignore", invalid="ignore"):  # readers refuse weights that are not finite
            return CodesWithMinima(codes, np.ascontiguousarray(scales), middles - 8 * scales)


def read_torchao(fields: Fields) -> Rule:
    """Read a torchao layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    stated = fields.values.get("quant_type")
    if not isinstance(stated, dict):
        raise _unread(fields, f"torchao with quant_type {short(stated)}, which is saved as a pickle,")
    config = Fields(Fields(stated, fields.path).object("default"), fields.path)
    kind, settings = config.values.get("_type"), Fields(config.object("_data"), fields.path)
    if kind == INT4:
        packing, group = _named(settings, "int4_packing_format") or "PLAIN", settings.integer("group_size", 128)
        if packing != "PLAIN" or group < 1 or config.integer("_version", 2) < 2:
            what = f"torchao's {INT4} of version {config.integer('_version', 2)} with group_size {group}"
            raise _unread(fields, f"{what} and the packing format {short(packing)}")
        return PlainInt4(group)
    if not isinstance(kind, str) or kind not in FORMS:
        raise _unread(fields, f"torchao's {short(kind)}")
    if "Intx" in kind and (_named(settings, "intx_packing_format") or "UNPACKED_TO_INT8") != "UNPACKED_TO_INT8":
        raise _unread(
            fields, f"torchao's {kind} with the packing format {short(_named(settings, 'intx_packing_format'))}"
        )
    if kind.startswith("Float8") and (_named(settings, "weight_dtype") or E4M3.name) != E4M3.name:
        raise _unread(fields, f"torchao's {kind} with weight_dtype {short(_named(settings, 'weight_dtype'))}")
    zeros = "ASYMMETRIC" in (_named(settings, "mapping_type"), _named(settings, "weight_mapping_type"))
    form = FORMS[kind]
    return ByteCodes(form, bits=8, zeros=zeros and form == "int8", **_granularity(settings, kind, fields))


def _granularity(settings: Fields, kind: str, fields: Fields) -> dict[str, Any]:
    """Translate the granularity, which says which weights share a scale, to arguments of `CompressedTensors`."""
    name = "weight_granularity" if "weight_granularity" in settings.values else "granularity"
    setting = settings.values.get(name)
    if isinstance(setting, list) and setting:  # the first item is for activations, the last for weights
        setting = setting[-1]
    if setting is None:
        return {"group": None}
    granularity = Fields(setting if isinstance(setting, dict) else {}, fields.path)
    match granularity.values.get("_type"), granularity.object("_data"):
        case ("PerRow", _) | ("PerAxis", {"axis": 0}):
            return {"group": None}
        case "PerTensor", _:
            return {"group": None, "rows_alike": 0}
        case "PerGroup", {"group_size": int(size)} if size > 0:
            return {"group": size}
        case other, _:
            raise _unread(fields, f"torchao's {kind} with granularity {short(other)}")


def _named(settings: Fields, key: str) -> object:
    """Read a setting that is the name of an enumeration's value or of a dtype; None if the setting is absent."""
    return settings.object(key).get("_data")


def _unread(fields: Fields, what: str) -> Exception:
    return refused(fields.path, f"quantization_config: {what} is not supported ({READ}); {INSTEAD}")
