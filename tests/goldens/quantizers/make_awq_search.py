"""Write awq_search.json: the scales that autoawq's search finds for some matrices, and the loss for each alpha.

    python -m tests.goldens.quantizers.make_awq_search

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch transformers accelerate datasets
    pip install --no-deps autoawq

autoawq searches one linear layer at a time, here in float32. With `duo_scaling` off, it uses only the inputs' norms, as
in the paper. With `duo_scaling` on (the default), it also divides by the means of the weights.
"""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens.quantizers.make_methods import inputs
from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_awq_search"
GROUP = 16
CASES = [  # weights, rows, cols, tokens
    (Weights("normal", seed=20), 8, 32, 16),
    (Weights("student", seed=21), 24, 64, 48),
    (Weights("outliers", seed=24), 16, 48, 32),
    (Weights("uniform", seed=25), 8, 128, 64),
]


def key(w: Weights, rows: int, cols: int, tokens: int) -> str:
    return f"{w.kind} {w.seed} {rows} {cols} {tokens}"


def search(w: np.ndarray, x: np.ndarray) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from awq.quantize.quantizer import AwqQuantizer  # pyright: ignore[reportMissingImports]

    losses = []

    class Quantizer(AwqQuantizer):
        def __init__(self):
            self.group_size, self.zero_point, self.w_bit = GROUP, True, 4
            self.duo_scaling, self.max_chunk_memory, self.n_parallel_calib_samples = False, 1 << 30, None

        def _compute_loss(self, *arguments: Any) -> float:
            losses.append(super()._compute_loss(*arguments))
            return losses[-1]

    before, linear = torch.nn.Identity(), torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = torch.from_numpy(w.copy())
    with torch.no_grad():
        _, _, scales = Quantizer()._search_best_scale(
            torch.nn.Sequential(before, linear), before, [linear], torch.from_numpy(x)
        )
    return {"scales": scales.tolist(), "losses": losses}


def main() -> None:
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in ("torch", "transformers", "autoawq")}
    cases = {key(w, *shape): search(w(*shape[:2]), inputs(shape[2], shape[1])) for w, *shape in CASES}
    lines = json.dumps({"made": versions, "group": GROUP, "cases": cases}, indent=1).replace(",\n    ", ", ")
    (Path(__file__).parent / "awq_search.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
