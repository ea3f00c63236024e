"""Reads and writes matrices in the layouts of compressed-tensors (https://github.com/vllm-project/compressed-tensors).

    format                tensors under a module's name               codes
    pack-quantized        weight_packed, weight_scale, weight_shape   integers of 4 or 8 bits
    int-quantized         weight, weight_scale                        int8
    float-quantized       weight, weight_scale                        e4m3
    mxfp4-pack-quantized  weight_packed, weight_scale                 e2m1
    nvfp4-pack-quantized  see `nvfp4`

naive-quantized is the older name of int-quantized and float-quantized.

pack-quantized adds 8 to integers of 4 bits, or 128 to integers of 8 bits, and packs them along a row into int32 words,
the first in the lowest bits. A weight_zero_point is packed in the same way, but along a column.

A scale belongs to a group of columns of a row, to a row ("channel"), to a block of rows and columns, or to the whole
matrix ("tensor"). If the columns of a group are not adjacent, weight_g_idx has the group of each column, and we convert
the matrix to float32.
"""

from typing import Any

import ml_dtypes
import numpy as np

from llamaspec.model.checkpoints.checkpoint import Codes, Form, refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.nvfp4 import NVFP4
from llamaspec.model.checkpoints.huggingface.rule import (
    FLOATS,
    INT32,
    Arrays,
    Rule,
    StoredArray,
    check_groups,
    group_size,
    in_order,
    nibbles,
    pack_nibbles,
    pack_words,
    powers_of_two,
    unpack_words,
)
from llamaspec.model.checkpoints.huggingface.targets import ByTarget, read_targets
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import Quantized

G_IDX = "weight_g_idx"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FORMS: tuple[Form, ...] = ("int8", "int4", "fp8", "mxfp4")  # the forms of codes that we can write


