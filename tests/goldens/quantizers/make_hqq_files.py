"""Write hqq_files.json: the tensors of a linear layer that hqq saves, as transformers stores them in a model's file.

    python -m tests.goldens.quantizers.make_hqq_files

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch termcolor
    pip install --no-deps hqq

Tensors are in base64; for the float32 weights that hqq reads back, we store the SHA-256.
"""

import base64
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_hqq_files"
WEIGHTS, SHAPE = Weights("student", seed=24), (16, 96)
CASES = (
    *((bits, 32, 1, "float16") for bits in (8, 4, 3, 2, 1.58, 1)),
    *((4, 32, 0, "float16"), (3, 24, 0, "float16"), (4, None, 1, "bfloat16"), (2, None, 0, "float16")),
)


def saved(bits: float, group: int | None, axis: int, dtype: str) -> dict[str, Any]:
    """Quantize a layer with hqq on a CPU; return its tensors and the hash of the weights that hqq reads back."""
    import torch  # pyright: ignore[reportMissingImports]
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer  # pyright: ignore[reportMissingImports]

    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    linear.weight.data.copy_(torch.from_numpy(WEIGHTS(*SHAPE)))
    settings = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    layer = HQQLinear(linear, settings, compute_dtype=getattr(torch, dtype), device="cpu", del_orig=False)
    meta = {**layer.meta, "compute_dtype": torch.float32}
    meta |= {name: meta[name].float() for name in ("scale", "zero")}
    read = Quantizer.dequantize(layer.W_q, meta).numpy().astype("<f4")
    tensors = {}
    for name, tensor in layer.state_dict().items():
        if tensor.dtype == torch.bfloat16:
            stored = tensor.detach().contiguous().view(torch.int16).numpy()
        else:
            stored = tensor.detach().contiguous().numpy()
        tensors[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": base64.b64encode(stored.astype(stored.dtype.newbyteorder("<")).tobytes()).decode(),
        }
    stated = {"weight_quant_params": settings["weight_quant_params"] | {"group_size": group}}
    return {
        "config": {"quant_method": "hqq", "quant_config": stated, "skip_modules": ["lm_head"]},
        "tensors": tensors,
        "read": hashlib.sha256(read.tobytes()).hexdigest(),
    }


def main() -> None:
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "hqq")}
    cases = {
        f"{bits} bits, {group}, axis {axis}": saved(bits, group, axis, dtype) for bits, group, axis, dtype in CASES
    }
    goldens = {"made": versions, "shape": SHAPE, "cases": cases}
    (Path(__file__).parent / "hqq_files.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
