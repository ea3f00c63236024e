"""Write marlin.json: codes and scales of small matrices, in the order that AutoGPTQ uses for Marlin.

    python -m tests.goldens.quantizers.make_marlin

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch
    pip install --no-deps auto-gptq

Codes come from RandomState(groups). Scales are powers of two, and differ among rows that are moved together. AutoGPTQ
requires at least 256 rows and 128 columns, although its packing does not need that many; we call it without its check.
"""

import importlib.util
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

COMMAND = "python -m tests.goldens.quantizers.make_marlin"
ROWS, COLS = 128, 32


def drawn(groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw int codes from -8 to 7 [rows, cols], and float16 scales [rows, groups]."""
    random = np.random.RandomState(groups)
    codes = random.randint(-8, 8, (ROWS, COLS))
    scales = np.stack([np.exp2(random.permutation(ROWS) % 16 - 8) for _ in range(groups)], axis=1)
    return codes, (scales * (1 + np.arange(ROWS)[:, None] // 16 / 8)).astype(np.float16)


def packed(groups: int) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    # We load the file by path, because its package imports names that transformers 5 no longer has.
    package = importlib.util.find_spec("auto_gptq")
    assert package and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "nn_modules" / "qlinear" / "qlinear_marlin.py"
    spec = importlib.util.spec_from_file_location("qlinear_marlin", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    codes, scales = drawn(groups)
    layer = module.QuantLinear.__new__(module.QuantLinear)
    torch.nn.Module.__init__(layer)
    layer.infeatures, layer.outfeatures, layer.group_size, layer.bias = COLS, ROWS, COLS // groups, None
    layer.B = torch.zeros((COLS // 16, ROWS * 2), dtype=torch.int)
    layer.s = torch.zeros((groups, ROWS), dtype=torch.half)
    linear = torch.nn.Linear(COLS, ROWS, bias=False, dtype=torch.half)
    linear.weight.data = torch.from_numpy((codes * np.repeat(scales, COLS // groups, axis=1)).astype(np.float16))
    layer.pack(linear, torch.from_numpy(scales))
    return {"B": layer.B.tolist(), "s": layer.s.tolist()}


def main() -> None:
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "auto-gptq")}
    goldens = {"made": versions} | {str(groups): packed(groups) for groups in (1, 2)}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in goldens.items())
    (Path(__file__).parent / "marlin.json").write_text("{" + text + "}\n")


if __name__ == "__main__":
    main()
