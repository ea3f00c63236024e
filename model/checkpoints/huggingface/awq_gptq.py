"""Reads quantized matrices in the layouts of autoawq and AutoGPTQ, which store them transposed and with zero points.

A matrix is stored in the tensors qweight, qzeros and scales, and for GPTQ also g_idx: see `reference.quantizers.awq`
and `reference.quantizers.gptq`.
"""

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.marlin import Marlin
from llamaspec.model.checkpoints.huggingface.rule import (
    FLOATS,
    INT32,
    ROWS,
    Arrays,
    Rule,
    StoredArray,
    check_groups,
    group_size,
    in_order,
    unpack_words,
)
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers import awq, packing
from llamaspec.reference.quantizers.affine import Affine


class AWQ(Rule):
    """The layout that autoawq calls "gemm"."""

    form, zeros = "int4", True

    def __init__(self, group: int | None):
        self.group = group

    def group_of(self, cols: int) -> int:
        return self.group or cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        groups = -(-cols // self.group_of(cols))
        return {
            "qweight": StoredArray((cols, rows // 8), INT32),
            "qzeros": StoredArray((groups, rows // 8), INT32),
            "scales": StoredArray((groups, rows), FLOATS),
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        del arrays
        _check_words(rows, cols)

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Affine:
        codes, zeros = (
            unpack_words(np.ascontiguousarray(arrays[name][:, start // 8 : stop // 8]), 4)
            .reshape(-1, (stop - start) // 8, 8)[..., np.argsort(awq.ORDER)]
            .reshape(-1, stop - start)
            .T
            for name in ("qweight", "qzeros")
        )
        return Affine(codes, arrays["scales"][:, start:stop].T.astype(np.float32), zeros)


class GPTQ(Rule):
    """The layout of AutoGPTQ. Its version 1 stores zero points minus one."""

    zeros = True

    def __init__(self, bits: int, group: int | None, version: int):
        self.bits, self.group, self.version = bits, group, version
        self.form = "int4" if bits <= 4 else "int8"

    def group_of(self, cols: int) -> int:
        return self.group or cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        groups = -(-cols // self.group_of(cols))
        return {
            "qweight": StoredArray((cols * self.bits // 32, rows), INT32),
            "qzeros": StoredArray((groups, rows * self.bits // 32), INT32),
            "scales": StoredArray((groups, rows), FLOATS),
            "g_idx": StoredArray((cols,), INT32, optional=True),
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        _check_words(rows, cols)
        check_groups("g_idx", arrays.get("g_idx"), len(arrays["scales"]))

    def in_groups(self, arrays: Arrays, cols: int) -> bool:
        """Return False if g_idx spreads the columns of a group over the matrix, as AutoGPTQ does with desc_act."""
        return "g_idx" not in arrays or in_order(arrays["g_idx"], self.group_of(cols))

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Affine:
        words = slice(start * self.bits // 32, stop * self.bits // 32)
        codes = self._unpacked(arrays["qweight"][:, start:stop].T)
        zeros = self._unpacked(arrays["qzeros"][:, words]).T
        zeros = zeros + np.uint8(self.version == 1) & np.uint8((1 << self.bits) - 1)
        scales = arrays["scales"][:, start:stop].T.astype(np.float32)
        if not self.in_groups(arrays, cols):
            scales, zeros = scales[:, arrays["g_idx"]], zeros[:, arrays["g_idx"]]
        return Affine(codes, scales, zeros)

    def _unpacked(self, words: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(words)
        return (
            unpack_words(words, self.bits)
            if self.bits in (4, 8)
            else packing.unpack(words.view(np.uint8), bits=self.bits)
        )


def _check_words(rows: int, cols: int) -> None:
    if rows % ROWS or cols % ROWS:
        raise ValueError(f"the matrix has {rows} rows and {cols} columns, expected multiples of {ROWS}")


def read_awq(fields: Fields) -> Rule:
    """Read an AWQ layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    bits = fields.integer("bits", 4) if "bits" in fields.values else fields.integer("w_bit", 4)
    version, zero_point = fields.values.get("version", "gemm"), fields.boolean("zero_point", True)
    if bits != 4 or str(version).lower() != "gemm" or not zero_point:
        what = f"AWQ with {bits} bits, version {short(version)}, zero_point {str(zero_point).lower()}"
        raise refused(fields.path, f"quantization_config: {what} is not supported (only 4 bits, gemm, true)")
    size = fields.integer_or_none("group_size" if "group_size" in fields.values else "q_group_size", 128)
    return AWQ(group_size(size))


def read_gptq(fields: Fields) -> Rule:
    """Read a GPTQ layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    bits, form = fields.integer("bits"), fields.values.get("checkpoint_format") or "gptq"
    if fields.boolean("is_marlin_format", False):
        form = "marlin"
    group = group_size(fields.integer_or_none("group_size", 128))
    if form == "marlin" and bits == 4:
        return Marlin(group)
    if bits not in (2, 3, 4, 8) or form not in ("gptq", "gptq_v2"):
        what = f"GPTQ with {bits} bits in checkpoint_format {short(form)} is not supported"
        what = f"{what} (only 2, 3, 4 or 8 bits in gptq or gptq_v2, and 4 bits in marlin)"
        raise refused(fields.path, f"quantization_config: {what}")
    return GPTQ(bits, group, version=2 if form == "gptq_v2" else 1)


def read_marlin(fields: Fields) -> Rule:
    """Read a Marlin layout from a quantization_config with quant_method "marlin", which states only the group size."""
    return Marlin(group_size(fields.integer_or_none("group_size", 128)))
