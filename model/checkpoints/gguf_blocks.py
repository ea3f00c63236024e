"""Quantised tensors of a GGUF file: as float32, or as the codes that they are where a model can run from these."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, UInt8

from model.checkpoints.checkpoint import Codes, Form
from model.checkpoints.gguf_file import Entry
from model.checkpoints.mapped import MappedFile
from reference.quantizers import ggml
from reference.quantizers.blocks import Quantized
from reference.rope import interleaved_to_halves

AT_ONCE = 1 << 20  # weights decoded at a time, in float64

FORMS: dict[str, Form] = {"Q8_0": "int8", "Q4_0": "int4", "MXFP4": "mxfp4"}  # the others have minima, or groups of 16


def dequantised(file: MappedFile, entry: Entry) -> Float32[np.ndarray, "..."]:
    """The exact weights rounded once to float32, as ggml has them; what is not finite stays so."""
    array = np.empty(entry.shape, np.float32)
    rows, packed = array.reshape(-1, entry.shape[-1]), _packed(file, entry)
    step = max(1, AT_ONCE // rows.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        for begin in range(0, len(rows), step):
            rows[begin : begin + step] = ggml.decode(packed[begin : begin + step], entry.type)
    return array


def codes_of(file: MappedFile, entry: Entry, *, heads: int) -> Codes | None:
    """The codes of a matrix whose rows are so many heads of interleaved pairs, in halves; 0: none, as they are.

    None for a type that is read as float32.
    """
    form = FORMS.get(entry.type)
    if form is None:
        return None
    rows, cols = entry.shape
    head_dim = rows // heads if heads else 1
    step = max(1, AT_ONCE // cols // head_dim) * head_dim  # whole heads

    def parts() -> Iterator[Quantized]:
        packed = _packed(file, entry)
        for begin in range(0, rows, step):
            part = _unpacked(packed[begin : begin + step], entry.type)
            if heads:
                count = len(part.codes) // head_dim
                part = Quantized(*(interleaved_to_halves(array, heads=count) for array in part))
            yield part

    return Codes(form, ggml.TYPES[entry.type].weights, zeros=False, bytes=entry.bytes, parts=parts)


def _packed(file: MappedFile, entry: Entry) -> UInt8[np.ndarray, "rows bytes"]:
    rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
    return file.array(np.dtype("u1"), (rows, entry.bytes // rows), entry.offset)


def _unpacked(packed: UInt8[np.ndarray, "rows bytes"], name: str) -> Quantized:
    """Codes as `model.checkpoints.checkpoint.Codes` has them, and scales: float32, of MXFP4 exponents."""
    kind = ggml.TYPES[name]
    codes, scales, *_ = kind.unpack(packed.reshape(len(packed), -1, kind.bytes))
    codes = codes.reshape(len(packed), -1)
    if name == "Q4_0":
        codes = codes.astype(np.int8) - np.int8(8)
    return Quantized(codes, scales if name == "MXFP4" else scales.astype(np.float32))
