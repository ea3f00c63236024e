"""Write llama2c.json: groups that `quantize_q80` of llama2.c's export.py (commit 350e04f) quantizes.

    python -m tests.goldens.quantizers.make_llama2c path/to/export.py

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch

Codes and scales are in base64.
"""

import ast
import base64
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_llama2c path/to/export.py"
SHAPE, GROUP = (4, 48), 64  # groups span rows
CASES = [
    *(Weights(kind, seed=10) for kind in ("normal", "uniform", "student", "equal", "near ties")),
    Weights("normal", seed=11, exponent=-60),
    Weights("normal", seed=11, exponent=60),
]


def text(data: np.ndarray) -> str:
    return base64.b64encode(data.tobytes()).decode()


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    source = Path(sys.argv[1]).read_text()
    [function] = [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == "quantize_q80"]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), sys.argv[1], "exec"), names)
    tensors = {}
    for weights in CASES:
        codes, scales, _ = names["quantize_q80"](torch.from_numpy(weights(*SHAPE)), GROUP)
        about = {"codes": text(codes.numpy().astype(np.int8)), "scales": text(scales.numpy().astype("<f4"))}
        tensors[f"{weights.kind}, {weights.seed}, {weights.exponent}"] = about
    about = {"command": COMMAND, "python": platform.python_version(), "torch": torch.__version__}
    about["export.py"] = hashlib.sha256(source.encode()).hexdigest()
    goldens = {"made": about, "shape": SHAPE, "group": GROUP, "tensors": tensors}
    (Path(__file__).parent / "llama2c.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
