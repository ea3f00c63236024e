"""Write mlx_files.json: matrices that MLX quantizes, and logits of models that mlx-lm quantizes.

    python -m tests.goldens.quantizers.make_mlx_files

Run it in the root of the repository, in a separate environment (Linux, Python 3.11 or later):

    pip install "mlx[cpu]" mlx-lm ml_dtypes

Tensors of matrices are in base64; for the float32 weights that MLX reads back, we store the SHA-256. A model's file is
stored only as the SHA-256 of its tensors, since `reference.quantizers.mlx` makes the same codes.
"""

import base64
import hashlib
import json
import platform
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.goldens.make_logits import POSITIONS, SEQ, shortest
from tests.goldens.quantizers.weights import Weights
from tests.support.families import FAMILIES, random_tensors, write_safetensors

COMMAND = "python -m tests.goldens.quantizers.make_mlx_files"
WEIGHTS, SHAPE = Weights("student", seed=25), (4, 128)
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
GROUP = 32  # of models
MODELS: dict[str, dict[str, Any]] = {
    "llama, tied": {**FAMILIES["llama-2"], "intermediate_size": 96, "tie_word_embeddings": True},
    "phi3": {
        **FAMILIES["llama-2"],
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "intermediate_size": 96,
    },
    "mixtral": {**FAMILIES["mixtral"], "intermediate_size": 64},
    "qwen3-moe": {**FAMILIES["qwen3-moe"], "head_dim": 8, "moe_intermediate_size": 32},
}
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}


def setting(module: str) -> dict[str, int] | bool:
    """Return how mlx-lm quantizes a module: True for 4 bits, False for not at all, or other settings."""
    if module.endswith(("down_proj", "w2", "embed_tokens")):
        return {"group_size": GROUP, "bits": 6}
    if module.endswith(("qkv_proj", "mlp.gate", "switch_mlp.up_proj")):
        return {"group_size": GROUP, "bits": 8}
    return module != "model.layers.1.self_attn.o_proj"


def plain_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Draw the weights of a model, with the fused matrices of Phi-3."""
    tensors = random_tensors(dict(config))
    for layer in range(config["num_hidden_layers"] if config["model_type"] == "phi3" else 0):
        for fused, parts in FUSED.items():
            stem = f"model.layers.{layer}.{fused}"
            names = [f"{stem.rpartition('.')[0]}.{part}.weight" for part in parts]
            tensors[f"{stem}.weight"] = np.concatenate([tensors.pop(name) for name in names])
    return tensors


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Hash the names, dtypes, shapes and bytes of tensors."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        sha.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def matrix(mode: str, dtype: str, **sizes: int) -> dict[str, Any]:
    """Quantize `WEIGHTS`, rounded to `dtype`, and read them back in float32."""
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    w = mx.array(WEIGHTS(*SHAPE)).astype(getattr(mx, dtype))
    stored = dict(zip(("weight", "scales", "biases"), mx.quantize(w, mode=mode, **sizes), strict=False))
    in_float32 = [
        stored["weight"],
        *(stored[name].astype(mx.float32) for name in ("scales", "biases") if name in stored),
    ]
    if mode != "affine":
        in_float32[1:] = [stored["scales"]]
    read = mx.dequantize(*in_float32, mode=mode, dtype=mx.float32, **sizes)
    tensors = {}
    for name, array in stored.items():
        kind = str(array.dtype).removeprefix("mlx.core.")
        plain = np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16) if kind == "bfloat16" else np.array(array)
        data = base64.b64encode(plain.tobytes()).decode()
        tensors[name] = {"dtype": kind, "shape": list(plain.shape), "data": data}
    config = {"mode": mode, **({"group_size": 64, "bits": 4} | sizes if mode == "affine" else sizes)}
    sha = hashlib.sha256(np.array(read).astype("<f4").tobytes()).hexdigest()
    return {"config": config, "dtype": dtype, "tensors": tensors, "read": sha}


def model(config: dict[str, Any]) -> dict[str, Any]:
    """Quantize a model by mlx-lm in float32, save it, and compute logits."""
    import mlx.core as mx  # pyright: ignore[reportMissingImports]
    from mlx_lm import utils  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "plain", Path(folder) / "mlx"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        write_safetensors(source / "model.safetensors", plain_tensors(config))
        plain, values = utils.load_model(source)
        quantized, values = utils.quantize_model(plain, values, GROUP, 4, quant_predicate=lambda path, _: setting(path))
        utils.save_model(target, quantized)
        utils.save_config(values, target / "config.json")
        settings = json.loads((target / "config.json").read_text())["quantization"]
        tensors = {name: np.array(array) for name, array in mx.load(str(target / "model.safetensors")).items()}
        tokens = np.random.RandomState(1).randint(config["vocab_size"], size=SEQ).tolist()
        logits = np.array(utils.load_model(target)[0](mx.array([tokens])))[0]
    assert logits.dtype == np.float32 and np.abs(logits).max() >= 5
    return {
        "quantization": settings,
        "sha256": digest(tensors),
        "tokens": tokens,
        "positions": POSITIONS,
        "logits": [[shortest(x) for x in logits[position]] for position in POSITIONS],
    }


def main() -> None:
    cases = {}
    for bits in BITS:
        for group in GROUPS:
            dtype = "bfloat16" if group == 64 else "float16"
            cases[f"affine of {bits} bits in groups of {group}"] = matrix("affine", dtype, group_size=group, bits=bits)
    for mode, (group, bits) in {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}.items():
        cases[mode] = matrix(mode, "bfloat16", group_size=group, bits=bits)
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("mlx", "mlx-lm")}
    goldens = {"made": versions, "shape": SHAPE, "cases": cases, "models": {}}
    goldens["models"] = {name: model(config) for name, config in MODELS.items()}
    text = re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(goldens, indent=1))
    (Path(__file__).parent / "mlx_files.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
