"""Reads matrices in the layout of hqq (https://github.com/mobiusml/hqq), as transformers saves them.

    W_q           codes, packed
    scale, zero   one of each per group: a weight is (code - zero) * scale
    shape, nbits, group_size, axis, ...   settings that config.json also has

See `reference.quantizers.hqq` for the arithmetic. hqq reshapes a matrix, row after row, to a grid of codes. With axis
1, each row of the grid is a group: `group_size` adjacent weights of the matrix. With axis 0, each column of the grid is
a group, so adjacent weights are in different groups; we convert such matrices to float32.

To pack codes, hqq divides the rows of the grid into equal parts. One byte or int32 stores one code of each part, the
first part in the highest bits. Codes of 4 bits have 2 parts in a byte, and codes of 2 bits have 4. Codes of 3 bits have
10 parts in an int32, where the last part may be padded. The setting of 1.58 bits means codes from 0 to 2, packed as 2
bits. hqq cannot save a model with scales or zero points that are quantized themselves.
"""

from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import CodesWithMinima, Form, refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import FLOATS, Arrays, Rule, StoredArray, check_whole_groups
from llamaspec.model.checkpoints.strict_json import short

TERNARY = 1.58
PARTS = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, TERNARY: 4, 1: 8}  # bits per code: codes in one stored number
NUMBERS = ("nbits", "group_size", "axis")
FLAGS = {"view_as_float": False, "quant_scale": False, "quant_zero": False, "channel_wise": True}
UNUSED = ("optimize", "round_zero", "offload_meta", "encoded_state_dict", "stores_quant_config")
TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")
DEQUANTIZE = "to convert the model, call hqq's dequantize() for each layer"


