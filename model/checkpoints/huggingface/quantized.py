"""Reads quantized matrices in Hugging Face's checkpoints; quantization_config in config.json describes their layout.

If a module's tensor weight has a float dtype, the module is not quantized. We never quantize activations, even if
config.json says that they should be quantized.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Codes, Part, Tensor, os_errors, refused
from llamaspec.model.checkpoints.codes import PART, dequantized
from llamaspec.model.checkpoints.huggingface.auto_round import read_auto_round
from llamaspec.model.checkpoints.huggingface.awq_gptq import read_awq, read_gptq, read_marlin
from llamaspec.model.checkpoints.huggingface.bitnet import read_bitnet
from llamaspec.model.checkpoints.huggingface.bitsandbytes import read_bitsandbytes
from llamaspec.model.checkpoints.huggingface.compressed import read_compressed_tensors
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.fp8 import read_fbgemm, read_fp8
from llamaspec.model.checkpoints.huggingface.hqq import read_hqq
from llamaspec.model.checkpoints.huggingface.mlx import KEY, is_mlx, read_mlx
from llamaspec.model.checkpoints.huggingface.model_optimizer import read_modelopt
from llamaspec.model.checkpoints.huggingface.quanto import read_quanto
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, ROWS, Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.huggingface.stacked_experts import METHOD
from llamaspec.model.checkpoints.huggingface.torchao import read_torchao
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.safetensors_header import HeaderEntry
from llamaspec.model.checkpoints.strict_json import read_object, short
from llamaspec.model.tensors import Role, Weight

INSTEAD = "download the original model and run `llamaspec convert --quantize`, or download it in GGUF, AWQ, GPTQ or FP8"
# For each quant_method that we do not support: the software that loads such a model.
OWNERS = {
    **{name: f"transformers with {name}" for name in ("aqlm", "vptq", "eetq")},
    "spqr": "transformers with spqr_quant",
    "exl2": "exllamav2",
}
# Files that AutoGPTQ, autoawq, Model Optimizer and optimum-quanto write instead of a quantization_config, and the
# quant_method of each.
BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
}
# Scales for activations (of any module) and for a KV cache in e4m3 (of attention). We ignore these scales.
OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "output_scale", "activation_scale", "input_scale_ub", "input_global_scale"),
    *("k_scale", "v_scale", "q_scale"),
)
OF_CACHES = re.compile(r"\.self_attn\.(attn\.)?([kvq]|prob)_scale$")
Located = dict[str, tuple[MappedFile, HeaderEntry]]


def read_rule_beside(directory: Path) -> Rule | None:
    """Read the layout from the file next to config.json in which older models state it; None if there is no such file.

    Raises `CheckpointError` if the layout is not supported.
    """
    for name, method in BESIDE.items():
        with os_errors(directory):
            if not (directory / name).exists():
                continue
        path = directory / name
        return read_rule({"quantization_config": {"quant_method": method, **read_object(path)}}, path)
    return None


def read_rule(values: dict[str, Any], path: Path) -> Rule | None:
    """Read the layout in the quantization_config of a parsed config.json; None if config.json has no such key.

    Also returns None for gpt-oss's experts in MXFP4, which `stacked_experts` reads. Raises `CheckpointError` if the
    layout is not supported.
    """
    stated = Fields(values, path)
    fields = Fields(stated.object("quantization_config") or stated.object("compression_config"), path)
    if is_mlx(stated.object(KEY)):  # MLX also writes a quantization_config, for readers other than MLX
        return read_mlx(Fields(stated.object(KEY), path))
    if is_mlx(fields.values):
        return read_mlx(fields)
    if not fields.values:
        return None
    methods: dict[str, Callable[[Fields], Rule]] = {
        "compressed-tensors": read_compressed_tensors,
        "awq": read_awq,
        "gptq": read_gptq,
        "marlin": read_marlin,
        "bitsandbytes": read_bitsandbytes,
        "fp8": read_fp8,
        "fbgemm_fp8": read_fbgemm,
        **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), read_modelopt),
        "bitnet": read_bitnet,
        "hqq": read_hqq,
        "torchao": read_torchao,
        **dict.fromkeys(("auto-round", "intel/auto-round"), read_auto_round),
        "quanto": read_quanto,
    }
    method = fields.values.get("quant_method")
    if method == METHOD:  # the names of the tensors say which are quantized
        return None
    if not isinstance(method, str) or method not in methods:
        what = f"quantization_config: quant_method {short(method)} is not supported (only {', '.join(methods)})"
        raise refused(path, f"{what}; {_how_to_convert(method)}{INSTEAD}")
    return methods[method](fields)


def _how_to_convert(method: object) -> str:
    owner = OWNERS.get(method) if isinstance(method, str) else None
    if not owner:
        return ""
    return f"load it with {owner}, and apply each layer to an identity matrix, which gives the transposed weight; or "


def take_quantized(
    rule: Rule, expected: Mapping[str, Weight], located: Located, path: str, joined: Mapping[str, str]
) -> dict[str, Tensor]:
    """Build a `Tensor` for each quantized matrix among the `expected` weights, and remove its parts from `located`.

    The keys of `expected` and `located` are tensor names in the file. A file may store the matrices of several modules
    in one; `joined` maps such a module's name to the name of the file's module. Raises `CheckpointError` if a quantized
    module lacks a tensor, if a tensor has the wrong shape or dtype, or if no tensor is quantized.
    """
    tensors = {}
    for name, weight in expected.items():
        module = name.removesuffix(".weight")
        own = rule.of(joined.get(module, module)) if weight.role in rule.roles else None
        if own:
            rows, cols = weight.shape
            stored = own.stored(rows, cols)
            first = next(iter(stored))
            entry = located.get(f"{module}.{first}")
            if entry and entry[1].dtype.name in stored[first].dtypes:
                tensor = _take(own, module, stored, (rows, cols), located, path)
                tensors[name] = tensor._replace(codes=None) if weight.role is Role.ROUTER else tensor
                _drop_extras(module, located, keep_bias=f"{module}.bias" in expected, path=path)
    for name in [name for name in located if OF_CACHES.search(name)]:
        del located[name]
    if not tensors:
        raise refused(path, "config.json has a quantization_config, but no tensor is quantized")
    return tensors


def _take(
    rule: Rule, module: str, stored: dict[str, StoredArray], shape: tuple[int, int], located: Located, path: str
) -> Tensor:
    rows, cols = shape
    arrays: dict[str, np.ndarray] = {}
    size = 0
    for part, expected in stored.items():
        name = f"{module}.{part}"
        if name not in located:
            if expected.optional:
                continue
            raise refused(path, f"lacks the tensor {name}")
        file, entry = located.pop(name)
        fits = entry.shape == expected.shape or (expected.shape == (1,) and entry.shape == ())
        fits = fits or (expected.any_length and len(entry.shape) == 1)
        if not fits or entry.dtype.name not in expected.dtypes:
            actual = f"{entry.dtype} {list(entry.shape)}"
            expected_form = f"{' or '.join(sorted(expected.dtypes))} {list(expected.shape)}"
            what = f"expected {expected_form} according to config.json"
            raise refused(path, f"the tensor {name} is {actual}, {what}")
        arrays[part] = file.array(entry.dtype, entry.shape, entry.offset)
        size += entry.bytes
    try:
        rule.check(arrays, rows, cols)
    except ValueError as error:
        raise refused(path, f"{module}: {error}") from error
    group = rule.group_of(cols) if rule.in_groups(arrays, cols) else 1
    codes = Codes(rule.form, group, rule.zeros, size, partial(_parts, rule, arrays, shape))
    return Tensor(shape, np.dtype(np.float32), partial(dequantized, codes, shape), codes)


def _parts(rule: Rule, arrays: Arrays, shape: tuple[int, int]) -> Iterator[Part]:
    rows, cols = shape
    step = max(1, PART // max(1, cols) // ROWS) * ROWS
    for start in range(0, rows, step):
        yield rule.part(arrays, start, min(rows, start + step), cols)


def _drop_extras(module: str, located: Located, *, keep_bias: bool, path: str) -> None:
    """Remove the tensors of a quantized module that we do not need from `located`.

    These are scales of activations, and a bias of zeros.
    """
    for part in OF_ACTIVATIONS:
        located.pop(f"{module}.{part}", None)
    bias = f"{module}.bias"
    if not keep_bias and bias in located:
        file, entry = located[bias]
        if entry.dtype.name in FLOATS and not np.any(file.array(entry.dtype, entry.shape, entry.offset)):
            del located[bias]
