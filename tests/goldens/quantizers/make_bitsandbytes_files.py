"""Write bitsandbytes_files.json: a linear layer in NF4 and FP4, as transformers and bitsandbytes save it on a CPU.

    python -m tests.goldens.quantizers.make_bitsandbytes_files

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch transformers accelerate bitsandbytes

Each format is saved with plain scales and with double-quantized scales. Tensors are in base64; for the float32 weights
that bitsandbytes reads back, we store the SHA-256.
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

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_bitsandbytes_files"
MODULE, WEIGHTS, SHAPE = "model.layers.0.mlp.down_proj", Weights("student", seed=22), (16, 128)
SIZES = {
    "hidden_size": SHAPE[0], "intermediate_size": SHAPE[1], "vocab_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip


def text(data: np.ndarray) -> str:
    return base64.b64encode(data.astype(data.dtype.newbyteorder("<")).tobytes()).decode()


def saved(kind: str, *, double: bool) -> dict[str, Any]:
    """Load a one-layer model as NF4 or FP4 with bitsandbytes, save it, and return the tensors."""
    import torch  # pyright: ignore[reportMissingImports]
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        with torch.no_grad():
            model.get_submodule(MODULE).weight.copy_(torch.from_numpy(WEIGHTS(*SHAPE)))
        model.save_pretrained(f"{folder}/plain")
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=double,
        )
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/plain", quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        weight = model.get_submodule(MODULE).weight
        read = functional.dequantize_4bit(weight.data, weight.quant_state)
        model.save_pretrained(f"{folder}/quantized")
        stored = json.loads(Path(f"{folder}/quantized/config.json").read_text())["quantization_config"]
        tensors = load_file(f"{folder}/quantized/model.safetensors")
        return {
            "config": stored,
            "tensors": {
                name.removeprefix(f"{MODULE}."): {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "data": text(tensor.numpy()),
                }
                for name, tensor in tensors.items()
                if name.startswith(f"{MODULE}.")
            },
            "read": hashlib.sha256(read.numpy().astype("<f4").tobytes()).hexdigest(),
        }


def main() -> None:
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "transformers", "bitsandbytes")}
    cases = {
        f"{kind}, {'twice' if double else 'once'}": saved(kind, double=double)
        for kind in ("nf4", "fp4")
        for double in (False, True)
    }
    goldens = {"made": versions, "shape": SHAPE, "cases": cases}
    (Path(__file__).parent / "bitsandbytes_files.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