class CompressedTensors(Rule):
    """The layouts int-quantized and float-quantized: one code per byte, int8 or e4m3."""

    def __init__(self, form: Form, *, bits: int, group: int | None, zeros: bool, rows_alike: int = 1):
        self.form, self.bits, self.group, self.zeros = form, bits, group, zeros
        self.rows_alike = rows_alike  # number of rows that share a scale; 0: all rows

    @property
    def format(self) -> str:
        return "float-quantized" if self.form == "fp8" else "int-quantized"

    def group_of(self, cols: int) -> int:
        return self.group or cols

    def scales(self, rows: int, cols: int) -> tuple[int, ...]:
        if not self.rows_alike:
            return (1,)
        return (-(-rows // self.rows_alike), -(-cols // self.group_of(cols)))

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        stored = {
            "weight": StoredArray((rows, cols), ("int8" if self.form == "int8" else E4M3.name,)),
            "weight_scale": StoredArray(self.scales(rows, cols), FLOATS),
        }
        if self.zeros:
            stored["weight_zero_point"] = StoredArray(self.scales(rows, cols), ("int8",))
        return stored

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        codes = arrays["weight"][start:stop]
        scales = self._rows(arrays["weight_scale"].astype(np.float32), start, stop)
        if self.zeros:
            zeros = self._rows(arrays["weight_zero_point"], start, stop)
            return Affine(codes.view(np.uint8) ^ np.uint8(128), scales, zeros.view(np.uint8) ^ np.uint8(128))
        return Quantized(codes if self.form == "int8" else codes.view(np.uint8), scales)

    def pack(self, part: Quantized | Affine) -> dict[str, np.ndarray]:
        """Pack the codes and scales of some rows into the layout's tensors. The method `part` is the inverse.

        Zero points are packed for the whole matrix, by `pack_zeros`.
        """
        codes = part.codes.view(E4M3) if self.form == "fp8" else part.codes
        return {"weight": codes, "weight_scale": part.scales}

    def pack_zeros(self, zeros: np.ndarray) -> dict[str, np.ndarray]:
        """Pack the zero points of a whole matrix ([rows, groups] in uint8) into the layout's tensor."""
        return {"weight_zero_point": zeros.view(np.int8) ^ np.int8(-128)}

    def constants(self, rows: int, cols: int) -> dict[str, np.ndarray]:
        """Return the tensors that a file stores once per matrix, not per row."""
        del rows, cols
        return {}

    def _rows(self, grid: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Select the scales or zero points of rows `start` to `stop`; `grid` has them for the whole matrix."""
        if not self.rows_alike:
            return np.broadcast_to(grid.reshape(1, 1), (stop - start, 1)).copy()
        return grid[np.arange(start, stop) // self.rows_alike]


class PackedIntegers(CompressedTensors):
    """The layout pack-quantized: integers of 4 or 8 bits, packed into int32 words."""

    @property
    def format(self) -> str:
        return "pack-quantized"

    def _words(self, count: int) -> int:
        return -(-count * self.bits // 32)

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        grid = self.scales(rows, cols)
        stored = {
            "weight_packed": StoredArray((rows, self._words(cols)), INT32),
            "weight_scale": StoredArray(grid, FLOATS),
            "weight_shape": StoredArray((2,), ("int64", "int32")),
            G_IDX: StoredArray((cols,), INT32, optional=True),
        }
        if self.zeros:
            stored["weight_zero_point"] = StoredArray((self._words(grid[0]), *grid[1:]), INT32)
        return stored

    def in_groups(self, arrays: Arrays, cols: int) -> bool:
        return G_IDX not in arrays or in_order(arrays[G_IDX], self.group_of(cols))

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        if arrays["weight_shape"].tolist() != [rows, cols]:
            raise ValueError(f"weight_shape is {arrays['weight_shape'].tolist()}, expected {[rows, cols]}")
        check_groups(G_IDX, arrays.get(G_IDX), self.scales(rows, cols)[1])

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        codes = unpack_words(arrays["weight_packed"][start:stop], self.bits)[:, :cols]
        scales = self._rows(arrays["weight_scale"].astype(np.float32), start, stop)
        columns = slice(None) if self.in_groups(arrays, cols) else arrays[G_IDX]
        scales = scales[:, columns]
        if not self.zeros:
            return Quantized(
                (codes ^ np.uint8(128)).view(np.int8) if self.bits == 8 else codes.view(np.int8) - 8, scales
            )
        words = arrays["weight_zero_point"].T  # [groups, words]
        zeros = unpack_words(np.ascontiguousarray(words), self.bits).T
        return Affine(codes, scales, np.ascontiguousarray(zeros[start:stop][:, columns]))

    def pack(self, part: Quantized | Affine) -> dict[str, np.ndarray]:
        codes = part.codes
        if not self.zeros:
            codes = codes.view(np.uint8) ^ np.uint8(128) if self.bits == 8 else (codes + 8).view(np.uint8)
        return {"weight_packed": pack_words(codes, self.bits), "weight_scale": part.scales}

    def pack_zeros(self, zeros: np.ndarray) -> dict[str, np.ndarray]:
        return {"weight_zero_point": np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.T), self.bits).T)}

    def constants(self, rows: int, cols: int) -> dict[str, np.ndarray]:
        return {"weight_shape": np.array([rows, cols], np.int64)}


class PackedMX(CompressedTensors):
    """The layout mxfp4-pack-quantized: two codes per byte, the first in the low half."""

    packed = "weight_packed"  # the name of the tensor with the codes

    @property
    def format(self) -> str:
        return "mxfp4-pack-quantized"

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {
            self.packed: StoredArray((rows, -(-cols // 2)), ("uint8",)),
            "weight_scale": StoredArray(self.scales(rows, cols), ("uint8",)),
        }

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        return Quantized(nibbles(arrays[self.packed][start:stop])[:, :cols], arrays["weight_scale"][start:stop])

    def pack(self, part: Quantized | Affine) -> dict[str, np.ndarray]:
        return {self.packed: pack_nibbles(part.codes), "weight_scale": part.scales}


class MXFP8(CompressedTensors):
    """The layout mxfp8-quantized. A scale is a power of two, which is stored as its exponent plus 127."""

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        stored = super().stored(rows, cols)
        return {**stored, "weight_scale": stored["weight_scale"]._replace(dtypes=("uint8",))}

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        scales = powers_of_two(arrays["weight_scale"][start:stop])
        return Quantized(arrays["weight"][start:stop].view(np.uint8), scales)


def read_compressed_tensors(fields: Fields) -> Rule:
    """Read a compressed-tensors layout from a quantization_config. Raises `CheckpointError` if it is not supported."""

    def refuse(what: str):
        return refused(fields.path, f"quantization_config: {what}")

    for key in ("sparsity_config", "transform_config"):
        if any(fields.object(key).get(part) not in (None, "dense", {}, []) for part in ("format", "config_groups")):
            raise refuse(f"{key} is not supported")
    groups = [
        Fields(group, fields.path) for group in fields.object("config_groups").values() if isinstance(group, dict)
    ]
    groups = [group for group in groups if group.object("weights")]  # other groups are about activations
    if not groups:
        raise refuse('no group in config_groups has the key "weights"')
    schemes = [(group.values.get("format"), group.object("weights")) for group in groups]
    if all(item == schemes[0] for item in schemes):
        return _read_group(groups[0], fields)
    return ByTarget([(read_targets(group), _read_group(group, fields)) for group in groups])


def _read_group(group: Fields, fields: Fields) -> Rule:
    """Read the layout of one group in config_groups; `fields` is the whole quantization_config."""

    def refuse(what: str):
        return refused(fields.path, f"quantization_config: {what}")

    weights = Fields(group.object("weights"), fields.path)
    bits, kind, strategy = (
        weights.integer("num_bits", 8),
        weights.values.get("type", "int"),
        weights.values.get("strategy"),
    )
    size = group_size(weights.integer_or_none("group_size"))
    name = group.values.get("format") or fields.values.get("format")
    if (name, strategy, size) == ("nvfp4-pack-quantized", "tensor_group", 16):
        return NVFP4(packed="weight_packed", scale="weight_global_scale", divided=True)
    if strategy is None:
        strategy = "group" if size else "channel"
    shared: dict[str, Any] = {"bits": bits, "zeros": not weights.boolean("symmetric", True)}
    match strategy:
        case "group" if size:
            shared["group"] = size
        case "channel":
            shared["group"] = None
        case "tensor":
            shared |= {"group": None, "rows_alike": 0}
        case "block":
            shared["rows_alike"], shared["group"] = _block(weights)
        case _:
            raise refuse(
                f"weights with strategy {short(strategy)} are not supported (only group, channel, tensor and block)"
            )
    match name, kind, bits:
        case "pack-quantized", "int", 4 | 8 if strategy in ("group", "channel"):
            return PackedIntegers("int4" if bits == 4 else "int8", **shared)
        case "int-quantized" | "naive-quantized", "int", 8:
            return CompressedTensors("int8", **shared)
        case "float-quantized" | "naive-quantized", "float", 8 if not shared["zeros"]:
            return CompressedTensors("fp8", **shared)
        case "mxfp4-pack-quantized", "float", 4 if not shared["zeros"] and shared["group"] == 32:
            return PackedMX("mxfp4", **shared)
        case "mxfp8-quantized", "float", 8 if not shared["zeros"] and shared["group"] == 32:
            return MXFP8("fp8", **shared)
    what = f"format {short(name)} with {short(kind)} weights of {bits} bits and strategy {short(strategy)}"
    raise refuse(f"{what} is not supported")


def _block(weights: Fields) -> tuple[int, int]:
    match weights.values.get("block_structure"):
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            return rows, cols
        case other:
            what = f"block_structure is {short(other)}, expected a list of two positive integers"
            raise refused(weights.path, f"quantization_config: {what}")


def rule_for(codes: Codes, *, rows_grouped: bool, int8_activations: bool) -> CompressedTensors:
    """Choose the layout for writing matrices with the form of `codes`. Raises ValueError if no layout fits.

    With `rows_grouped`, each group of columns in a row has a scale; otherwise each row has one scale. With
    `int8_activations`, we write int8 codes as int-quantized, which tells readers to use int8 activations. Otherwise we
    write int8 codes as pack-quantized.
    """
    if codes.form not in FORMS:
        raise ValueError(f"no format of compressed-tensors can hold {codes.form}")
    kinds: dict[Form, type[CompressedTensors]] = {
        "int8": CompressedTensors if int8_activations else PackedIntegers,
        "int4": PackedIntegers,
        "fp8": CompressedTensors,
        "mxfp4": PackedMX,
    }
    bits = 4 if codes.form in ("int4", "mxfp4") else 8
    return kinds[codes.form](codes.form, bits=bits, group=codes.group if rows_grouped else None, zeros=codes.zeros)


# "dynamic" with the strategy "token": readers compute one scale for each token when the model runs.
INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def format_compressed_tensors(rule: CompressedTensors, *, plain: list[str]) -> dict[str, Any]:
    """Format the quantization_config of a model in the layout `rule`.

    `plain` lists the linear modules that are not quantized.
    """
    weights = {
        "num_bits": rule.bits,
        "type": "int" if rule.form in ("int4", "int8") else "float",
        "symmetric": not rule.zeros,
        "strategy": "group" if rule.group else "channel",
        "group_size": rule.group,
        "dynamic": False,
    }
    inputs = INT8_ACTIVATIONS if rule.format == "int-quantized" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": rule.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }
