"""Write modelopt_files.json: the tensors of linear layers that NVIDIA's Model Optimizer quantizes and exports.

    python -m tests.goldens.quantizers.make_modelopt_files

Run it in the root of the repository, in a separate environment (Python 3.11, without a GPU):

    pip install torch nvidia-modelopt "transformers<6"

Tensors are in base64. Model Optimizer decodes each matrix in float32, from the tensors that it has exported; for these
weights we store the SHA-256.
"""

import base64
import hashlib
import json
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

COMMAND = "python -m tests.goldens.quantizers.make_modelopt_files"
MATRIX, SHAPE = "model.layers.0.mlp.down_proj", (32, 256)
CONFIGS = {
    "FP8": "FP8_DEFAULT_CFG",
    "FP8 by row": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8 in blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "MXFP8": "MXFP8_DEFAULT_CFG",
    "MXFP4": "MXFP4_DEFAULT_CFG",
    "MXFP4 with activations": "W4A8_MXFP4_FP8_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "NVFP4, weights only": "W4A16_NVFP4_CFG",
    "NVFP4 with activations in FP8": "W4A8_NVFP4_FP8_CFG",
    "int8, weights only": "INT8_WEIGHT_ONLY_CFG",
}


def model() -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    rows, cols = SHAPE
    config = LlamaConfig(
        hidden_size=rows, intermediate_size=cols, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=16, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(25)
    llama = LlamaForCausalLM(config).to(torch.bfloat16)
    torch.nn.init.normal_(llama.model.layers[0].mlp.down_proj.weight, std=0.5)
    return llama


def exported(name: str) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from modelopt.torch.export import export_hf_checkpoint  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

    llama = mtq.quantize(model(), getattr(mtq, name), lambda m: m(torch.arange(16)[None]))
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(llama, export_dir=folder)
        config = json.loads(Path(folder, "hf_quant_config.json").read_text())["quantization"]
        tensors = {
            key.removeprefix(f"{MATRIX}."): tensor
            for key, tensor in load_file(Path(folder, "model.safetensors")).items()
            if key.startswith(MATRIX)
        }
    weights = decoded(config["quant_algo"].upper(), tensors).contiguous().numpy().astype("<f4")
    assert weights.shape == SHAPE
    return {
        "config": {"quant_method": "modelopt", "quantization": config},
        "tensors": {key: stored(tensor) for key, tensor in tensors.items()},
        "read": hashlib.sha256(weights.tobytes()).hexdigest(),
    }


def decoded(algorithm: str, tensors: dict[str, Any]) -> Any:
    """Decode a matrix by Model Optimizer's own tensor classes, in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    from modelopt.torch.quantization import qtensor  # pyright: ignore[reportMissingImports]

    codes, scale = tensors["weight"], tensors["weight_scale"]
    shape, dtype = torch.Size(SHAPE), torch.float32
    if "NVFP4" in algorithm:
        group = SHAPE[1] // scale.shape[1]
        double = tensors["weight_scale_2"]
        tensor = qtensor.NVFP4QTensor(shape, dtype, codes)
        return tensor.dequantize(dtype, scale=scale, double_scale=double, block_sizes={-1: group})
    if "MXFP4" in algorithm:
        return qtensor.MXFP4QTensor(shape, dtype, codes).dequantize(dtype, scale=scale, block_sizes={-1: 32})
    if "MXFP8" in algorithm:
        return qtensor.MXFP8QTensor(shape, dtype, codes).dequantize(dtype, scale=scale)
    if algorithm == "FP8_PB_WO":
        scale = scale.reshape(scale.shape[0], scale.shape[2])
        tensor = qtensor.FP8QTensor(shape, dtype, codes)
        return tensor.dequantize(dtype, scale=scale, block_sizes={-1: 128, -2: 128})
    kind = qtensor.INT8QTensor if codes.dtype == torch.int8 else qtensor.FP8QTensor
    return kind(shape, dtype, codes).dequantize(dtype, scale=scale if scale.ndim == 0 else scale[:, None])


def stored(tensor: Any) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    integer_type = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype, tensor.dtype)
    array = tensor.contiguous().view(integer_type).numpy()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode(),
    }


def main() -> None:
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "nvidia-modelopt", "transformers")}
    goldens = {"made": versions, "shape": SHAPE, "cases": {case: exported(name) for case, name in CONFIGS.items()}}
    (Path(__file__).parent / "modelopt_files.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
