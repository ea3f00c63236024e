"""A memory-mapped file: pages are read when they are touched, and dropped on request."""

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from model.checkpoints.checkpoint import os_errors, refused


class MappedFile:
    """A regular, non-empty file, mapped read-only. Raises `CheckpointError` if it cannot be mapped."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        with os_errors(path):
            # We check the type before opening, since opening a pipe would wait for its other end.
            if stat.S_ISDIR(mode := os.stat(path).st_mode):
                raise refused(path, "is a directory, not a file")
            if not stat.S_ISREG(mode):
                raise refused(path, "is not a regular file")
            with open(path, "rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise refused(path, "is empty")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)

    def bytes(self, begin: int, end: int) -> bytes:
        """Copy the bytes from `begin` to `end`, or to the end of the file."""
        return self._map[begin:end]

    def array(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Return a read-only view of the array at `offset`, or a copy if that is not aligned to its elements."""
        count = int(np.prod(shape, dtype=np.int64))
        view = np.frombuffer(self._map, dtype, count, offset).reshape(shape)
        return view if view.flags.aligned else view.copy()

    def release(self) -> None:
        """Drop the pages that were read so far from memory; views stay valid and read the file again."""
        self._map.madvise(mmap.MADV_DONTNEED)
