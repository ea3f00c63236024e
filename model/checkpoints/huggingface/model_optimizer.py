"""Reads matrices in the layouts of NVIDIA's Model Optimizer (https://github.com/NVIDIA/Model-Optimizer).

    quant_algo                  codes in weight   weight_scale
    FP8                         e4m3              one scale for the matrix
    FP8_PER_CHANNEL_PER_TOKEN   e4m3              one scale for each row
    FP8_PB_WO                   e4m3              one scale for each block of 128 rows and 128 columns
    MXFP8                       e4m3              one exponent for each group of 32 columns of a row
    MXFP4, W4A8_MXFP4_FP8       e2m1, packed      one exponent for each group of 32 columns of a row
    NVFP4, W4A16_NVFP4          e2m1, packed      see `nvfp4`; groups of 16 columns
    W4A8_NVFP4_FP8              e2m1, packed      see `nvfp4`; groups of 32 columns
    W8A16                       int8              one scale for each row

A weight is its code times its scale. We ignore input_scale, which says how activations are rounded. MIXED_PRECISION
states the format of each module. We refuse the formats with a tensor pre_quant_scale (W4A16_AWQ, W4A8_AWQ and
W8A8_SQ_PER_CHANNEL), which multiplies the activations.

The layouts are those of `export_hf_checkpoint` in Model Optimizer 0.47.
"""

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.compressed import MXFP8, CompressedTensors, PackedMX
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.fp8 import FP8Rule
from llamaspec.model.checkpoints.huggingface.nvfp4 import NVFP4
from llamaspec.model.checkpoints.huggingface.rule import Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.huggingface.targets import ByTarget, check_target
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers import mx, nvfp4
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized

BLOCK = 128  # rows and columns of a block of FP8_PB_WO
GROUPS = {  # columns that share a scale
    "NVFP4": nvfp4.BLOCK,
    "W4A16_NVFP4": nvfp4.BLOCK,
    "W4A8_NVFP4_FP8": 32,
    "MXFP4": mx.BLOCK,
    "W4A8_MXFP4_FP8": mx.BLOCK,
    "MXFP8": mx.BLOCK,
}
INSTEAD = "take a release of the model in FP8 or NVFP4"


class RowScales(CompressedTensors):
    """One code per byte, and a vector of scales, one for each row."""

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        stored = super().stored(rows, cols)
        return {**stored, "weight_scale": stored["weight_scale"]._replace(shape=(rows,))}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        return super().part({**arrays, "weight_scale": arrays["weight_scale"][:, None]}, start, stop, cols)


class BlockScales(CompressedTensors):
    """One code per byte, and a scale for each block, with the shape [rows of blocks, 1, columns of blocks, 1].

    A matrix of a single block has a scalar.
    """

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        stored = super().stored(rows, cols)
        down, across = self.scales(rows, cols)
        shape = (1,) if down == across == 1 else (down, 1, across, 1)
        return {**stored, "weight_scale": stored["weight_scale"]._replace(shape=shape)}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        scales = arrays["weight_scale"].reshape(-1, -(-cols // BLOCK))
        return super().part({**arrays, "weight_scale": scales}, start, stop, cols)


class MXFP4(PackedMX):
    """As `PackedMX`, with the codes in the tensor weight."""

    packed = "weight"


def read_modelopt(fields: Fields) -> Rule:
    """Read a layout of Model Optimizer from a quantization_config, or from hf_quant_config.json.

    Raises `CheckpointError` if the layout is not supported.
    """
    inner = Fields(fields.object("quantization") or fields.values, fields.path)
    if inner.values.get("quant_algo") != "MIXED_PRECISION":
        return _read_format(inner)
    layers = Fields(inner.object("quantized_layers"), fields.path)
    for name in layers.values:
        check_target(name, fields)
    rules = [([name], _read_format(Fields(layers.object(name), fields.path))) for name in layers.values]
    if not rules:
        raise refused(
            fields.path,
            f"quantization_config: MIXED_PRECISION needs a list of layers, but quantized_layers is empty; {INSTEAD}",
        )
    return ByTarget(rules)


def _read_format(settings: Fields) -> Rule:
    """Read the layout of one format of Model Optimizer; `settings` apply to a whole model or to one module."""
    stated = settings.values.get("quant_algo")
    name = stated.upper() if isinstance(stated, str) else ""  # Model Optimizer writes "fp8_pb_wo" and "mxfp4"
    what = f"modelopt with quant_algo {short(stated)} is not supported"
    if group := GROUPS.get(name):
        if settings.integer_or_none("group_size", group) not in (None, group):
            what = (
                f"modelopt with quant_algo {name} needs groups of {group}, got {short(settings.values['group_size'])}"
            )
            raise refused(settings.path, f"quantization_config: {what}; {INSTEAD}")
        if name == "MXFP8":
            return MXFP8("fp8", bits=8, group=group, zeros=False)
        if "MXFP4" in name:
            return MXFP4("mxfp4", bits=4, group=group, zeros=False)
        return NVFP4(packed="weight", scale="weight_scale_2", divided=False, group=group)
    match name:
        case "FP8":
            return FP8Rule(rows_alike=0)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return RowScales("fp8", bits=8, group=None, zeros=False)
        case "FP8_PB_WO":
            return BlockScales("fp8", bits=8, group=BLOCK, zeros=False, rows_alike=BLOCK)
        case "W8A16":
            return RowScales("int8", bits=8, group=None, zeros=False)
        case "W4A16_AWQ" | "W4A8_AWQ" | "W8A8_SQ_PER_CHANNEL":
            what += ", because it scales activations"
    raise refused(settings.path, f"quantization_config: {what}; {INSTEAD}")
