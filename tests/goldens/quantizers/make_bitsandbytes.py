"""Write bitsandbytes.json: NF4, FP4, double-quantized scales and int8 rows, as bitsandbytes computes them on a CPU.

    python -m tests.goldens.quantizers.make_bitsandbytes

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch bitsandbytes

Packed codes and float32 numbers are in base64.
"""

import base64
import json
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_bitsandbytes"
SHAPE, GROUP = (2, 128), 64
CASES = [
    *(Weights(kind, seed=5) for kind in ("normal", "uniform", "student", "outliers", "equal", "lonely", "denormal")),
    Weights("normal", seed=6, exponent=-60),
    Weights("normal", seed=6, exponent=60),
]
SCALES = Weights("student", seed=7)  # the scales for double quantization
SCALES_SHAPE = (600,)  # two whole blocks and a short one


def text(data: np.ndarray) -> str:
    return base64.b64encode(data.astype(data.dtype.newbyteorder("<")).tobytes()).decode()


def key(weights: Weights) -> str:
    return f"{weights.kind} {weights.seed} {weights.exponent}"


def four_bits(w: np.ndarray, kind: str) -> dict[str, str]:
    import torch  # pyright: ignore[reportMissingImports]
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    packed, state = functional.quantize_4bit(torch.from_numpy(w), blocksize=GROUP, quant_type=kind)
    weights = functional.dequantize_4bit(packed, state)
    return {"packed": text(packed.numpy()), "scales": text(state.absmax.numpy()), "weights": text(weights.numpy())}


def rows(w: np.ndarray) -> dict[str, str]:
    import torch  # pyright: ignore[reportMissingImports]
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    codes, tops, _ = functional.int8_vectorwise_quant(torch.from_numpy(w))
    return {"codes": text(codes.numpy()), "tops": text(tops.numpy())}


def twice(scales: np.ndarray) -> dict[str, str]:
    import torch  # pyright: ignore[reportMissingImports]
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    absmax = torch.from_numpy(scales)
    offset = absmax.mean()
    codes, state = functional.quantize_blockwise(absmax - offset, blocksize=256)
    again = functional.dequantize_blockwise(codes, state) + offset
    return {
        "codes": text(codes.numpy()),
        "tops": text(state.absmax.numpy()),
        "offset": text(offset.numpy()),
        "scales": text(again.numpy()),
        "levels": text(state.code.numpy()),
    }


def main() -> None:
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "bitsandbytes")}
    tensors = {}
    for weights in CASES:
        w = weights(*SHAPE)
        tensors[key(weights)] = {"nf4": four_bits(w, "nf4"), "fp4": four_bits(w, "fp4")}
        if weights.kind != "denormal":  # 127 / max would be infinite
            tensors[key(weights)]["int8"] = rows(w)
    goldens = {"made": versions, "shape": SHAPE, "group": GROUP, "tensors": tensors}
    goldens["scales"] = {"shape": SCALES_SHAPE, **twice(np.abs(SCALES(*SCALES_SHAPE)))}
    (Path(__file__).parent / "bitsandbytes.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