class HQQ(Rule):
    """The layout of hqq, with one set of settings for all matrices."""

    zeros = False

    def __init__(self, stated: int | float, group: int | None, axis: int):
        self.stated, self.group, self.axis = stated, group, axis
        self.bits = bits = 2 if stated == TERNARY else int(stated)  # bits of a packed code
        self.form: Form = "int4_min" if bits <= 4 else "int8_min"
        self.middle = 0 if bits <= 4 else 128  # number that we subtract from codes, so that they fit int8

    def group_of(self, cols: int) -> int:
        return self.group or cols

    def _grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the grid of codes, before packing."""
        group = self.group or (rows if self.axis == 0 else cols)
        groups = rows * cols // group
        return (group, groups) if self.axis == 0 else (groups, group)

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        length, width = self._grid(rows, cols)
        scales = (1, width) if self.axis == 0 else (length, 1)
        stored = {
            "W_q": StoredArray((-(-length // PARTS[self.bits]), width), ("int32" if self.bits == 3 else "uint8",)),
            "scale": StoredArray(scales, FLOATS),
            "zero": StoredArray(scales, FLOATS),
            "shape": StoredArray((2,), ("int64", "int32")),
        }
        stored |= {name: StoredArray((1,), ("int32", "float32"), optional=True) for name in NUMBERS}
        stored |= {name: StoredArray((1,), ("uint8",), optional=True) for name in (*FLAGS, *UNUSED)}
        return stored | {name: StoredArray((1,), ("uint8",), optional=True, any_length=True) for name in TEXTS}

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        length, width = self._grid(rows, cols)
        if self.axis == 1 or length * width != rows * cols:  # with axis 0, a group may have weights of several rows
            check_whole_groups(cols, self.group_of(cols))
        if length % (parts := PARTS[self.bits]) and self.bits != 3:
            what = f"the codes have {length} rows, expected a multiple of {parts}"
            raise ValueError(f"{what}, because hqq packs {parts} codes of {self.bits} bits into a byte")
        if arrays["shape"].tolist() != [rows, cols]:
            raise ValueError(f"shape is {arrays['shape'].tolist()}, expected {[rows, cols]}")
        expected: dict[str, int | float] = {"nbits": self.stated, "axis": self.axis, **FLAGS}
        if self.group:
            expected["group_size"] = self.group
        for name, value in expected.items():
            if name in arrays and (actual := arrays[name].reshape(())) != actual.dtype.type(value):
                raise ValueError(f"{name} is {actual}, expected {value:g}")

    def in_groups(self, arrays: Arrays, cols: int) -> bool:
        """Return False if adjacent weights are in different groups (axis 0)."""
        del arrays, cols
        return self.axis == 1

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> CodesWithMinima:
        packed, parts = arrays["W_q"], PARTS[self.bits]
        share, width = packed.shape
        first, end = start * cols // width, -(-stop * cols // width)  # rows of the grid
        place, row = np.divmod(np.arange(first, end), share)
        bits = packed[row] >> (self.bits * (parts - 1 - place)).astype(packed.dtype)[:, None]
        codes = (bits & ((1 << self.bits) - 1)).astype(np.uint8).reshape(-1)[start * cols - first * width :]
        codes = codes[: (stop - start) * cols].reshape(stop - start, cols)
        scales, zeros = (self._scales(arrays[name], start, stop, cols) for name in ("scale", "zero"))
        with np.errstate(over="ignore", invalid="ignore"):  # readers refuse weights that are not finite
            minima = (-scales * (zeros.astype(np.float64) - self.middle)).astype(np.float32)
        return CodesWithMinima(codes if not self.middle else (codes ^ np.uint8(128)).view(np.int8), scales, minima)

    def _scales(self, grid: np.ndarray, start: int, stop: int, cols: int) -> np.ndarray:
        """Select the scales or zero points of rows `start` to `stop`: one per group, or one per column if axis is 0."""
        flat = grid.astype(np.float32).reshape(-1)
        if self.axis == 0:
            return flat[np.arange(start * cols, stop * cols).reshape(-1, cols) % len(flat)]
        groups = cols // self.group_of(cols)
        return flat[start * groups : stop * groups].reshape(-1, groups)


class ByTag(HQQ):
    """The layout of hqq with separate settings for each tag.

    A tag is a module's name within a layer, such as "self_attn.q_proj".
    """

    def __init__(self, rules: dict[str, HQQ]):
        first = next(iter(rules.values()))
        super().__init__(first.stated, first.group, first.axis)
        self.rules = rules

    def of(self, module: str) -> Rule | None:
        parts = module.split(".")
        return self.rules.get(
            ".".join(part for part in parts if part not in ("model", "layers") and not part.isdigit())
        )


def read_hqq(fields: Fields) -> Rule:
    """Read an hqq layout from a quantization_config. Raises `CheckpointError` if the layout is not supported."""
    settings = fields.object("quant_config")
    if "weight_quant_params" in settings or not settings:
        return _read_one(settings, fields)
    inner = Fields(settings, fields.path)
    return ByTag({tag: _read_one(inner.object(tag), fields) for tag in settings})


def _read_one(settings: dict[str, Any], fields: Fields) -> HQQ:
    weights = Fields(Fields(settings, fields.path).object("weight_quant_params"), fields.path)
    bits, axis = weights.values.get("nbits"), weights.integer("axis", 1)
    unsupported = [name for name in ("scale_quant_params", "zero_quant_params") if settings.get(name)]
    unsupported += [name for name, expected in FLAGS.items() if weights.boolean(name, expected) != expected]
    if (
        isinstance(bits, bool)
        or not isinstance(bits, int | float)
        or bits not in PARTS
        or axis not in (0, 1)
        or unsupported
    ):
        what = f"hqq with {short(bits)} bits and axis {axis}{''.join(f', {name}' for name in unsupported)}"
        what = f"{what} is not supported (only {', '.join(map(str, sorted(PARTS)))} bits and axis 0 or 1)"
        raise refused(fields.path, f"quantization_config: {what}; {DEQUANTIZE}")
    size = weights.integer_or_none("group_size", 64)
    if size is not None and size < 1:
        raise refused(fields.path, f"quantization_config: group_size is {size}, expected at least 1")
    return HQQ(bits, size, axis)
