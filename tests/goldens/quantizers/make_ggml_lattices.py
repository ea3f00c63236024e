"""Write ggml_lattices.json: checksums of the weights that the package gguf reads from random blocks of ggml's IQ types.

    python -m tests.goldens.quantizers.make_ggml_lattices

Run it in the root of the repository, in an environment with numpy and gguf. The gguf project tests its decoders against
ggml's C code.
"""

import hashlib
import json
from importlib import metadata
from pathlib import Path

import numpy as np

COMMAND = "python -m tests.goldens.quantizers.make_ggml_lattices"
BYTES = {
    "IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110, "IQ4_XS": 136,
}  # fmt: skip
COUNT = 2048  # enough blocks for each point of the largest grid to occur


def blocks(name: str) -> np.ndarray:
    """Draw random blocks of a type, uint8 [blocks, bytes]. RandomState draws the same bytes in every NumPy version."""
    random = np.random.RandomState(BYTES[name])
    return random.randint(0, 256, (COUNT, BYTES[name])).astype(np.uint8)


def checksum(weights: np.ndarray) -> str:
    """Return a checksum of float32 weights. Non-finite weights count as 0, because NaN has many bit patterns."""
    finite = np.where(np.isfinite(weights), weights, 0).astype("<f4") + np.float32(0)  # + 0 turns -0 into 0
    return hashlib.sha256(finite.tobytes()).hexdigest()


def main() -> None:
    """Write ggml_lattices.json."""
    import gguf  # pyright: ignore[reportMissingImports]

    checksums = {}
    with np.errstate(all="ignore"):
        for name in BYTES:
            kind = gguf.GGMLQuantizationType[name]
            assert gguf.GGML_QUANT_SIZES[kind] == (256, BYTES[name])
            checksums[name] = checksum(gguf.quants.dequantize(blocks(name), kind))
    about = {"made by": COMMAND, "gguf": metadata.version("gguf"), "sha256": checksums}
    Path(__file__).with_name("ggml_lattices.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
