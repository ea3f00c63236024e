"""Quantizers of weights that `reference/quantizers/` defines, each as one function of a matrix."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from reference.quantizers import (
    affine,
    binary,
    bitnet,
    double_quantization,
    ggml,
    hqq,
    kmeans,
    llama2c,
    llm_int8,
    minifloat,
    mx,
    nvfp4,
    pruning,
)
from reference.quantizers.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2, Minifloat
from reference.quantizers.nf4 import FP4, NF4, Codebook
from reference.quantizers.schemes import SCHEMES as NAMED

Matrix = Float64[np.ndarray, "rows cols"]
Rounding = Callable[[Matrix], Matrix]
COLS = 4096  # of a row, where a scheme's bits depend on it


class Scheme(NamedTuple):
    """A quantizer: the file that defines it, stored bits a weight, its guarantee in short, and its rounding."""

    page: str
    bits: float
    guarantee: str
    rounded: Rounding


def _named(name: str) -> Rounding:
    return lambda w: NAMED[name].dequantize(NAMED[name].quantize(w))


def _ggml(name: str) -> Rounding:
    def rounded(w: Matrix) -> Matrix:
        padded = np.pad(w, [(0, 0), (0, -w.shape[1] % ggml.TYPES[name].weights)])
        return ggml.decode(ggml.encode(padded.astype(np.float32), name), name)[:, : w.shape[1]]

    return rounded


def _affine(w: Matrix, *, bits: int, group: int | None) -> Matrix:
    return affine.dequantize(affine.quantize(w, bits=bits, block=(1, group or w.shape[1])))


def _hqq(w: Matrix, *, bits: int) -> Matrix:
    return hqq.dequantize(hqq.quantize(w, bits=bits, group=64))


def _minifloat(w: Matrix, *, to: Minifloat) -> Matrix:
    return minifloat.dequantize(minifloat.quantize(w, to=to, block=(1, w.shape[1])), to=to)


def _mx(w: Matrix, *, to: Minifloat) -> Matrix:
    return mx.dequantize(mx.quantize(w, to=to), to=to)


def _codebook(w: Matrix, *, codebook: Codebook) -> Matrix:
    return codebook.dequantize(codebook.quantize(w, group=64))


def _double(w: Matrix) -> Matrix:
    q = NF4.quantize(w, group=64)
    scales = double_quantization.dequantize(double_quantization.quantize(q.scales))
    return NF4.dequantize(q._replace(scales=scales.astype(np.float32)))


def _kmeans(w: Matrix) -> Matrix:
    return kmeans.dequantize(kmeans.quantize(w, bits=4, levels=kmeans.lloyd))


def _sparse(w: Matrix) -> Matrix:
    return np.where(pruning.n_of_m(w, n=2, m=4), w, 0.0)


def _ggml_bits(name: str) -> float:
    return 8 * ggml.TYPES[name].bytes / ggml.TYPES[name].weights


HALF = "half a step"
FLOAT = "half a unit in the weight's last place"
LEVEL = "half the gap between the levels on both sides"
NEAREST = "nearest code of scales that were searched for"
_OF_GGML = {
    "Q8_0": ("ggml_blocks.py", HALF),
    "Q6_K": ("ggml_superblocks.py", NEAREST),
    "Q5_K": ("ggml_superblocks.py", NEAREST),
    "Q5_1": ("ggml_blocks.py", HALF),
    "Q5_0": ("ggml_blocks.py", "half a step, a whole one opposite the largest weight"),
    "Q4_K": ("ggml_superblocks.py", NEAREST),
    "Q4_1": ("ggml_blocks.py", HALF),
    "Q4_0": ("ggml_blocks.py", "half a step, a whole one opposite the largest weight"),
    "IQ4_NL": ("ggml_codebooks.py", "nearest level of a scale that was searched for"),
    "MXFP4": ("ggml_codebooks.py", "a quarter of the weight, or of the scale"),
    "Q3_K": ("ggml_superblocks.py", NEAREST),
    "Q2_K": ("ggml_superblocks.py", NEAREST),
    "TQ2_0": ("ggml_ternary.py", "half of the largest weight of 256"),
    "TQ1_0": ("ggml_ternary.py", "half of the largest weight of 256"),
}

SCHEMES = {
    "q8": Scheme("symmetric.py", NAMED["q8"].bits_per_weight(COLS), HALF, _named("q8")),
    "q8_row": Scheme("symmetric.py", NAMED["q8_row"].bits_per_weight(COLS), HALF, _named("q8_row")),
    "llama2.c Q8_0": Scheme("llama2c.py", 8.5, HALF, lambda w: llama2c.dequantize(llama2c.quantize(w, group=64))),
    "LLM.int8()": Scheme("llm_int8.py", 8 + 32 / COLS, HALF, lambda w: llm_int8.dequantize(llm_int8.quantize(w))),
    "affine, 8 bits a row": Scheme("affine.py", 8 + 40 / COLS, HALF, partial(_affine, bits=8, group=None)),
    "fp8": Scheme("minifloat.py", NAMED["fp8"].bits_per_weight(COLS), FLOAT, _named("fp8")),
    "fp8, e5m2": Scheme("minifloat.py", 8 + 32 / COLS, FLOAT, partial(_minifloat, to=E5M2)),
    "MXFP8, e4m3": Scheme("mx.py", 8.25, "an eighth of the weight", partial(_mx, to=E4M3)),
    "MXFP6, e2m3": Scheme("mx.py", 6.25, "a sixteenth of the weight", partial(_mx, to=E2M3)),
    "MXFP6, e3m2": Scheme("mx.py", 6.25, "an eighth of the weight", partial(_mx, to=E3M2)),
    "q4": Scheme("symmetric.py", NAMED["q4"].bits_per_weight(COLS), HALF, _named("q4")),
    "affine, 4 bits": Scheme("affine.py", 4 + 40 / 64, HALF, partial(_affine, bits=4, group=64)),
    "HQQ, 4 bits": Scheme("hqq.py", 4 + 64 / 64, "half a step within the range", partial(_hqq, bits=4)),
    "nf4": Scheme("nf4.py", NAMED["nf4"].bits_per_weight(COLS), LEVEL, _named("nf4")),
    "nf4, scales quantized": Scheme("double_quantization.py", 4 + 8 / 64 + 32 / 64 / 256, LEVEL, _double),
    "FP4": Scheme("nf4.py", 4.5, LEVEL, partial(_codebook, codebook=FP4)),
    "k-means, 16 levels a row": Scheme("kmeans.py", 4 + 16 * 32 / COLS, "nearest level; levels are means", _kmeans),
    "NVFP4": Scheme(
        "nvfp4.py",
        4.5,
        "a fifth of the weight, or a quarter of the scale",
        lambda w: nvfp4.dequantize(nvfp4.quantize(w)),
    ),
    "mxfp4": Scheme("mx.py", 4.25, "a quarter of the weight, or of the scale", partial(_mx, to=E2M1)),
    "HQQ, 3 bits": Scheme("hqq.py", 3 + 64 / 64, "half a step within the range", partial(_hqq, bits=3)),
    "HQQ, 2 bits": Scheme("hqq.py", 2 + 64 / 64, "half a step within the range", partial(_hqq, bits=2)),
    "BitNet b1.58": Scheme(
        "bitnet.py", 2, "half a scale up to 1.5 scales", lambda w: bitnet.dequantize(bitnet.quantize(w))
    ),
    "binary": Scheme(
        "binary.py",
        1 + 32 / COLS,
        "least squares of a sign and a scale",
        lambda w: binary.dequantize(binary.quantize(w)),
    ),
    "2 of 4": Scheme("pruning.py", 16 / 2 + 1, "what stays is exact, the largest stay", _sparse),
    **{f"GGUF {name}": Scheme(page, _ggml_bits(name), said, _ggml(name)) for name, (page, said) in _OF_GGML.items()},
}
