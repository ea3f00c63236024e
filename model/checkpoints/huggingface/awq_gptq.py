"""Reads quantized matrices in the layouts of autoawq and AutoGPTQ, which have zero points.

The tensors are qweight, qzeros and scales, and for GPTQ also g_idx. The layouts of GPTQ and of autoawq's version gemm
are transposed: see `reference.quantizers.gptq` and `reference.quantizers.awq`. Autoawq has two more versions
(awq/modules/linear/gemv.py and gemv_fast.py of https://github.com/casper-hansen/AutoAWQ):

    gemv        qweight   int32 [rows, cols / 8]: eight codes in a word, the lowest bits first
                qzeros    int32 [rows, words]: zero points, packed in the same way
                scales    [rows, 8 * words]
    gemv_fast   qweight   int16 [rows / 4, cols]: codes of four rows, reordered within blocks of 64 columns
                scales    [8 * words, rows]
                qzeros    [8 * words, rows]: floats: -scale * zero point, which is added to scale * code

Eight zero points share a word. `words` is the number of words for a row's zero points, rounded up to a multiple of 128
/ group. Scales and zero points of a row are padded to 8 * words numbers.
"""

from collections.abc import Callable

import numpy as np

from llamaspec.model.checkpoints.checkpoint import CodesWithMinima, refused
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
    check_whole_groups,
    group_size,
    in_order,
    nibbles,
    unpack_words,
)
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers import awq, packing
from llamaspec.reference.quantizers.affine import Affine

FAST_COLUMNS = 64  # columns of four rows that gemv_fast stores together


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


def _padded_groups(cols: int, group: int) -> int:
    """Return the number of scales of a row in the versions gemv and gemv_fast of autoawq, padding included.

    >>> _padded_groups(4096, 128), _padded_groups(96, 32)
    (32, 32)
    """
    words, multiple = -(-(cols // group) // 8), max(1, 128 // group)
    return 8 * -(-words // multiple) * multiple


class AWQGemv(AWQ):
    """The layout "gemv" of autoawq."""

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        groups = _padded_groups(cols, self.group_of(cols))
        return {
            "qweight": StoredArray((rows, cols // 8), INT32),
            "qzeros": StoredArray((rows, groups // 8), INT32),
            "scales": StoredArray((rows, groups), FLOATS),
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        super().check(arrays, rows, cols)
        check_whole_groups(cols, self.group_of(cols))

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Affine:
        groups = cols // self.group_of(cols)
        codes, zeros = (unpack_words(arrays[name][start:stop], 4) for name in ("qweight", "qzeros"))
        return Affine(codes, arrays["scales"][start:stop, :groups].astype(np.float32), zeros[:, :groups].copy())


class AWQGemvFast(Rule):
    """The layout "gemv_fast" of autoawq."""

    form, zeros = "int4_min", False

    def __init__(self, group: int | None):
        self.group = group

    def group_of(self, cols: int) -> int:
        return self.group or cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        grid = StoredArray((_padded_groups(cols, self.group_of(cols)), rows), FLOATS)
        return {"qweight": StoredArray((rows // 4, cols), ("int16",)), "scales": grid, "qzeros": grid}

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        del arrays
        _check_words(rows, cols)
        check_whole_groups(cols, self.group_of(cols))
        if cols % FAST_COLUMNS:
            raise ValueError(f"rows have {cols} weights, but gemv_fast needs a multiple of {FAST_COLUMNS}")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> CodesWithMinima:
        groups = cols // self.group_of(cols)
        words = np.ascontiguousarray(arrays["qweight"][start // 4 : stop // 4]).astype("<i2").view(np.uint8)
        # Four neighbors in this order are the codes of a word; 64 words hold a block of 64 columns of four rows.
        blocks = nibbles(words).reshape(-1, cols // FAST_COLUMNS, 4, FAST_COLUMNS).swapaxes(1, 2)
        # A block has two runs of 32 columns, and each run is a transposed table of 4 x 8 columns.
        codes = blocks.reshape(stop - start, cols // 32, 8, 4).swapaxes(2, 3).reshape(stop - start, cols)
        scales, minima = (arrays[name][:groups, start:stop].T.astype(np.float32) for name in ("scales", "qzeros"))
        return CodesWithMinima(codes, np.ascontiguousarray(scales), np.ascontiguousarray(minima))


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
        """Return False if g_idx puts columns that are not adjacent into one group, as AutoGPTQ does with desc_act."""
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


AWQ_VERSIONS: dict[str, Callable[[int | None], Rule]] = {"gemm": AWQ, "gemv": AWQGemv, "gemv_fast": AWQGemvFast}
AWQ_INSTEAD = "take a release of the model in the version gemm"


def _check_words(rows: int, cols: int) -> None:
    if rows % ROWS or cols % ROWS:
        raise ValueError(f"the matrix has {rows} rows and {cols} columns, expected multiples of {ROWS}")


def read_awq(fields: Fields) -> Rule:
    """Read an AWQ layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    bits = fields.integer("bits", 4) if "bits" in fields.values else fields.integer("w_bit", 4)
    version, zero_point = fields.values.get("version", "gemm"), fields.boolean("zero_point", True)
    layout = AWQ_VERSIONS.get(version.lower()) if isinstance(version, str) else None
    if bits != 4 or layout is None or not zero_point:
        what = f"AWQ with {bits} bits, version {short(version)}, zero_point {str(zero_point).lower()}"
        known = f"only 4 bits, the versions {', '.join(AWQ_VERSIONS)}, and zero points"
        raise refused(fields.path, f"quantization_config: {what} is not supported ({known}); {AWQ_INSTEAD}")
    size = fields.integer_or_none("group_size" if "group_size" in fields.values else "q_group_size", 128)
    return layout(group_size(size))


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
    """Read a Marlin layout from a quantization_config with quant_method "marlin"; its only setting is a group size."""
    return Marlin(group_size(fields.integer_or_none("group_size", 128)))
