"""Reads and writes matrices in NF4 and FP4, and reads LLM.int8, in the layouts of bitsandbytes.

See https://github.com/bitsandbytes-foundation/bitsandbytes. NF4 and FP4 have these tensors:

    weight                                 codes, two per byte, the first in the high half, row after row: [bytes, 1]
    weight.absmax                          the scale of each block of 64 weights
    weight.quant_map                       the levels, one for each code
    weight.quant_state.bitsandbytes__nf4   JSON: the block size and the matrix's shape (FP4: bitsandbytes__fp4)

If the scales themselves are quantized, weight.absmax holds the scales' codes, and weight.nested_quant_map has the
levels of these codes. In the notation of `reference.quantizers.double_quantization`, weight.nested_absmax then holds
the numbers b, and the JSON holds o. bitsandbytes divides a whole matrix into blocks, so a block may span two rows. We
read only matrices with whole blocks in each row, as in `reference.quantizers.nf4`.

LLM.int8 (see `reference.quantizers.llm_int8`) has int8 codes in the tensor weight, and each row's largest magnitude in
the tensor SCB. At run time, bitsandbytes chooses by the activations which columns it multiplies in float16. So the file
has the codes of all columns.
"""

import json
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Form, Part, refused
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import Arrays, Rule, StoredArray
from llamaspec.model.checkpoints.strict_json import parse_object, short
from llamaspec.reference.quantizers import double_quantization, nf4
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.nf4 import FP4, NF4, Codebook

CODEBOOKS: dict[Form, Codebook] = {"nf4": NF4, "fp4": FP4}
GROUP = 64
LONGEST_STATE = 1 << 12  # bytes


