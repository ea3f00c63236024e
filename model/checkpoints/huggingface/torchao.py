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

FqnToConfig (older: ModuleFqnToConfig) states the quant_type of single modules. Its key `_default` applies to all other
modules. A module with the value null is not quantized. Embeddings may be quantized, too.

TILE_PACKED_TO_4D is the layout of PyTorch's kernel tinygemm (aten/src/ATen/native/cuda/int4mm.cu). Rows are padded to
tiles of 8, and columns to a multiple of 1024. A tile of 8 rows and 128 columns has 4 words for each of 32 threads.
Thread t has row t / 4 of the tile. Its word w has eight columns, the lowest bits first: 32 w + 2 (t mod 4) plus 0, 8,
16, 24, 1, 9, 17 and 25. Scales and zero points are pairs: [groups, rows, 2].
"""

from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import CodesWithMinima, Form, refused
from llamaspec.model.checkpoints.huggingface.compressed import E4M3, CompressedTensors
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import (
    FLOATS,
    INT32,
    Arrays,
    Rule,
    StoredArray,
    nibbles,
    unpack_words,
)
from llamaspec.model.checkpoints.huggingface.targets import EVERY, PREFIX, ByTarget, check_target
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tensors import QUANTIZABLE, Role
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
BY_MODULE = {"FqnToConfig": "fqn_to_config", "ModuleFqnToConfig": "module_fqn_to_config"}  # and the key of its modules
READ = f"only {', '.join(FORMS)}, {INT4} in the packing formats PLAIN and TILE_PACKED_TO_4D, and FqnToConfig of these"
PAIRS = "_weight_scale_and_zero"
TILE_ROWS, TILE_COLUMNS, WHOLE_COLUMNS = 8, 128, 1024  # of tile_packed_to_4d
ROLES = (*QUANTIZABLE, Role.EMBEDDING)
INSTEAD = (
    "load the model in transformers with torchao, call dequantize() and save it, or download an unquantized release"
)


class ByteCodes(CompressedTensors):
    """The layouts of torchao with one byte per code."""

    roles = ROLES

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


def _around_8(codes: np.ndarray, scales: np.ndarray, middles: np.ndarray) -> CodesWithMinima:
    """Return the codes, scales and minima of a matrix in which a weight is (code - 8) * scale + middle."""
    with np.errstate(over="ignore", invalid="ignore"):  # readers refuse weights that are not finite
        return CodesWithMinima(np.ascontiguousarray(codes), np.ascontiguousarray(scales), middles - 8 * scales)


class PlainInt4(Rule):
    """The layout of Int4WeightOnly: codes of 4 bits; a weight is code * scale + zero point."""

    form, zeros, roles = "int4_min", False, ROLES

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
        return _around_8(codes, scales, middles)


class TiledInt4(PlainInt4):
    """The layout tile_packed_to_4d of 4-bit codes."""

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        tiles, padded = -(-rows // TILE_ROWS), -(-cols // WHOLE_COLUMNS) * WHOLE_COLUMNS
        pairs = (-(-padded // self.group), tiles * TILE_ROWS, 2)
        return {
            CODES: StoredArray((tiles, padded // TILE_COLUMNS, 32, 4), INT32),
            PAIRS: StoredArray(pairs, FLOATS),
        }

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> CodesWithMinima:
        words = arrays[CODES][start // TILE_ROWS : -(-stop // TILE_ROWS)]
        # Axes: tile of rows, tile of columns, row, pair of columns, word, 1 column, 16 columns, 8 columns.
        codes = unpack_words(words, 4).reshape(len(words), -1, TILE_ROWS, 4, 4, 2, 2, 2)
        codes = codes.transpose(0, 2, 1, 4, 6, 7, 3, 5).reshape(len(words) * TILE_ROWS, -1)[: stop - start, :cols]
        pairs = arrays[PAIRS][: -(-cols // self.group), start:stop].astype(np.float32)
        return _around_8(codes, pairs[:, :, 0].T, pairs[:, :, 1].T)


INT4_LAYOUTS = {"PLAIN": PlainInt4, "TILE_PACKED_TO_4D": TiledInt4}


class ByModule(ByTarget):
    """Several layouts, each for the modules that FqnToConfig names."""

    roles = ROLES


def read_torchao(fields: Fields) -> Rule:
    """Read a torchao layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    stated = fields.values.get("quant_type")
    if not isinstance(stated, dict):
        raise _unread(fields, f"torchao with quant_type {short(stated)}, which is saved as a pickle,")
    config = Fields(stated, fields.path).object("default")
    kind = config.get("_type")
    if not isinstance(kind, str) or kind not in BY_MODULE:
        return _read_config(config, fields)
    settings = Fields(Fields(config, fields.path).object("_data"), fields.path)
    modules = Fields(settings.object(BY_MODULE[kind]), fields.path)
    rules: list[tuple[list[str], Rule]] = []
    for name in sorted(modules.values, key=lambda name: name.startswith(PREFIX)):  # whole names come first
        if name != "_default" and (own := modules.object(name)):
            target = name.removesuffix(".weight")
            if name.startswith(PREFIX):  # torchao matches whole names
                target = f"{PREFIX}(?:{name.removeprefix(PREFIX)})$"
            check_target(target, fields)
            rules.append(([target], _read_config(own, fields)))
    if default := modules.object("_default"):
        rules.append(([EVERY], _read_config(default, fields)))
    if not rules:
        raise _unread(fields, f"torchao's {kind} without a quantized module")
    return ByModule(rules)


def _read_config(values: dict[str, Any], fields: Fields) -> Rule:
    """Read the layout of one quant_type."""
    config = Fields(values, fields.path)
    kind, settings = config.values.get("_type"), Fields(config.object("_data"), fields.path)
    if kind == INT4:
        packing, group = _named(settings, "int4_packing_format") or "PLAIN", settings.integer("group_size", 128)
        version, rows = config.integer("_version", 2), settings.integer("int4_tile_packed_ntile", TILE_ROWS)
        layout = INT4_LAYOUTS.get(packing) if isinstance(packing, str) else None
        if layout is None or group < 1 or version < 2 or rows != TILE_ROWS:
            what = f"torchao's {INT4} of version {version} with group_size {group}, tiles of {rows} rows"
            raise _unread(fields, f"{what} and the packing format {short(packing)}")
        return layout(group)
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
    """Convert torchao's granularity (which weights share a scale) to arguments of `CompressedTensors`."""
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
    """Read a setting that names an enumeration member or a dtype; None if the setting is absent.

    torchao writes the name in lower case if the user passed the setting as a string.
    """
    value = settings.values.get(key)
    return value.upper() if isinstance(value, str) else settings.object(key).get("_data")


def _unread(fields: Fields, what: str) -> Exception:
    return refused(fields.path, f"quantization_config: {what} is not supported ({READ}); {INSTEAD}")
