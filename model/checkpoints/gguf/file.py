"""The header of a GGUF file: its keys and its table of tensors (see `gguf.layout`).

We parse the header ourselves, and check each stated length against the file's size before we read. The Python package
gguf does not check: if a file of 60 bytes states a list of 2^40 numbers, the package loops for minutes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import CheckpointError, quoted, refused
from llamaspec.model.checkpoints.gguf import layout
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF

# A vocabulary of 200,000 tokens and its merges are 640,000 strings with 14 MB in total. A string may need four times
# its bytes in memory. With these bounds, a hostile file costs at most a second and 200 MB.
LARGEST = 32 << 20  # bytes of the keys and the table of tensors
MOST_STRINGS = 1_000_000
MOST_KEYS = 10_000
MOST_TENSORS = 50_000
LARGEST_ALIGNMENT = 1 << 16
INSTEAD = "take a file of the model in another type, such as Q4_K_M or Q8_0"

Value = int | float | bool | str | list[str] | np.ndarray


class Metadata:
    """The keys and values of a GGUF file; a method for each type returns a value, or raises `CheckpointError`.

    The error names the file and the key. It says that the key is missing, or that its value has the wrong type.
    """

    def __init__(self, values: Mapping[str, Value], path: str):
        self.values, self.path = values, path

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, default, "an integer", int)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, "a number", float, int))

    def boolean(self, key: str, default: bool) -> bool:
        return self._typed(key, default, "true or false", bool)

    def string(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, "a string", str)

    def strings(self, key: str) -> list[str]:
        return self._typed(key, None, "a list of strings", list)

    def numbers(self, key: str) -> np.ndarray:
        return self._typed(key, None, "a list of numbers", np.ndarray)

    def refused(self, what: str) -> CheckpointError:
        return refused(self.path, what)

    def _typed(self, key: str, default: Any, kind: str, *types: type) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise self.refused(f"lacks the key {key}")
        if type(value) not in types:
            raise self.refused(f"{key} is {short(value)}, expected {kind}")
        return value


class GGUFEntry(NamedTuple):
    """The location of a tensor in its file."""

    shape: tuple[int, ...]
    type: str  # a key of `layout.BLOCKS`
    offset: int  # from the start of the file

    @property
    def bytes(self) -> int:
        weights, size = layout.BLOCKS[self.type]
        return math.prod(self.shape) // weights * size


class Header(NamedTuple):
    """The version, keys and tensors of a file."""

    version: int
    metadata: Metadata
    tensors: dict[str, GGUFEntry]


def read_header(file: MappedFile) -> Header:
    """Read the header of a GGUF file.

    Raises `CheckpointError` if the header is invalid, if tensors overlap, if the file is too short, or if it has bytes
    that belong to no tensor.
    """
    cursor = _Cursor(file)
    version, tensors, keys = _read_counts(cursor)
    metadata = Metadata(_read_metadata(cursor, keys), file.path)
    alignment = metadata.integer("general.alignment", layout.ALIGNMENT)
    if not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.refused(f"general.alignment is {alignment}, not a power of two up to {LARGEST_ALIGNMENT}")
    return Header(version, metadata, _read_table(cursor, tensors, alignment, file.size))


def short(value: object) -> str:
    """Format a value for an error message: at most 40 characters, and "a list" for any list.

    >>> short("x" * 100), short(["a"]), short(True)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", 'a list', 'true')
    """
    if isinstance(value, list | np.ndarray):
        return "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class _Cursor:
    """A position in the file; reads move it forward, never beyond the end."""

    def __init__(self, file: MappedFile):
        self.path, self.at, self._size = file.path, 0, file.size
        self._bytes = file.array(np.dtype("u1"), (min(file.size, LARGEST),), 0).data
        self._strings = MOST_STRINGS

    def refused(self, what: str) -> CheckpointError:
        return refused(self.path, what)

    def take(self, count: int, what: str) -> memoryview:
        """Return the next `count` bytes; `what` describes these bytes in error messages."""
        begin, end = self.at, self.at + count
        if end > len(self._bytes):
            if end > self._size:
                raise self.refused(f"truncated: the file has {self._size} bytes, but {what} ends at byte {end}")
            raise self.refused(f"the header is larger than {LARGEST} bytes: {what} ends at byte {end}")
        self.at = end
        return self._bytes[begin:end]

    def unsigned(self, count: int, what: str) -> int:
        return int.from_bytes(self.take(count, what), "little")

    def string(self, what: str) -> str:
        text = self.take(self.unsigned(8, f"the length of {what}"), what)
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise self.refused(f"{what} is not valid UTF-8 at byte {error.start} of the string") from error

    def value(self, key: str) -> Value:
        title = f"key {quoted(key)}"
        kind = self.unsigned(4, f"the type of {title}")
        if kind == layout.STRING:
            return self.string(f"the value of {title}")
        if kind == layout.ARRAY:
            return self._array(title)
        value = self._numbers(kind, 1, title)[0].item()
        return bool(value) if kind == layout.BOOL else value

    def _array(self, title: str) -> list[str] | np.ndarray:
        kind, length = self.unsigned(4, f"the type of {title}"), self.unsigned(8, f"the length of {title}")
        if kind == layout.ARRAY:
            raise self.refused(f"{title} is a list of lists, which is not supported")
        if kind != layout.STRING:
            return self._numbers(kind, length, title)
        self._strings -= length
        if self._strings < 0:
            what = f"the list of {length} strings in {title}"
            raise self.refused(f"lists have more than {MOST_STRINGS} strings in total, counted up to {what}")
        return self._texts(length, title)

    def _texts(self, length: int, title: str) -> list[str]:
        """Read a list of `length` strings; a million strings take half a second."""
        texts, data, at = [], self._bytes, self.at
        for i in range(length):
            begin = at + layout.LENGTH.size
            end = begin + int.from_bytes(data[at:begin], "little")
            if end > len(data):
                self.at = at
                self.take(end - at, f"string {i} of {title}")  # raises the error
            try:
                texts.append(str(data[begin:end], "utf-8"))
            except UnicodeDecodeError as error:
                what = f"string {i} of {title} is not valid UTF-8 at byte {error.start} of the string"
                raise self.refused(what) from error
            at = end
        self.at = at
        return texts

    def _numbers(self, kind: int, length: int, title: str) -> np.ndarray:
        if kind not in layout.NUMBERS:
            raise self.refused(f"{title} has a value of type {kind}, which GGUF does not define")
        dtype = np.dtype(layout.NUMBERS[kind])
        numbers = np.frombuffer(bytes(self.take(length * dtype.itemsize, title)), dtype)
        if kind == layout.BOOL and np.any(numbers > 1):
            raise self.refused(f"{title} is {numbers.max()}, expected 0 (false) or 1 (true)")
        return numbers


def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
    """Read the version, the number of tensors and the number of keys."""
    cursor.take(len(GGUF), "the header")
    version = cursor.unsigned(4, "the header")
    if version & 0xFFFF == 0 and version:
        raise cursor.refused("is a big-endian GGUF file, which is not supported (only little-endian files are)")
    if version not in (2, 3):
        raise cursor.refused(f"GGUF version {version} is not supported (only 2 and 3)")
    tensors, keys = cursor.unsigned(8, "the header"), cursor.unsigned(8, "the header")
    if tensors > MOST_TENSORS:
        raise cursor.refused(f"the header states {tensors} tensors, expected at most {MOST_TENSORS}")
    if keys > MOST_KEYS:
        raise cursor.refused(f"the header states {keys} keys, expected at most {MOST_KEYS}")
    return version, tensors, keys


def _read_metadata(cursor: _Cursor, keys: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for i in range(keys):
        key = cursor.string(f"the name of key {i}")
        if not key or len(key) > 1000:
            raise cursor.refused(f"the name of key {i} has {len(key)} characters, outside 1 to 1000")
        if key in values:
            raise cursor.refused(f"key {quoted(key)} appears twice")
        values[key] = cursor.value(key)
    return values


def _read_table(cursor: _Cursor, tensors: int, alignment: int, size: int) -> dict[str, GGUFEntry]:
    entries: dict[str, GGUFEntry] = {}
    end = 0  # where the tensors read so far end, from the start of the data
    for i in range(tensors):
        name = cursor.string(f"the name of tensor {i}")
        title = f"tensor {quoted(name)}"
        if not 0 < len(name.encode()) <= layout.LONGEST_NAME:
            raise cursor.refused(
                f"{title} has a name of {len(name.encode())} bytes, outside 1 to {layout.LONGEST_NAME}"
            )
        if name in entries:
            raise cursor.refused(f"{title} appears twice")
        entries[name], end = _read_entry(cursor, title, end, alignment)
    start = -(-cursor.at // alignment) * alignment
    last = max((entry.offset + entry.bytes for entry in entries.values()), default=0)
    if entries and start + last > size:
        raise cursor.refused(f"truncated: the file has {size} bytes, but its tensors end at byte {start + last}")
    if size > start + end:
        raise cursor.refused(f"the file has {size - start - end} unexpected bytes after the last tensor")
    return {name: entry._replace(offset=start + entry.offset) for name, entry in entries.items()}


def _read_entry(cursor: _Cursor, title: str, end: int, alignment: int) -> tuple[GGUFEntry, int]:
    """Read the table entry of a tensor; return it, and the position at which the next tensor must begin.

    `end` is the position where the data of the previous tensor ends; this tensor's data must begin there. We count
    positions from the start of the data, and pad the end of each tensor to a multiple of `alignment`. `title` names the
    tensor in error messages.
    """
    axes = cursor.unsigned(4, title)
    if not 1 <= axes <= layout.MOST_AXES:
        raise cursor.refused(f"{title} has {axes} axes, outside 1 to {layout.MOST_AXES}")
    shape = tuple(cursor.unsigned(8, title) for _ in range(axes))[::-1]
    if not 1 <= math.prod(shape) < 2**63:
        raise cursor.refused(f"{title} has the shape {list(shape)}, expected 1 to 2^63 - 1 elements")
    code, offset = cursor.unsigned(4, title), cursor.unsigned(8, title)
    if code in layout.DROPPED_TYPES:
        old, new = layout.DROPPED_TYPES[code]
        what = f"{title} has type {old}, which ggml no longer supports: use a {new} file of the model instead"
        raise cursor.refused(what)
    name = layout.TYPE_NAMES.get(code, str(code))
    if name not in layout.BLOCKS:
        known = f"only {', '.join(layout.BLOCKS)}"
        raise cursor.refused(f"{title} has type {name}, which is not supported ({known}); {INSTEAD}")
    if shape[-1] % (size := layout.BLOCKS[name].weights):
        what = f"rows of {shape[-1]} weights, expected a multiple of the {size} weights in a block of {name}"
        raise cursor.refused(f"{title} has {what}")
    if offset != end:
        what = "overlaps the tensor before it" if offset < end else "leaves a gap before it"
        raise cursor.refused(f"{title} {what}: it begins at offset {offset}, expected {end}")
    entry = GGUFEntry(shape, name, offset)
    return entry, end + -(-entry.bytes // alignment) * alignment
