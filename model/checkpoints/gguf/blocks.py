"""Reads quantized tensors of a GGUF file, either as codes or decoded to float32."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float16, Float32, Integer, UInt8

from llamaspec.model.checkpoints.checkpoint import Blocks, Codes, CodesWithMinima, Form, Part
from llamaspec.model.checkpoints.codes import WITH_MINIMA
from llamaspec.model.checkpoints.gguf.file import GGUFEntry
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.ggml_blocks import Signed
from llamaspec.reference.quantizers.ggml_superblocks import Superblocks
from llamaspec.reference.rope import interleaved_to_halves

AT_ONCE = 1 << 20  # number of weights that we decode at a time, in float64
BYTES_AT_ONCE = 2 << 20  # number of bytes that we yield at a time, if we do not decode them; a core's cache holds them


class FormOfBlocks(NamedTuple):
    """The fields `form` and `group` of `model.checkpoints.checkpoint.Codes` for one of ggml's types."""

    form: Form
    group: int


FORMS = {
    "Q8_0": FormOfBlocks("int8", 32),
    "Q5_0": FormOfBlocks("int5", 32),
    "Q5_1": FormOfBlocks("int5_min", 32),
    "Q4_0": FormOfBlocks("int4", 32),
    "Q4_1": FormOfBlocks("int4_min", 32),
    "Q6_K": FormOfBlocks("int6", 16),
    "Q5_K": FormOfBlocks("int5_min", 32),
    "Q4_K": FormOfBlocks("int4_min", 32),
    "Q3_K": FormOfBlocks("int4", 16),
    "Q2_K": FormOfBlocks("int4_min", 16),
    "IQ4_NL": FormOfBlocks("iq4_nl", 32),
    "MXFP4": FormOfBlocks("mxfp4", 32),
    "TQ1_0": FormOfBlocks("int4", 256),
    "TQ2_0": FormOfBlocks("int4", 256),
    "IQ1_S": FormOfBlocks("int8", 32),
    "IQ1_M": FormOfBlocks("int8", 16),
    "IQ2_XXS": FormOfBlocks("int8", 32),
    "IQ2_XS": FormOfBlocks("int8", 16),
    "IQ2_S": FormOfBlocks("int8", 16),
    "IQ3_XXS": FormOfBlocks("int8", 32),
    "IQ3_S": FormOfBlocks("int8", 32),
    "IQ4_XS": FormOfBlocks("iq4_nl", 32),
}

# For each type that a device can unpack (`model.weights.gguf_blocks`): at which bytes of a block its float16 numbers
# begin. The first number is the scale d, the second is the minimum or its unit.
FLOAT16_AT = {
    "Q8_0": (0,), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_0": (0,), "Q4_1": (0, 2), "IQ4_NL": (0,), "MXFP4": (),
    "Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82),
}  # fmt: skip
EXPONENT = np.uint8(0x7C)  # in the second byte of a float16: all bits of the exponent, set for infinity and NaN
NAN_EXPONENT = 0xFF  # MXFP4 has a byte as scale instead, and this byte means NaN


def dequantized(file: MappedFile, entry: GGUFEntry) -> Float32[np.ndarray, "..."]:
    """Decode all weights of a tensor to float32 and round each once, as ggml does; NaN and infinity are kept."""
    array = np.empty(entry.shape, np.float32)
    rows, packed = array.reshape(-1, entry.shape[-1]), _packed(file, entry)
    step = max(1, AT_ONCE // rows.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        for begin in range(0, len(rows), step):
            rows[begin : begin + step] = ggml.decode(packed[begin : begin + step], entry.type)
    return array


def codes_of(file: MappedFile, entry: GGUFEntry, *, heads: int) -> Codes | None:
    """Return the codes of a quantized matrix; None for a matrix of floats.

    If `heads` is positive, the matrix is a q or k projection with this number of heads, and its RoPE pairs are
    interleaved. We then reorder each head's rows to halves. If `heads` is 0, rows keep their order.
    """
    if entry.type not in FORMS:
        return None
    rows, cols = entry.shape
    head_dim = rows // heads if heads else 1
    step = max(1, AT_ONCE // cols // head_dim) * head_dim  # whole heads

    def parts() -> Iterator[Part]:
        packed = _packed(file, entry)
        for begin in range(0, rows, step):
            part = _unpacked(packed[begin : begin + step], entry.type)
            if heads:
                count = len(part.codes) // head_dim
                part = type(part)(*(interleaved_to_halves(array, heads=count) for array in part))
            yield part

    def stored_rows() -> Iterator[UInt8[np.ndarray, "rows row_bytes"]]:
        packed = _packed(file, entry)
        step = max(1, BYTES_AT_ONCE // packed.shape[1] // head_dim) * head_dim
        for begin in range(0, rows, step):
            part = packed[begin : begin + step]
            yield interleaved_to_halves(part, heads=len(part) // head_dim) if heads else part

    form, group = FORMS[entry.type]
    blocks = None
    if entry.type in FLOAT16_AT:
        blocks = Blocks(entry.type, entry.bytes // rows, stored_rows, partial(_are_finite, type=entry.type))
    return Codes(form, group, zeros=False, bytes=entry.bytes, parts=parts, blocks=blocks)


def _are_finite(packed: UInt8[np.ndarray, "rows row_bytes"], *, type: str) -> bool:
    """Tell whether all scales and minima are finite in some rows of blocks.

    To get a scale or a minimum, we multiply a float16 number by an integer. The result is finite if that number is
    finite.
    """
    blocks = packed.reshape(-1, ggml.READABLE[type].bytes)
    if type == "MXFP4":
        return not np.any(blocks[:, 0] == NAN_EXPONENT)
    # The second byte of a little-endian float16 has all bits of the exponent.
    return not any(np.any(blocks[:, at + 1] & EXPONENT == EXPONENT) for at in FLOAT16_AT[type])


def _packed(file: MappedFile, entry: GGUFEntry) -> UInt8[np.ndarray, "rows bytes"]:
    rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
    return file.array(np.dtype("u1"), (rows, entry.bytes // rows), entry.offset)


def _unpacked(packed: UInt8[np.ndarray, "rows bytes"], name: str) -> Quantized | CodesWithMinima:
    """Unpack rows of ggml's type `name` to codes, scales and minima.

    float32 holds all of these exactly. If a scale is the product of two stored scales, the product has at most 18 bits.
    """
    kind = ggml.READABLE[name]
    blocks = kind.unpack(packed.reshape(len(packed), -1, kind.bytes))

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(len(packed), -1)

    codes, scales = rows(blocks.codes), blocks.scales
    if isinstance(kind, Signed):
        codes = codes.astype(np.int8) - np.int8(kind.zero)
    minima = getattr(blocks, "minima", None)
    if isinstance(blocks, Superblocks):
        scales, minima = _product(blocks.d, scales), -_product(blocks.e, blocks.minima)
    if name != "MXFP4":  # MXFP4's scales are exponents
        scales = scales.astype(np.float32)
    if minima is None or FORMS[name].form not in WITH_MINIMA:
        return Quantized(codes, rows(scales))
    return CodesWithMinima(codes, rows(scales), rows(minima.astype(np.float32)))


def _product(
    unit: Float16[np.ndarray, "*batch"], multiples: Integer[np.ndarray, "*batch groups"]
) -> Float32[np.ndarray, "*batch groups"]:
    with np.errstate(invalid="ignore"):  # 0 times infinity is NaN; readers refuse NaN later
        return unit.astype(np.float32)[..., None] * multiples.astype(np.float32)
