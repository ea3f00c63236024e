"""A table of the weight quantizers of `reference/quantizers/`: how they round a matrix, and what they guarantee."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from llamaspec.learn.quantizers import guarantees
from llamaspec.learn.quantizers.guarantees import Matrix, WeightDetails
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.tensors import quantizable
from llamaspec.reference.quantizers import (
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
    mlx,
    mx,
    nvfp4,
    pruning,
    torchao_int4,
)
from llamaspec.reference.quantizers.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2, Minifloat
from llamaspec.reference.quantizers.nf4 import FP4, NF4
from llamaspec.reference.quantizers.schemes import SCHEMES as NAMED

Rounding = Callable[[Matrix], Matrix]
COLS = 4096  # columns of a row; the bits per weight of some schemes depend on this number
GROUP = 64


class StoredMatrix(NamedTuple):
    """A quantized matrix: its dequantized weights, and the code, scale and guarantee of each weight."""

    restored: Matrix
    details: WeightDetails


class ExplainedScheme(NamedTuple):
    """A quantizer: the file that defines it, its bits per weight, its guarantee in short, and its functions."""

    page: str
    bits: float
    guarantee: str
    quantize: Callable[[Matrix], Any]
    dequantize: Callable[[Any], Matrix]
    show: Callable[[Matrix, Any], WeightDetails]
    multiple: int = 1  # rows are padded with zeros to a multiple of this length

    def rounded(self, w: Matrix) -> Matrix:
        """Quantize a matrix, and return the dequantized weights."""
        return self.dequantize(self.quantize(self._padded(w)))[:, : w.shape[1]]

    def store(self, w: Matrix) -> StoredMatrix:
        """Quantize a matrix, and return its dequantized weights with codes, scales and guarantees.

        `w` must be in float32 or a narrower dtype.
        """
        padded = self._padded(w)
        q = self.quantize(padded)
        parts = (part if part is None else part[:, : w.shape[1]] for part in self.show(padded, q))
        return StoredMatrix(self.dequantize(q)[:, : w.shape[1]], WeightDetails(*parts))

    def _padded(self, w: Matrix) -> Float64[np.ndarray, "rows padded"]:
        return np.pad(w, [(0, 0), (0, -w.shape[1] % self.multiple)])


def rounded(checkpoint: Checkpoint, rounding: Rounding) -> Checkpoint:
    """Round all matrices of a model except the embedding, and except a head that is tied to the embedding."""
    names = quantizable(checkpoint.config)
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if name in names:
            new = rounding(tensor.read().astype(np.float64))
            tensor = tensor._replace(read=lambda new=new: new, dtype=new.dtype)
        tensors[name] = tensor
    return replace(checkpoint, tensors=tensors)


def _named(page: str, guarantee: str, name: str, show: Callable[..., WeightDetails], **options: Any) -> ExplainedScheme:
    scheme = NAMED[name]
    bits = scheme.bits_per_weight(COLS)
    return ExplainedScheme(page, bits, guarantee, scheme.quantize, scheme.dequantize, partial(show, **options))


def _integers(name: str) -> ExplainedScheme:
    bits, group = NAMED[name].code_bits, NAMED[name].group
    return _named("symmetric.py", HALF, name, guarantees.symmetric, bits=bits, group=group)


def _ggml(name: str, page: str, guarantee: str) -> ExplainedScheme:
    kind = ggml.TYPES[name]
    show = partial(guarantees.ggml_type, name=name)
    return ExplainedScheme(page, _ggml_bits(name), guarantee, kind.quantize, kind.dequantize, show, kind.weights)


def _affine(bits: int, group: int | None) -> ExplainedScheme:
    def quantize(w: Matrix) -> affine.Affine:
        return affine.quantize(w, bits=bits, block=(1, group or w.shape[1]))

    show = partial(guarantees.affine, bits=bits)
    return ExplainedScheme(
        "affine.py", bits + 40 / (group or COLS), HALF, quantize, affine.dequantize, show, group or 1
    )


def _hqq(bits: int) -> ExplainedScheme:
    quantize, show = partial(hqq.quantize, bits=bits, group=GROUP), partial(guarantees.hqq, bits=bits)
    return ExplainedScheme(
        "hqq.py", bits + 64 / GROUP, "half a step within the range", quantize, hqq.dequantize, show, GROUP
    )


def _fp8(to: Minifloat) -> ExplainedScheme:
    def quantize(w: Matrix) -> Any:
        return minifloat.quantize(w, to=to, block=(1, w.shape[1]))

    dequantize, show = partial(minifloat.dequantize, to=to), partial(guarantees.minifloat, to=to)
    return ExplainedScheme("minifloat.py", 8 + 32 / COLS, FLOAT, quantize, dequantize, show)


def _mx(bits: float, guarantee: str, to: Minifloat) -> ExplainedScheme:
    quantize, dequantize = partial(mx.quantize, to=to), partial(mx.dequantize, to=to)
    return ExplainedScheme(
        "mx.py", bits, guarantee, quantize, dequantize, partial(guarantees.microscaling, to=to), mx.BLOCK
    )


def _double(w: Matrix) -> tuple[Any, double_quantization.Scales]:
    q = NF4.quantize(w, group=GROUP)
    return q, double_quantization.quantize(q.scales)


def _doubly_scaled(q: tuple[Any, double_quantization.Scales]) -> Matrix:
    scales = double_quantization.dequantize(q[1]).astype(np.float32)
    return NF4.dequantize(q[0]._replace(scales=scales))


def _llama2c(w: Matrix) -> Any:
    return llama2c.quantize(w, group=llama2c.group_size(w.shape[1]))


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
    "q8": _integers("q8"),
    "q8_row": _integers("q8_row"),
    "llama2.c Q8_0": ExplainedScheme("llama2c.py", 8.5, HALF, _llama2c, llama2c.dequantize, guarantees.llama2c_groups),
    "LLM.int8()": ExplainedScheme(
        "llm_int8.py", 8 + 32 / COLS, HALF, llm_int8.quantize, llm_int8.dequantize, guarantees.absmax
    ),
    "affine, 8 bits a row": _affine(8, None),
    "fp8": _named("minifloat.py", FLOAT, "fp8", guarantees.minifloat, to=E4M3),
    "fp8, e5m2": _fp8(E5M2),
    "MXFP8, e4m3": _mx(8.25, "an eighth of the weight", E4M3),
    "MXFP6, e2m3": _mx(6.25, "a sixteenth of the weight", E2M3),
    "MXFP6, e3m2": _mx(6.25, "an eighth of the weight", E3M2),
    "q4": _integers("q4"),
    "affine, 4 bits": _affine(4, GROUP),
    "HQQ, 4 bits": _hqq(4),
    "torchao's int4": ExplainedScheme(
        *(
            "torchao_int4.py",
            4 + 64 / GROUP,
            HALF,
            partial(torchao_int4.quantize, group=GROUP),
            torchao_int4.dequantize,
        ),
        *(guarantees.torchao_int4, GROUP),
    ),
    "MLX, 4 bits": ExplainedScheme(
        *("mlx.py", 4 + 32 / GROUP, "half a step, a whole one opposite the largest weight"),
        *(partial(mlx.quantize, bits=4, group=GROUP), mlx.dequantize, partial(guarantees.mlx, bits=4), GROUP),
    ),
    "nf4": _named("nf4.py", LEVEL, "nf4", guarantees.codebook, codebook=NF4, group=GROUP),
    "nf4, scales quantized": ExplainedScheme(
        *("double_quantization.py", 4 + 8 / GROUP + 32 / GROUP / 256, LEVEL),
        *(_double, _doubly_scaled, guarantees.double, GROUP),
    ),
    "FP4": ExplainedScheme(
        *("nf4.py", 4.5, LEVEL, partial(FP4.quantize, group=GROUP), FP4.dequantize),
        *(partial(guarantees.codebook, codebook=FP4), GROUP),
    ),
    "k-means, 16 levels a row": ExplainedScheme(
        *("kmeans.py", 4 + 16 * 32 / COLS, "nearest level; levels are means"),
        *(partial(kmeans.quantize, bits=4, levels=kmeans.lloyd), kmeans.dequantize, guarantees.kmeans),
    ),
    "NVFP4": ExplainedScheme(
        *("nvfp4.py", 4.5, "a fifth of the weight, or a quarter of the scale"),
        *(nvfp4.quantize, nvfp4.dequantize, guarantees.nvfp4, nvfp4.BLOCK),
    ),
    "mxfp4": _mx(4.25, "a quarter of the weight, or of the scale", E2M1),
    "HQQ, 3 bits": _hqq(3),
    "HQQ, 2 bits": _hqq(2),
    "BitNet b1.58": ExplainedScheme(
        *("bitnet.py", 2, "half a scale up to 1.5 scales", bitnet.quantize, bitnet.dequantize, guarantees.bitnet)
    ),
    "binary": ExplainedScheme(
        *("binary.py", 1 + 32 / COLS, "least squares of a sign and a scale"),
        *(binary.quantize, binary.dequantize, guarantees.binary),
    ),
    "2 of 4": ExplainedScheme(
        *("pruning.py", 16 / 2 + 1, "what stays is exact, the largest stay"),
        *(_sparse, lambda w: w, guarantees.sparse, 4),
    ),
    **{f"GGUF {name}": _ggml(name, page, guarantee) for name, (page, guarantee) in _OF_GGML.items()},
}
