"""The header of a .safetensors file (https://github.com/huggingface/safetensors#format).

    8 bytes     n, little-endian
    n bytes     JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    the rest    the tensors' bytes, one tensor after another, without gaps; data_offsets count from here

We parse the header ourselves: the safetensors library copies tensors to NumPy arrays, but we memory-map them, and need
the offsets.
"""

import json
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from llamaspec.model.checkpoints.checkpoint import quoted, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.strict_json import LARGEST, parse_object, short

MOST_AXES = 8

DTYPES = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),  # some scripts save weights in float64; we round such weights to float32 on reading
    # These dtypes occur in quantized weights only.
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype("u1"),  # scales that are powers of two: the exponent plus 127
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class HeaderEntry(NamedTuple):
    """The location of a tensor in its file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: MappedFile) -> dict[str, HeaderEntry]:
    """Read the entry of each tensor. Raises `CheckpointError` if the file is truncated, or has gaps or overlaps."""
    length = int.from_bytes(file.bytes(0, 8), "little")
    if file.size < 8:
        raise refused(file.path, f"has {file.size} bytes, too few for a .safetensors file")
    if length > LARGEST:  # The library allows 100 MB, which would take gigabytes to parse.
        what = f"the header's length is {length} bytes, expected at most {LARGEST}: is this a .safetensors file?"
        raise refused(file.path, what)
    start = 8 + length
    if start > file.size:
        raise refused(file.path, f"truncated: the file has {file.size} bytes, but its header ends at byte {start}")
    text = file.bytes(8, start)
    if not text.startswith(b"{"):
        raise refused(file.path, "the header is not a JSON object: is this a .safetensors file?")
    header = parse_object(text, file.path)
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise refused(file.path, "__metadata__ in the header is not a JSON object")
    entries = {name: _entry(file.path, name, value, start) for name, value in header.items()}
    _check_offsets(file, entries, start)
    return entries


def format_header(tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """Format the length and the header of a file with `tensors` in this order, padded to a multiple of 8 bytes."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers 4 refuses a file without it
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(path: str, name: str, value: object, start: int) -> HeaderEntry:
    title = f"tensor {quoted(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise refused(path, f"{title}: expected exactly the keys dtype, shape and data_offsets in its header entry")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise refused(path, f"{title} has dtype {short(code)}, which is not supported (only {', '.join(DTYPES)})")
    if not _sizes(shape) or len(shape) > MOST_AXES:
        raise refused(path, f"{title}: shape is not a list of at most {MOST_AXES} nonnegative integers")
    if not _sizes(offsets) or len(offsets) != 2:
        raise refused(path, f"{title}: data_offsets is not a list of two nonnegative integers")
    begin, end = offsets
    entry = HeaderEntry(DTYPES[code], tuple(shape), start + begin)
    if end - begin != entry.bytes:
        what = f"{title}: shape and dtype need {entry.bytes} bytes, but data_offsets span {end - begin}"
        raise refused(path, what)
    return entry


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_offsets(file: MappedFile, entries: dict[str, HeaderEntry], start: int) -> None:
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise refused(file.path, f"tensor {quoted(name)} {what}: it begins at byte {entry.offset}, expected {end}")
        end += entry.bytes
    if end > file.size:
        raise refused(file.path, f"truncated: the file has {file.size} bytes, but its tensors end at byte {end}")
    if end < file.size:
        raise refused(file.path, f"the file has {file.size - end} unexpected bytes after the last tensor")
