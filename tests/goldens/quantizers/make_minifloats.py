"""Write minifloats.json: the value that gfloat gives each code, and tensors that torchao and torch quantize.

    python -m tests.goldens.quantizers.make_minifloats

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch torchao gfloat

Codes and scales are in base64, one byte each.
"""

import base64
import json
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_minifloats"
SHAPE = (2, 64)
FORMATS = {"e4m3": "ocp_e4m3", "e5m2": "ocp_e5m2", "e2m3": "ocp_e2m3", "e3m2": "ocp_e3m2", "e2m1": "ocp_e2m1"}
POWERS = {"e8m0": "ocp_e8m0"}  # scales of blocks
CASES = [
    *(Weights(kind, seed=4) for kind in ("normal", "student", "outliers", "equal", "lonely")),
    Weights("normal", seed=4, exponent=-60),
    Weights("normal", seed=4, exponent=60),
]


def text(data: np.ndarray) -> str:
    return base64.b64encode(data.astype(np.uint8).tobytes()).decode()


def key(weights: Weights) -> str:
    return f"{weights.kind} {weights.seed} {weights.exponent}"


def every_code() -> dict[str, list[float | str]]:
    """Return the value of each code; NaN and infinity are strings, because JSON has no such numbers."""
    import gfloat  # pyright: ignore[reportMissingImports]
    from gfloat import formats  # pyright: ignore[reportMissingImports]

    values = {}
    for name, gfloat_name in (FORMATS | POWERS).items():
        info = getattr(formats, f"format_info_{gfloat_name}")
        decoded = [gfloat.decode_float(info, code).fval for code in range(1 << info.k)]
        values[name] = [x if np.isfinite(x) else str(x) for x in decoded]
    return values


def unpacked(data, bits: int) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]

    codes = data.view(torch.uint8).numpy()
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(SHAPE) if bits == 4 else codes


def microscaled(w: np.ndarray) -> dict[str, dict[str, str]]:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao.prototype.mx_formats import mx_tensor  # pyright: ignore[reportMissingImports]
    from torchao.prototype.mx_formats.config import ScaleCalculationMode  # pyright: ignore[reportMissingImports]

    dtypes = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e2m3": mx_tensor.DTYPE_FP6_E2M3,
        "e3m2": mx_tensor.DTYPE_FP6_E3M2,
        "e2m1": torch.float4_e2m1fn_x2,
    }
    tensors = {}
    for name, dtype in dtypes.items():
        for mode in ("FLOOR", "RCEIL"):
            scales, data = mx_tensor.to_mx(torch.from_numpy(w), dtype, 32, ScaleCalculationMode[mode])
            codes = unpacked(data, 4 if name == "e2m1" else 8)
            tensors[f"{name} {mode}"] = {"codes": text(codes), "scales": text(scales.view(torch.uint8).numpy())}
    return tensors


def nvfp4(w: np.ndarray) -> dict[str, str | float]:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao.prototype.mx_formats import nvfp4_tensor  # pyright: ignore[reportMissingImports]

    tensor = torch.from_numpy(w)
    scale = nvfp4_tensor.per_tensor_amax_to_scale(tensor.abs().max())
    scales, data = nvfp4_tensor.nvfp4_quantize(tensor, 16, scale)
    codes = unpacked(data, 4)
    return {"codes": text(codes), "scales": text(scales.view(torch.uint8).numpy()), "scale": float(scale)}


def main() -> None:
    tensors = {}
    for weights in CASES:
        w = weights(*SHAPE)
        tensors[key(weights)] = {"mx": microscaled(w), "nvfp4": nvfp4(w)}
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "torchao", "gfloat")}
    goldens = {"made": versions, "shape": SHAPE, "values": every_code(), "tensors": tensors}
    lines = json.dumps(goldens, indent=1).replace(",\n   ", ", ")  # puts the values of a format on few lines
    (Path(__file__).parent / "minifloats.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
