"""Reads importance matrices, which say how much an error in each column of a matrix matters.

llama-imatrix (https://github.com/ggml-org/llama.cpp, tools/imatrix) runs a model on a text and sums the squares of the
numbers that multiply each column. The importance of a column is the mean of these squares. There are two file formats:

    GGUF    general.type is "imatrix"; for each tensor NAME, in float32, NAME.in_sum2 [matrices, cols] and NAME.counts
            [matrices]: the importances are in_sum2 / counts, or 1 if the count is 0
    .dat    i32 number of entries; for each: i32 length of the name, the name, i32 calls, i32 number of values, the
            values in float32: the importances are values / calls. More bytes may follow.

A tensor that holds the matrices of all experts has the importances of each expert, one after the other.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from llamaspec.model.checkpoints.checkpoint import quoted, refused
from llamaspec.model.checkpoints.gguf.file import read_header
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF, begins_imatrix

SUMS, COUNTS = ".in_sum2", ".counts"
LONGEST_NAME = 1000


class ImportanceMatrix(NamedTuple):
    """The importances of columns (by the name of a tensor in a GGUF file), and the file that they come from."""

    path: str
    values: Mapping[str, Float32[np.ndarray, " values"]]

    def of_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Float32[np.ndarray, "matrices cols"]]:
        """Return, by name, the importances of the tensors in `shapes` that have an entry in the file.

        Raises `CheckpointError` if an entry does not fit the shape of its tensor, or if the file has no entry for any
        tensor in `shapes`.
        """
        rows = {}
        for name, shape in shapes.items():
            if name in self.values:
                matrices, cols = shape[0] if len(shape) == 3 else 1, shape[-1]
                if self.values[name].size != matrices * cols:
                    what = f"{name} has {self.values[name].size} importances, expected {matrices * cols}"
                    raise refused(self.path, f"{what}: the file was made for a different model")
                rows[name] = self.values[name].reshape(matrices, cols)
        if shapes and not rows:
            first = quoted(next(iter(self.values), ""))
            raise refused(
                self.path, f"has importances for none of the model's matrices, but for tensors such as {first}"
            )
        return rows


def read_imatrix(path: str) -> ImportanceMatrix:
    """Read an importance matrix of llama.cpp.

    Raises `CheckpointError` if the file is not an importance matrix, or if an importance is negative or not finite.
    """
    file = MappedFile(path)
    start = file.bytes(0, 64)
    if start.startswith(GGUF):
        values = dict(_in_gguf(file))
    elif begins_imatrix(start):
        values = dict(_in_dat(file))
    else:
        raise refused(path, "is not an importance matrix (imatrix) of llama.cpp")
    for name, numbers in values.items():
        if not np.all((numbers >= 0) & np.isfinite(numbers)):
            raise refused(
                path, f"importances must be finite and not negative, but {quoted(name)} has some that are not"
            )
    return ImportanceMatrix(path, values)


def _in_gguf(file: MappedFile) -> Iterable[tuple[str, Float32[np.ndarray, " values"]]]:
    header = read_header(file)
    if header.metadata.values.get("general.type") != "imatrix":
        raise refused(file.path, 'is not an importance matrix: its general.type is not "imatrix"')
    for name, entry in header.tensors.items():
        if not name.endswith(SUMS):
            continue
        own = name.removesuffix(SUMS)
        counted = header.tensors.get(own + COUNTS)
        if counted is None or (entry.type, counted.type) != ("F32", "F32"):
            raise refused(file.path, f"{quoted(own)} needs the tensors {SUMS[1:]} and {COUNTS[1:]} in F32")
        sums, counts = (file.array(np.dtype("<f4"), (each.bytes // 4,), each.offset) for each in (entry, counted))
        if sums.size % counts.size:
            raise refused(
                file.path,
                f"{quoted(own)} has {sums.size} sums, expected a multiple of {counts.size} (the number of matrices)",
            )
        rows, counts = sums.reshape(counts.size, -1), counts[:, None]
        with np.errstate(all="ignore"):
            yield own, np.where(counts > 0, rows / counts, 1).astype(np.float32).reshape(-1)


def _in_dat(file: MappedFile) -> Iterable[tuple[str, Float32[np.ndarray, " values"]]]:
    at = 0

    def integer(what: str) -> int:
        return int(take(1, "<i4", what)[0])

    def take(count: int, dtype: str, what: str) -> np.ndarray:
        nonlocal at
        begin, at = at, at + count * np.dtype(dtype).itemsize
        if count < 0 or at > file.size:
            raise refused(file.path, f"truncated: the file has {file.size} bytes, but {what} ends at byte {at}")
        return file.array(np.dtype(dtype), (count,), begin)

    for i in range(integer("the number of entries")):
        length = integer(f"the name of entry {i}")
        if not 0 < length <= LONGEST_NAME:
            raise refused(file.path, f"the name of entry {i} has {length} bytes, outside 1 to {LONGEST_NAME}")
        name = take(length, "u1", f"the name of entry {i}").tobytes().decode(errors="replace")
        calls, count = integer(f"entry {quoted(name)}"), integer(f"entry {quoted(name)}")
        values = take(count, "<f4", f"entry {quoted(name)}")
        with np.errstate(all="ignore"):
            yield name, (values / np.float32(calls) if calls > 0 else values).astype(np.float32)
