"""Write ggml.json: blocks that ggml's C code quantizes, and weights that ggml and gguf read from random blocks.

"weighted" has blocks that ggml quantizes with importances of the columns, which `importance` draws.

    python -m tests.goldens.quantizers.make_ggml

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install numpy gguf llama-cpp-python

If the Python package gguf can quantize a type too, its bytes must equal the C code's. Bytes are in base64.
"""

import base64
import ctypes
import json
import platform
import zlib
from importlib import metadata, resources
from pathlib import Path

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_ggml"
COLS = 256
SEARCHED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # with importances
TYPES = (*SEARCHED, "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
PYTHON_QUANTIZES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
CASES = [
    *(Weights(kind, seed=1) for kind in ("normal", "shifted", "student", "outliers", "equal", "lonely", "zero")),
    *(Weights(kind, seed=1) for kind in ("halves", "wide halves", "uniform", "one outlier")),
    Weights("denormal", seed=2),
    Weights("normal", seed=3, exponent=-20),  # near 1e-6
    Weights("normal", seed=3, exponent=-12),
    Weights("normal", seed=3, exponent=12),
    Weights("normal", seed=3, exponent=20),  # near 1e6: beyond the scales of some types, which C leaves infinite
]
WEIGHTED = [Weights(kind, seed=1) for kind in ("normal", "shifted", "student", "lonely")]
WEIGHTED_COLS = 768  # not a power of two: ggml divides a sum by it
UNDEFINED = [("MXFP4", "denormal")]  # C converts a negative float to an unsigned byte


class Ggml:
    """C functions of the libggml that llama-cpp-python includes."""

    def __init__(self):
        import gguf  # pyright: ignore[reportMissingImports]
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.gguf = gguf
        folder = resources.files(llama_cpp)
        self.c = ctypes.CDLL(str(folder / "lib" / "libggml-base.so"))
        self.c.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.versions = {"llama_cpp_python": llama_cpp.__version__, "gguf": metadata.version("gguf")}

    def type(self, name: str):
        return self.gguf.GGMLQuantizationType[name]

    def quantize(self, w: np.ndarray, name: str, importance: np.ndarray | None = None) -> bytes:
        block, size = self.gguf.GGML_QUANT_SIZES[self.type(name)]
        assert w.dtype == np.float32 and w.flags.c_contiguous and w.shape[-1] % block == 0
        out = np.zeros(w.size // block * size, np.uint8)
        rows = w.reshape(-1, w.shape[-1])
        written = self.c.ggml_quantize_chunk(
            ctypes.c_int(self.type(name)),
            w.ctypes.data_as(ctypes.c_void_p),
            out.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(0),
            ctypes.c_int64(len(rows)),
            ctypes.c_int64(rows.shape[1]),
            None if importance is None else importance.ctypes.data_as(ctypes.c_void_p),
        )
        assert written == out.size
        return out.tobytes()

    def dequantize(self, blocks: np.ndarray, name: str) -> np.ndarray:
        block, size = self.gguf.GGML_QUANT_SIZES[self.type(name)]
        out = np.zeros(blocks.size // size * block, np.float32)
        convert = getattr(self.c, "dequantize_row_" + name.lower().replace("_k", "_K"))
        convert(blocks.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(out.size))
        return out

    def in_python(self, w: np.ndarray, name: str) -> bytes:
        with np.errstate(all="ignore"):
            return self.gguf.quants.quantize(w, self.type(name)).tobytes()

    def read_in_python(self, blocks: np.ndarray, name: str) -> np.ndarray:
        return self.gguf.quants.dequantize(blocks, self.type(name))


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def key(weights: Weights) -> str:
    return f"{weights.kind}, {weights.seed}, {weights.exponent}"


def importance(cols: int, *, seed: int = 7) -> np.ndarray:
    """Draw importances of columns in float32: squares of normal numbers, and zeros for a tenth of the columns."""
    random = np.random.RandomState(seed)
    return (random.standard_normal(cols) ** 2 * (random.uniform(size=cols) > 0.1)).astype(np.float32)


def random_blocks(name: str, size: int, count: int, *, seed: int | None = None) -> np.ndarray:
    """Draw random bytes as quantized blocks; their float16 scales and minima are finite, some of them subnormal."""
    random = np.random.RandomState(zlib.crc32(name.encode()) if seed is None else seed)
    blocks = random.randint(0, 256, (count, size)).astype(np.uint8)
    at = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    at |= {"Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": []}
    for place in at.get(name, [0]):
        halves = (random.standard_normal(count) * 2.0 ** random.randint(-20, 8, count)).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    return blocks


def main() -> None:
    ggml = Ggml()
    quantized: dict[str, dict[str, str]] = {}
    dequantized: dict[str, dict[str, str]] = {}
    weighted = {
        name: {
            key(case): text(ggml.quantize(case(1, WEIGHTED_COLS), name, importance(WEIGHTED_COLS))) for case in WEIGHTED
        }
        for name in SEARCHED
    }
    for name in TYPES:
        quantized[name] = {}
        for weights in CASES:
            w = weights(1, COLS)
            blocks = ggml.quantize(w, name)
            if (name, weights.kind) in UNDEFINED:
                continue
            if name in PYTHON_QUANTIZES:
                assert ggml.in_python(w, name) == blocks, (name, weights)
            quantized[name][key(weights)] = text(blocks)
        block, size = ggml.gguf.GGML_QUANT_SIZES[ggml.type(name)]
        blocks = random_blocks(name, size, COLS // block)
        read = ggml.dequantize(blocks, name)
        assert np.array_equal(read, ggml.read_in_python(blocks, name).ravel()), name
        dequantized[name] = {"blocks": text(blocks.tobytes()), "weights": text(read.astype("<f4").tobytes())}
    exponents, ones = np.arange(256, dtype=np.uint8)[:, None], np.full((256, 16), 0x22, np.uint8)
    powers = ggml.dequantize(np.concatenate([exponents, ones], axis=-1), "MXFP4")[::32]
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__, **ggml.versions}
    goldens = {"made": versions, "cols": COLS, "quantized": quantized, "weighted": weighted}
    goldens["dequantized"] = dequantized
    goldens["e8m0"] = text(powers.astype("<f4").tobytes())  # the scales of MXFP4 blocks
    (Path(__file__).parent / "ggml.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
