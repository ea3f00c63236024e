"""Writes quantized matrices as ONNX stores them for products: transposed, [cols, rows], with a scale for each group.

A product with a matrix W is x W^T, and ONNX's MatMul takes W^T [cols, rows] as its second operand. DequantizeLinear
turns codes into W^T, with a scale (and a zero point) for each group of rows of W^T. ONNX Runtime replaces these two
operators by one if the codes are stored in this order.
"""

from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8
from onnx import TensorProto

from llamaspec.model.checkpoints.checkpoint import Checkpoint, Codes, Part, Tensor
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.codes import in_whole_bytes
from llamaspec.reference.quantizers.affine import Affine

AT_ONCE = 1 << 26  # codes of a matrix that we hold in memory, to transpose them


class Layout(NamedTuple):
    """The types and shapes of the tensors that hold a quantized matrix, by the end of the tensors' names."""

    group: int
    tensors: Mapping[str, tuple[int, tuple[int, int]]]


def layout_of(tensor: Tensor) -> Layout | None:
    """Choose the tensors for a quantized matrix; None if DequantizeLinear cannot decode its codes.

    We use only integers with whole groups. Codes of four bits share bytes in pairs of rows, so an odd number of rows
    takes a byte for each code.
    """
    if tensor.codes is None:
        return None
    codes, (rows, cols) = in_whole_bytes(tensor.codes), tensor.shape
    if codes.form not in ("int8", "int4") or cols % codes.group:
        return None
    if codes.form == "int4" and rows % 2 == 0:
        kind = TensorProto.UINT4 if codes.zeros else TensorProto.INT4
    else:
        kind = TensorProto.UINT8 if codes.zeros else TensorProto.INT8
    groups = (cols // codes.group, rows)
    tensors = {"codes": (kind, (cols, rows)), "scales": (TensorProto.FLOAT, groups)}
    return Layout(codes.group, tensors | ({"zero_points": (kind, groups)} if codes.zeros else {}))


def write_codes(file: BinaryIO, checkpoint: Checkpoint, name: str, layout: Layout, offsets: Mapping[str, int]) -> int:
    """Write each tensor of the matrix `name` at its offset in `file`. Returns the number of bytes."""
    codes = checkpoint.tensors[name].codes
    assert codes is not None
    start = size = 0
    for part in _blocks_of_rows(codes):
        check_finite(f"{name.removesuffix('.weight')}'s scales", part.scales, path=checkpoint.path)
        arrays = {"codes": part.codes, "scales": part.scales}
        if isinstance(part, Affine):
            arrays["zero_points"] = part.zeros
        for end, array in arrays.items():
            kind, (strips, rows) = layout.tensors[end]
            packed = _packed(array.T, kind)  # [strips, bytes]
            width = packed.shape[1] * rows // len(array)
            first = packed.shape[1] * start // len(array)
            if packed.shape[1] == width:
                file.seek(offsets[end])
                size += file.write(packed.reshape(-1).data)
                continue
            for strip in range(strips):
                file.seek(offsets[end] + strip * width + first)
                size += file.write(packed[strip].data)
        start += len(part.codes)
    return size


def _blocks_of_rows(codes: Codes) -> Iterator[Part]:
    """Yield the parts of a matrix, joined to about `AT_ONCE` codes. All but the last have an even number of rows."""
    parts: list[Part] = []
    for part in codes.parts():
        parts.append(part)
        if sum(known.codes.size for known in parts) >= AT_ONCE:
            block = _joined(parts)
            even = len(block.codes) // 2 * 2
            yield type(block)(*(array[:even] for array in block))
            parts = [type(block)(*(array[even:] for array in block))] if even < len(block.codes) else []
    if parts:
        yield _joined(parts)


def _joined(parts: list[Part]) -> Part:
    return type(parts[0])(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _packed(array: Shaped[np.ndarray, "strips rows"], kind: int) -> UInt8[np.ndarray, "strips bytes"]:
    """Convert numbers to bytes. Of two codes of four bits, the first is in the lower half of the byte."""
    if kind == TensorProto.FLOAT:
        return np.ascontiguousarray(array, "<f4").view(np.uint8)
    codes = np.ascontiguousarray(array).view(np.uint8)
    if kind in (TensorProto.INT8, TensorProto.UINT8):
        return codes
    return (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
