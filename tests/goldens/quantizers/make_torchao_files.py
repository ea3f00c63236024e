"""Write torchao_files.json: the tensors of linear layers that torchao quantizes and transformers saves.

    python -m tests.goldens.quantizers.make_torchao_files SHUFFLE

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch torchao safetensors

SHUFFLE is the path of mslk/quantize/shuffle.py from https://github.com/meta-pytorch/MSLK. This file packs 4-bit codes
in plain PyTorch, while the package MSLK needs a GPU. Tensors are in base64; for the float32 weights that torchao reads
back, we store the SHA-256. torchao reads an Int4Tensor only inside a GPU product, so for such tensors we store the
original weights. The decoded weights are within half a step of the original ones, plus the rounding of scales and zero
points to bfloat16.
"""

import base64
import hashlib
import importlib.util
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_torchao_files SHUFFLE"
WEIGHTS, SHAPE = Weights("student", seed=25), (8, 64)


def shuffle(path: str) -> Any:
    """Import the Python file at `path` without its package."""
    names = ["mslk", "mslk.quantize", "mslk.quantize.triton", "mslk.quantize.triton.fp8_quantize"]
    stubs = {name: ModuleType(name) for name in names}
    stubs[names[-1]].quantize_fp8_row = None  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= stubs
    spec = importlib.util.spec_from_file_location("shuffle", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in names:  # torchao checks whether the package exists
        del sys.modules[name]
    return module


def configs() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao import quantization as ao  # pyright: ignore[reportMissingImports]

    asymmetric = ao.MappingType.ASYMMETRIC
    return {
        "int8 a row": ao.Int8WeightOnlyConfig(),
        "int8 in groups": ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)),
        "int8, one scale": ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
        "int8 with activations": ao.Int8DynamicActivationInt8WeightConfig(),
        "fp8 a row": ao.Float8WeightOnlyConfig(),
        "intx of 4 bits, zero points": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=ao.PerGroup(32), mapping_type=asymmetric
        ),
        "intx of 4 bits with activations": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)
        ),
        "int4": ao.Int4WeightOnlyConfig(group_size=32),
    }


def saved(config: Any) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao.core.config import config_to_dict  # pyright: ignore[reportMissingImports]
    from torchao.prototype.safetensors.safetensors_support import (  # pyright: ignore[reportMissingImports]
        flatten_tensor_state_dict,
    )
    from torchao.quantization import quantize_  # pyright: ignore[reportMissingImports]

    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(torch.from_numpy(WEIGHTS(*SHAPE)))
    original = linear.weight.detach().float().numpy()
    module = torch.nn.ModuleDict({"m": linear})
    quantize_(module, config)
    tensors = {}
    for name, tensor in flatten_tensor_state_dict(module.state_dict())[0].items():
        integer_type = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype, tensor.dtype)
        stored = tensor.contiguous().view(integer_type).numpy()
        tensors[name.removeprefix("m.")] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": base64.b64encode(stored.astype(stored.dtype.newbyteorder("<")).tobytes()).decode(),
        }
    stored_arrays = {
        "config": {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}},
        "tensors": tensors,
    }
    weight = module["m"].weight
    if type(weight).__name__ == "Int4Tensor":
        return {**stored_arrays, "original": [[float(w) for w in row] for row in original]}
    weight.scale = weight.scale.float()  # so that products are rounded once, to float32
    read = _read(weight).numpy().astype("<f4")
    return {**stored_arrays, "read": hashlib.sha256(read.tobytes()).hexdigest()}


def _read(weight: Any) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao.quantization.quant_primitives import dequantize_affine  # pyright: ignore[reportMissingImports]

    if type(weight).__name__ == "IntxUnpackedToInt8Tensor":
        return dequantize_affine(
            weight.qdata, weight.block_size, weight.scale, weight.zero_point, torch.int8, output_dtype=torch.float32
        )
    return weight.dequantize(torch.float32)


def main(path: str) -> None:
    from torchao.quantization.quantize_.workflows.int4 import int4_tensor  # pyright: ignore[reportMissingImports]

    functions = shuffle(path)
    int4_tensor.int4_row_quantize_zp, int4_tensor.pack_int4 = functions.int4_row_quantize_zp, functions.pack_int4
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "torchao")}
    goldens = {"made": versions, "shape": SHAPE, "cases": {name: saved(config) for name, config in configs().items()}}
    (Path(__file__).parent / "torchao_files.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
