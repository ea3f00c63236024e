"""Quantized matrices of a checkpoint: the weights that codes stand for, and codes of weights as they are read."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import get_args

import numpy as np
from jaxtyping import Float32, Float64

from model.checkpoints.checkpoint import Checkpoint, Codes, Form, Part, Shifted, Tensor
from model.tensors import quantizable
from reference.quantizers import mx
from reference.quantizers.affine import Affine
from reference.quantizers.blocks import Quantized
from reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS
from reference.quantizers.minifloat import E2M1, E4M3
from reference.quantizers.nf4 import NF4
from reference.quantizers.schemes import Scheme, scheme

PART = 1 << 20  # weights that are quantized at once: the arithmetic is float64's, and needs some copies of them

WITH_MINIMA = ("int8_min", "int4_min")
INTEGERS = ("int8", "int4", "iq4_nl", *WITH_MINIMA)  # forms whose levels int8 holds

_BYTES = np.arange(256, dtype=np.uint8)
LEVELS: dict[Form, Float64[np.ndarray, " codes"]] = {  # of the codes that are no integers
    "nf4": NF4.levels.astype(np.float64),
    "iq4_nl": IQ4_NL_LEVELS.astype(np.float64),
    "fp8": E4M3.decode(_BYTES),
    "mxfp4": E2M1.decode(_BYTES[:16]),
}


def exact_weights(codes: Codes, part: Part) -> Float64[np.ndarray, "rows cols"]:
    """The weights that a part of `codes` stands for, exactly.

    >>> part = Quantized(np.array([[1, 2, 3]], np.int8), np.array([[0.5, 2.0]], np.float32))
    >>> exact_weights(Codes("int8", group=2, zeros=False, bytes=11, parts=lambda: iter([part])), part)
    array([[0.5, 1. , 6. ]])
    """

    def spread(a: np.ndarray) -> np.ndarray:
        return np.repeat(a.astype(np.float64), codes.group, axis=-1)[..., : part.codes.shape[-1]]

    levels = LEVELS[codes.form][part.codes] if codes.form in LEVELS else part.codes.astype(np.float64)
    if isinstance(part, Affine):
        levels = levels - spread(part.zeros)
    scales = part.scales
    if codes.form == "mxfp4":
        scales = np.ldexp(1.0, scales.astype(np.int32) - mx.BIAS)
    with np.errstate(invalid="ignore"):  # an infinite scale times 0: whoever reads such weights refuses them
        weights = levels * spread(scales)
    return weights + spread(part.minima) if isinstance(part, Shifted) else weights


def dequantized(codes: Codes, shape: tuple[int, ...]) -> Float32[np.ndarray, "rows cols"]:
    """What a `Tensor`'s `read` gives of `codes`: the weights, each rounded once."""
    weights = np.empty(shape, np.float32)
    start = 0
    for part in codes.parts():
        weights[start : start + len(part.codes)] = exact_weights(codes, part)
        start += len(part.codes)
    return weights


def exact_parts(tensor: Tensor) -> Iterator[np.ndarray]:
    """Runs of rows of a matrix, in order: float64 where it is quantized, else as it is stored."""
    if tensor.codes:
        for part in tensor.codes.parts():
            yield exact_weights(tensor.codes, part)
    else:
        weights = tensor.read()
        rows = max(1, PART // max(1, weights[:1].size))
        for start in range(0, len(weights), rows):
            yield weights[start : start + rows]


def in_common_form(each: Sequence[Codes | None]) -> list[Codes] | None:
    """The codes of matrices that are to become one, in a form that all have: their own, or integers of 8 bits.

    A GGUF file may hold q and k in Q4_K, say, and v in Q6_K. None where a matrix has no codes, or others than integers
    times scales, plus minima perhaps.
    """
    codes = [one for one in each if one]
    if len(codes) < len(each):
        return None
    first = codes[0]
    if all((one.form, one.group, one.zeros) == (first.form, first.group, first.zeros) for one in codes):
        return codes
    if any(one.zeros or one.form not in INTEGERS for one in codes):
        return None
    minima = any(one.form in WITH_MINIMA for one in codes)
    return [_widened(one, gcd(*(one.group for one in codes)), minima=minima) for one in codes]


def _widened(codes: Codes, group: int, *, minima: bool) -> Codes:
    """As int8, in groups that divide their own; with minima, of 0 where there were none."""

    def widened(part: Part) -> Part:
        copies = codes.group // group
        levels = IQ4_NL_LEVELS[part.codes] if codes.form == "iq4_nl" else part.codes
        levels, scales = levels.astype(np.int8), np.repeat(part.scales, copies, axis=1)
        if not minima:
            return Quantized(levels, scales)
        lowest = np.repeat(part.minima, copies, axis=1) if isinstance(part, Shifted) else np.zeros_like(scales)
        return Shifted(levels, scales, lowest)

    form: Form = "int8_min" if minima else "int8"
    return codes._replace(form=form, group=group, parts=lambda: map(widened, codes.parts()))


def quantized(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """`checkpoint` with its matrices in the scheme `name`; they are quantized when they are read, a part at a time.

    Matrices are what activations are multiplied by: the projections of attention, the feed-forward layers and experts,
    and an untied head. Embeddings (and a head that is one), norms, biases and the routers of experts stay as they are:
    they are small, or looked up, and errors in them are the costliest. What is quantized already is so anew.
    Raises ValueError for a name that is no scheme.
    """
    rule, form = scheme(name), form_of(name)
    matrices = quantizable(checkpoint.config)
    tensors = {
        name: _quantized(tensor, rule, form) if name in matrices else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def form_of(name: str) -> Form:
    """What the codes of a scheme are.

    >>> form_of("q8_row"), form_of("mxfp4")
    ('int8', 'mxfp4')
    """
    integers: dict[str, Form] = {"q8": "int8", "q8_row": "int8", "q4": "int4"}
    return integers.get(name) or next(form for form in get_args(Form) if form == name)


def _quantized(tensor: Tensor, rule: Scheme, form: Form) -> Tensor:
    rows, cols = tensor.shape

    def parts() -> Iterator[Quantized]:
        return (rule.quantize(weights) for weights in exact_parts(tensor))

    size = round(rows * cols * rule.bits_per_weight(cols) / 8)
    codes = Codes(form, rule.group or cols, zeros=False, bytes=size, parts=parts)
    return Tensor(tensor.shape, np.dtype(np.float32), lambda: dequantized(codes, tensor.shape), codes)
