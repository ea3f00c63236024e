"""Reads matrices in the layouts of auto-round (https://github.com/intel/auto-round).

The key packing_format in config.json names the layout:

    packing_format                                layout
    auto_round:auto_gptq, and others with "gptq"  GPTQ of version 1: zero points minus one
    auto_round, auto_round:exllamav2,             GPTQ of version 2: zero points as they are
    auto_round:gptqmodel
    auto_round:auto_awq                           AWQ of version gemm
    auto_round:llm_compressor                     NVFP4 and MXFP4 of compressed-tensors

auto-round itself also looks for these strings in packing_format (export/export_to_autoround/export.py). `extra_config`
has other settings for single modules: each key is the name of a module, or a regular expression of names. Modules with
16 bits are not quantized.
"""

import re
from typing import Any

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.awq_gptq import read_awq, read_gptq
from llamaspec.model.checkpoints.huggingface.compressed import PackedMX
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.nvfp4 import NVFP4
from llamaspec.model.checkpoints.huggingface.rule import Rule
from llamaspec.model.checkpoints.huggingface.targets import EVERY, PREFIX, ByTarget, check_target
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers import mx, nvfp4

INSTEAD = "take a release of auto-round in the format auto_gptq or auto_awq, or in GGUF"


def read_auto_round(fields: Fields) -> Rule:
    """Read an auto-round layout from a quantization_config. Raises `CheckpointError` if it is not supported."""
    packing = fields.values.get("packing_format") or fields.values.get("backend") or "auto_round:auto_gptq"
    common = _read_layout(fields, packing)
    modules = fields.object("extra_config")
    rules = []
    for name in modules:
        own = Fields({**_settings(fields), **Fields(modules, fields.path).object(name)}, fields.path)
        if own.integer("bits", 4) <= 8:
            target = name if re.fullmatch(r"[\w.]+", name) else PREFIX + name
            check_target(target, fields)
            rules.append(([target], _read_layout(own, packing)))
    return ByTarget([*rules, ([EVERY], common)]) if rules else common


def _settings(fields: Fields) -> dict[str, Any]:
    return {key: value for key, value in fields.values.items() if key != "extra_config"}


def _read_layout(fields: Fields, packing: object) -> Rule:
    kind, bits, group = (
        fields.values.get("data_type", "int"),
        fields.integer("bits", 4),
        fields.values.get("group_size"),
    )
    match packing, kind:
        case str(), "int" if "awq" in packing:
            return read_awq(Fields({**fields.values, "version": "gemm", "zero_point": True}, fields.path))
        case str(), "int" if "gptq" in packing and "gptqmodel" not in packing:
            return read_gptq(Fields({**fields.values, "checkpoint_format": "gptq"}, fields.path))
        case "auto_round" | "auto_round:exllamav2" | "auto_round:gptqmodel", "int":
            return read_gptq(Fields({**fields.values, "checkpoint_format": "gptq_v2"}, fields.path))
        case "auto_round:llm_compressor", str() if kind.startswith("nv_fp") and (bits, group) == (4, nvfp4.BLOCK):
            return NVFP4(packed="weight_packed", scale="weight_global_scale", divided=True)
        case "auto_round:llm_compressor", str() if kind.startswith("mx_fp") and (bits, group) == (4, mx.BLOCK):
            return PackedMX("mxfp4", bits=4, group=mx.BLOCK, zeros=False)
    what = f"auto-round with {short(kind)} weights of {bits} bits in the packing_format {short(packing)}"
    raise refused(fields.path, f"quantization_config: {what} is not supported; {INSTEAD}")
