"""Reads matrices in e4m3: the layouts "fp8" of transformers and vLLM, fbgemm, and NVIDIA's Model Optimizer.

    fp8, in blocks (DeepSeek, Qwen3)     weight, weight_scale_inv: a scale for each block of weight_block_size
    fp8, static (AutoFP8)                weight, weight_scale: one scale for the matrix (Mistral: weight_scale_inv)
    fbgemm_fp8                           weight, weight_scale: one scale for each row
    modelopt FP8                         weight, weight_scale: one scale for the matrix
    modelopt MXFP8                       weight, weight_scale: one exponent for each group of 32 columns of a row

A weight is its code times its scale, even if the scale's name ends in _inv. We ignore the scales of inputs and of the
KV cache, which do not change the weights: other programs use these scales to multiply in e4m3. `nvfp4` reads Model
Optimizer's NVFP4. The formats W4A16_NVFP4 and W4A8_NVFP4_FP8 store weights in the same way as NVFP4. MIXED_PRECISION
states the format of each module.
"""

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.compressed import MXFP8, CompressedTensors
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.nvfp4 import NVFP4
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.huggingface.targets import ByTarget, check_target
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers import mx
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized

SCALES = ("weight_scale", "weight_scale_inv")
NVFP4_KINDS = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
INSTEAD = "take a release of the model in FP8 or NVFP4"


class FP8Rule(CompressedTensors):
    """The layouts with e4m3 codes in the tensor weight, and scales in weight_scale or weight_scale_inv."""

    def __init__(self, *, rows_alike: int, group: int | None = None):
        super().__init__("fp8", bits=8, group=group, zeros=False, rows_alike=rows_alike)

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        stored = super().stored(rows, cols)
        return {"weight": stored["weight"]} | {
            name: StoredArray(self.scales(rows, cols), FLOATS, optional=True) for name in SCALES
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        if (count := sum(name in arrays for name in SCALES)) != 1:
            what = "neither is" if not count else "both are"
            raise ValueError(f"expected exactly one of the tensors {' and '.join(SCALES)}, but {what} present")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        [scales] = [arrays[name] for name in SCALES if name in arrays]
        return super().part({"weight": arrays["weight"], "weight_scale": scales}, start, stop, cols)


def read_fp8(fields: Fields) -> Rule:
    """Read an FP8 layout from a quantization_config with quant_method "fp8".

    Raises `CheckpointError` if the layout is not supported.
    """
    if (form := fields.values.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise refused(fields.path, f"quantization_config: fp8 with fmt {short(form)} is not supported (only e4m3)")
    match fields.values.get("weight_block_size"):
        case None:
            return FP8Rule(rows_alike=0)
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            return FP8Rule(rows_alike=rows, group=cols)
        case other:
            what = f"weight_block_size is {short(other)}, expected a list of two positive integers"
            raise refused(fields.path, f"quantization_config: {what}")


def read_fbgemm(fields: Fields) -> Rule:
    """Return the layout of a quantization_config with quant_method "fbgemm_fp8", which has no settings."""
    del fields
    return FP8Rule(rows_alike=1)


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
    match settings.values.get("quant_algo"):
        case "FP8":
            return FP8Rule(rows_alike=0)
        case "MXFP8":
            return MXFP8("fp8", bits=8, group=mx.BLOCK, zeros=False)
        case str(kind) if kind in NVFP4_KINDS and settings.integer_or_none("group_size", 16) in (None, 16):
            return NVFP4(packed="weight", scale="weight_scale_2", divided=False)
        case other:
            known = f"only FP8, MXFP8, and {', '.join(NVFP4_KINDS)} in groups of 16"
            what = f"modelopt with quant_algo {short(other)} is not supported ({known})"
            raise refused(settings.path, f"quantization_config: {what}; {INSTEAD}")
