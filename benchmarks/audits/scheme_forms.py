"""Quantizes a model in all ways: by our schemes, by calibrated methods, and to the types of GGUF."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Int

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.insight.evaluation_by_tensor import relative_error
from llamaspec.model.quantize.calibration import calibrated
from llamaspec.model.quantize.methods import METHODS
from llamaspec.model.tensors import quantizable, tensor_shapes
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.schemes import SCHEMES

GGML = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")  # blocks of 32, which divide the rows of small models
SUPERBLOCKS = ("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")  # blocks of 256, timed in decoding only
INT8 = {"emulate_activations": "int8"}


class SchemeForm(NamedTuple):
    """A model in one scheme, and the options that it runs with."""

    name: str
    checkpoint: Checkpoint
    options: Mapping[str, Any]  # of `RunOptions`; empty if only the weights differ
    scaled: bool = False  # True if scales moved between matrices, so that weights cannot be compared


def forms(base: Checkpoint, windows: Int[np.ndarray, "windows seq"]) -> Iterator[SchemeForm]:
    """Yield all forms of `base`, a model with float matrices. They are float32, bfloat16, and each quantized form.

    AWQ, GPTQ and SmoothQuant are calibrated on `windows`.
    """
    yield SchemeForm("float32", changed(base, lambda w: w.astype(np.float32)), {})
    yield SchemeForm("bfloat16", changed(base, lambda w: w.astype(ml_dtypes.bfloat16)), {})
    for name in SCHEMES:
        yield SchemeForm(name, quantized(base, name), {})
    for method in METHODS:
        quantized_base = in_memory(calibrated(base, windows, method=method))
        options = INT8 if method == "smoothquant" else {}
        yield SchemeForm(method, quantized_base, options, scaled=METHODS[method].factors is not None)
    for type in GGML:
        padded_base = padded(base, ggml.TYPES[type].weights)
        if all(tensor.shape[1] % ggml.TYPES[type].weights == 0 for tensor in matrices(padded_base).values()):
            yield SchemeForm(f"GGUF {type}", in_type(padded_base, type), {})
    yield SchemeForm("q8_row, int8 activations", quantized(base, "q8_row"), INT8)
    yield SchemeForm("q8, activations q8_0", quantized(base, "q8"), {"emulate_activations": "q8_0"})
    yield SchemeForm("float32, cache int8", changed(base, lambda w: w.astype(np.float32)), {"cache": "int8"})


def matrices(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Select the matrices that schemes quantize in a model."""
    names = quantizable(checkpoint.config)
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name in names}


def padded(checkpoint: Checkpoint, block: int) -> Checkpoint:
    """Pad the FFN's hidden vectors with zeros, up to a multiple of `block`."""
    config = replace(checkpoint.config, ffn=-(-checkpoint.config.ffn // block) * block)
    shapes = tensor_shapes(config)

    def tensor(name: str, old: Tensor) -> Tensor:
        more = [(0, new - old) for new, old in zip(shapes[name], old.shape, strict=True)]
        return old._replace(shape=shapes[name], read=lambda: np.pad(old.read(), more))

    if config == checkpoint.config:
        return checkpoint
    return replace(checkpoint, config=config, tensors={name: tensor(name, t) for name, t in checkpoint.tensors.items()})


def changed(checkpoint: Checkpoint, change: Callable[[np.ndarray], np.ndarray], **fields: Any) -> Checkpoint:
    """Apply `change` to each matrix of a model. The result may have a different dtype."""

    def tensor(old: Tensor) -> Tensor:
        new = change(old.read())
        return old._replace(read=lambda: new, dtype=new.dtype, **fields)

    new = {name: tensor(old) for name, old in matrices(checkpoint).items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **new})


def in_type(checkpoint: Checkpoint, type: str) -> Checkpoint:
    """Round the matrices of a model to the numbers that a GGUF file of this type would hold."""

    def rounded(weights: np.ndarray) -> np.ndarray:
        return ggml.decode(ggml.encode(weights.astype(np.float32), type), type).astype(np.float32)

    return changed(checkpoint, rounded, type=type)


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Read all tensors of a calibrated model into memory, in the order of the model.

    Reading them in a different order would repeat the calibration.
    """

    def tensor(old: Tensor) -> Tensor:
        values, codes = old.read(), old.codes
        if codes:
            parts = list(codes.parts())
            codes = codes._replace(parts=lambda: iter(parts), blocks=None)
        return old._replace(read=lambda: values, codes=codes)

    return replace(checkpoint, tensors={name: tensor(old) for name, old in checkpoint.tensors.items()})


def bits(checkpoint: Checkpoint) -> float:
    """Compute the mean number of bits per weight over all matrices, including scales."""
    parts = matrices(checkpoint).values()

    def bits_of(tensor: Tensor) -> float:
        if tensor.type in ggml.TYPES:
            kind = ggml.TYPES[tensor.type]
            return 8 * kind.bytes / kind.weights * math.prod(tensor.shape)
        return 8 * tensor.bytes

    return sum(map(bits_of, parts)) / sum(math.prod(tensor.shape) for tensor in parts)


def weight_error(base: Checkpoint, checkpoint: Checkpoint) -> float:
    """Compute `relative_error` over all matrices together, without the zeros that `padded` added."""

    def flat(model: Checkpoint) -> np.ndarray:
        parts = (model.tensors[name].read()[: old.shape[0], : old.shape[1]] for name, old in matrices(base).items())
        return np.concatenate([part.astype(np.float64).ravel() for part in parts])

    return relative_error(flat(base), flat(checkpoint))
