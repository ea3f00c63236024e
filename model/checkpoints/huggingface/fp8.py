"""Reads matrices in e4m3: the layouts "fp8" of transformers and vLLM, and fbgemm.

    fp8, in blocks (DeepSeek, Qwen3)     weight, weight_scale_inv: a scale for each block of weight_block_size
    fp8, static (AutoFP8)                weight, weight_scale: one scale for the matrix (Mistral: weight_scale_inv)
    fbgemm_fp8                           weight, weight_scale: one scale for each row

A weight is its code times its scale, even if the scale's name ends in _inv. We ignore the scales of inputs and of the
KV cache, which do not change the weights: other programs use these scales to multiply in e4m3.
"""

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.compressed import CompressedTensors
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized

SCALES = ("weight_scale", "weight_scale_inv")


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
