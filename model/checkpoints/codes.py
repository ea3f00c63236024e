"""Conversions of a checkpoint's quantized matrices: codes to weights, weights to codes, and one form to another."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

import numpy as np
from jaxtyping import Float32, Float64

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Codes, CodesWithMinima, Form, Part, Tensor
from llamaspec.model.tensors import quantizable
from llamaspec.reference.quantizers import mx
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS
from llamaspec.reference.quantizers.nf4 import FP4
from llamaspec.reference.quantizers.schemes import SCHEMES, Scheme, scheme

PART = 1 << 20  # weights quantized at once: float64 arithmetic needs several copies of them

WITH_MINIMA = ("int8_min", "int5_min", "int4_min")
BYTES = ("int8", "int6", "int5")  # forms of integers without minima that need more than 4 bits
INTEGERS = (*BYTES, "int4", "iq4_nl", *WITH_MINIMA)  # forms with levels that fit int8

LEVELS: dict[Form, Float64[np.ndarray, " codes"]] = {  # the number for each code, in forms that are not integers
    "fp4": FP4.levels.astype(np.float64),
    "iq4_nl": IQ4_NL_LEVELS.astype(np.float64),
    **{name: scheme.levels for name, scheme in SCHEMES.items() if scheme.levels is not None},
}


def exact_weights(codes: Codes, part: Part) -> Float64[np.ndarray, "rows cols"]:
    """Decode `part` (some rows of the matrix `codes`) to float64 without rounding.

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
    with np.errstate(invalid="ignore"):  # an infinite scale times 0; readers refuse such weights
        weights = levels * spread(scales)
    return weights + spread(part.minima) if isinstance(part, CodesWithMinima) else weights


def dequantized(codes: Codes, shape: tuple[int, ...]) -> Float32[np.ndarray, "rows cols"]:
    """Decode the matrix `codes` of this shape to float32, and round each weight once."""
    weights = np.empty(shape, np.float32)
    start = 0
    for part in codes.parts():
        weights[start : start + len(part.codes)] = exact_weights(codes, part)
        start += len(part.codes)
    return weights


def exact_parts(tensor: Tensor) -> Iterator[np.ndarray]:
    """Yield a matrix in consecutive blocks of rows: in float64 if it is quantized, else in the stored dtype.

    If an adapter adds B A to the matrix W, yield W + B A in float64.
    """
    if adapter := tensor.applies:
        a, b = (np.asarray(matrix, np.float64) for matrix in adapter.pair)
        start = 0
        for weights in exact_parts(adapter.base):
            yield weights + b[start : start + len(weights)] @ a
            start += len(weights)
    elif tensor.codes:
        for part in tensor.codes.parts():
            yield exact_weights(tensor.codes, part)
    else:
        weights = tensor.read()
        rows = max(1, PART // max(1, weights[:1].size))
        for start in range(0, len(weights), rows):
            yield weights[start : start + rows]


def in_common_form(all_codes: Sequence[Codes | None]) -> list[Codes] | None:
    """Convert the codes of several matrices to one form, so that callers can stack the matrices.

    If all codes have the same form, group size and use of zero points, they do not change. Otherwise they become int8.
    For example, a GGUF file may hold q and k in Q4_K and v in Q6_K. Returns None if a matrix has no codes, or if the
    codes differ and one of them cannot become int8, because it has zero points or because its levels do not fit.
    """
    codes = [item for item in all_codes if item]
    if len(codes) < len(all_codes):
        return None
    first = codes[0]
    if all((item.form, item.group, item.zeros) == (first.form, first.group, first.zeros) for item in codes):
        return codes
    if any(item.zeros or item.form not in INTEGERS for item in codes):
        return None
    minima = any(item.form in WITH_MINIMA for item in codes)
    return [_widened(item, gcd(*(item.group for item in codes)), minima=minima) for item in codes]


def in_whole_bytes(codes: Codes) -> Codes:
    """Rename the forms int6 and int5 to int8, for callers that store each code in one byte."""
    return codes._replace(form="int8") if codes.form in BYTES else codes


def _widened(codes: Codes, group: int, *, minima: bool) -> Codes:
    """Convert codes to int8 in groups of `group` columns.

    With `minima`, the result has minima; they are 0 if `codes` has none.
    """

    def widened(part: Part) -> Part:
        copies = codes.group // group
        levels = IQ4_NL_LEVELS[part.codes] if codes.form == "iq4_nl" else part.codes
        levels, scales = levels.astype(np.int8), np.repeat(part.scales, copies, axis=1)
        if not minima:
            return Quantized(levels, scales)
        lowest = np.repeat(part.minima, copies, axis=1) if isinstance(part, CodesWithMinima) else np.zeros_like(scales)
        return CodesWithMinima(levels, scales, lowest)

    form: Form = "int8_min" if minima else "int8"
    return codes._replace(
        form=form, group=group, parts=lambda: map(widened, codes.parts()), scheme="", source=None, blocks=None
    )


def quantized(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return a copy of `checkpoint` that quantizes matrices by the scheme `name` when a caller reads them.

    `model.tensors.quantizable` lists these matrices: the projections of attention, the feed-forward layers and experts,
    and an untied head. Embeddings (and a tied head), norms, biases and routers keep their precision, because their
    rounding errors do the most damage and quantizing them saves little. A matrix that is already quantized is decoded
    and quantized again. If a matrix has an adapter, products with the codes still add the adapter's part. Raises
    ValueError for an unknown scheme.
    """
    rule, form = scheme(name), form_of(name)
    matrices = quantizable(checkpoint.config)
    tensors = {
        tensor_name: _quantized(tensor, name, rule, form) if tensor_name in matrices else tensor
        for tensor_name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def form_of(name: str) -> Form:
    """Return the form (see `Codes`) of the codes that the quantization scheme `name` makes.

    >>> form_of("q8_row"), form_of("mxfp4")
    ('int8', 'mxfp4')
    """
    return name if name in LEVELS else f"int{SCHEMES[name].code_bits}"


def _quantized(tensor: Tensor, name: str, rule: Scheme, form: Form) -> Tensor:
    if tensor.adapter:
        return replace(tensor.adapter, base=_quantized(tensor.adapter.base, name, rule, form)).tensor()
    rows, cols = tensor.shape

    def parts() -> Iterator[Quantized]:
        return (rule.quantize(weights) for weights in exact_parts(tensor))

    size = round(rows * cols * rule.bits_per_weight(cols) / 8)
    codes = Codes(form, rule.group or cols, zeros=False, bytes=size, parts=parts, scheme=name, source=tensor)
    return Tensor(tensor.shape, np.dtype(np.float32), lambda: dequantized(codes, tensor.shape), codes)