class BitsAndBytes(Rule):
    """The layout of NF4 or FP4. With `double`, the scales themselves are quantized."""

    zeros = False

    def __init__(self, kind: Form = "nf4", *, double: bool = False):
        self.form, self.double = kind, double
        self.levels, self.state = CODEBOOKS[kind].levels, f"weight.quant_state.bitsandbytes__{kind}"

    def group_of(self, cols: int) -> int:
        return GROUP

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        groups = -(-rows * cols // GROUP)
        stored = {
            "weight": StoredArray((-(-rows * cols // 2), 1), ("uint8",)),
            "weight.absmax": StoredArray((groups,), ("uint8" if self.double else "float32",)),
            "weight.quant_map": StoredArray(self.levels.shape, ("float32",)),
            self.state: StoredArray(state(self.form, rows, cols).shape, ("uint8",), any_length=True),
        }
        if self.double:
            blocks = -(-groups // double_quantization.BLOCK)
            stored["weight.nested_absmax"] = StoredArray((blocks,), ("float32",))
            stored["weight.nested_quant_map"] = StoredArray((256,), ("float32",))
        return stored

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        check_rows(cols)
        expected: dict[str, Any] = {"quant_type": self.form, "blocksize": GROUP}
        if self.double:
            expected["nested_blocksize"] = double_quantization.BLOCK
        settings = self._parsed(arrays)
        for key, value in expected.items():
            if settings.get(key) != value:
                raise ValueError(f"{key} in quant_state is {short(settings.get(key))}, expected {short(value)}")
        if settings.get("shape") != [rows, cols]:
            raise ValueError(f"shape in quant_state does not match the matrix, expected [{rows}, {cols}]")
        if not np.array_equal(arrays["weight.quant_map"], self.levels):
            raise ValueError(f"quant_map does not hold the levels of {self.form.upper()}")
        if self.double:
            _offset(settings)

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        codes = nf4.unpack(arrays["weight"].reshape(-1, cols // 2)[start:stop])
        span = slice(start * cols // GROUP, stop * cols // GROUP)
        scales = arrays["weight.absmax"][span]
        if self.double:
            blocks = np.arange(span.start, span.stop) // double_quantization.BLOCK
            with np.errstate(over="ignore", invalid="ignore"):  # readers refuse scales that are not finite
                scales = arrays["weight.nested_quant_map"][scales] * arrays["weight.nested_absmax"][blocks]
                scales = scales + _offset(self._parsed(arrays))
        return Quantized(codes, scales.reshape(stop - start, -1))

    def pack(self, part: Part) -> dict[str, np.ndarray]:
        """Pack some rows of codes and float32 scales into the layout's tensors. The method `part` is the inverse."""
        return {"weight": nf4.pack(part.codes).reshape(-1, 1), "weight.absmax": part.scales.reshape(-1)}

    def constants(self, rows: int, cols: int) -> dict[str, np.ndarray]:
        """Return the tensors that a file stores once per matrix, not per row."""
        return {"weight.quant_map": self.levels, self.state: state(self.form, rows, cols)}

    def _parsed(self, arrays: Arrays) -> dict[str, Any]:
        if arrays[self.state].size > LONGEST_STATE:
            raise ValueError(f"quant_state has {arrays[self.state].size} bytes, expected at most {LONGEST_STATE}")
        return parse_object(arrays[self.state].tobytes(), "quant_state")


class Int8Rows(Rule):
    """The layout of LLM.int8: a weight is its code times SCB / 127."""

    form, zeros = "int8", False

    def group_of(self, cols: int) -> int:
        return cols

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return {
            "weight": StoredArray((rows, cols), ("int8",)),
            "SCB": StoredArray((rows,), ("float32",)),
            "weight_format": StoredArray((1,), ("uint8",), optional=True),
        }

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        if "weight_format" in arrays and arrays["weight_format"].any():  # other formats reorder the codes for old GPUs
            actual = int(arrays["weight_format"].max())
            raise ValueError(f"weight_format is {actual}, expected 0 (codes stored row after row)")

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized:
        return Quantized(arrays["weight"][start:stop], arrays["SCB"][start:stop, None] / np.float32(127))


def check_rows(cols: int) -> None:
    """Raise ValueError if a block of bitsandbytes would span two rows of a matrix with `cols` columns.

    >>> check_rows(96)
    Traceback (most recent call last):
    ValueError: rows have 96 weights, expected a multiple of 64: blocks of bitsandbytes must not span two rows
    """
    if cols % GROUP:
        what = f"rows have {cols} weights, expected a multiple of {GROUP}"
        raise ValueError(f"{what}: blocks of bitsandbytes must not span two rows")


def state(kind: Form, rows: int, cols: int) -> np.ndarray:
    """Format a matrix's tensor quant_state, which consists of the bytes of a JSON object.

    >>> state("nf4", 16, 128).tobytes().decode()
    '{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [16, 128]}'
    """
    what = {"quant_type": kind, "blocksize": GROUP, "dtype": "float32", "shape": [rows, cols]}
    return np.frombuffer(json.dumps(what).encode(), np.uint8)


def _offset(settings: dict[str, Any]) -> np.float32:
    value = settings.get("nested_offset")
    if not isinstance(value, float) or not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"nested_offset in quant_state is {short(value)}, expected a number that float32 can hold")
    return np.float32(value)


def read_bitsandbytes(fields: Fields) -> Rule:
    """Read a bitsandbytes layout from a quantization_config. Raises `CheckpointError` if it is not supported.

    The layout is NF4 or FP4 with load_in_4bit, and LLM.int8 with load_in_8bit.
    """
    four = fields.boolean("load_in_4bit", False) or fields.boolean("_load_in_4bit", False)
    kind = fields.values.get("bnb_4bit_quant_type", "fp4")
    storage = fields.values.get("bnb_4bit_quant_storage", "uint8")
    if not four and (fields.boolean("load_in_8bit", False) or fields.boolean("_load_in_8bit", False)):
        return Int8Rows()
    if not four or kind not in tuple(CODEBOOKS) or storage != "uint8":
        setting = f"bnb_4bit_quant_type {short(kind)} in bnb_4bit_quant_storage {short(storage)}"
        what = setting if four else "neither load_in_4bit nor load_in_8bit"
        what = f'bitsandbytes with {what} is not supported (only "nf4" and "fp4" in "uint8", and int8)'
        how = "to convert it, call transformers' model.dequantize() and save_pretrained()"
        raise refused(fields.path, f"quantization_config: {what}; {how}")
    return BitsAndBytes(kind, double=fields.boolean("bnb_4bit_use_double_quant", False))


def format_bitsandbytes(kind: Form = "nf4", *, plain: list[str]) -> dict[str, Any]:
    """Format the quantization_config of a model in NF4 or FP4.

    `plain` lists the linear modules that are not quantized.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "llm_int8_skip_modules": plain,
    }
