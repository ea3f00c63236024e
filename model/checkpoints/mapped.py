"""A memory-mapped file: pages are read when they are touched, and dropped on request."""

import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from llamaspec.model.checkpoints.checkpoint import os_errors, refused
from llamaspec.model.system import at_bus_error, map_zeros

_files: WeakKeyDictionary[mmap.mmap, str] = WeakKeyDictionary()  # the names of files with maps in use


def maps_cut_short() -> dict[mmap.mmap, str]:
    """Find the maps in use that are longer than their files are now, and the names of these files."""
    return {map: path for map, path in _files.items() if map.size() < len(map)}


@contextmanager
def refused_if_cut_short() -> Iterator[None]:
    """Raise `CheckpointError` at the end of the block if a mapped file became shorter during the block.

    Normally, touching a page that the file has lost ends the process with SIGBUS. In the block, such pages become
    zeros.
    """
    lost: dict[mmap.mmap, str] = {}

    def put_zeros() -> bool:
        maps = maps_cut_short()
        lost.update(maps)
        return bool(maps) and all(_lost_pages_become_zeros(map) for map in maps)

    with at_bus_error(put_zeros):
        try:
            yield
        finally:  # also if an error came from the zeros
            for map, path in lost.items():
                raise refused(path, _cut_short(map.size(), len(map)))


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
                _files[self._map] = self.path
        self.size = len(self._map)

    def bytes(self, begin: int, end: int) -> bytes:
        """Copy the bytes from `begin` to `end`, fewer where the file ends. Raises `CheckpointError` as `array` does."""
        self._check_size()
        return self._map[begin:end]

    def array(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Return the array at `offset`: a read-only view, or a copy if `offset` is no multiple of the element's size.

        Raises `CheckpointError` if the file has become shorter since it was opened.
        """
        self._check_size()
        count = int(np.prod(shape, dtype=np.int64))
        view = np.frombuffer(self._map, dtype, count, offset).reshape(shape)
        return view if view.flags.aligned else view.copy()

    def release(self) -> None:
        """Drop the pages read so far from this process; views stay valid and read the file again.

        Raises `CheckpointError` as `array` does, since bytes beyond the end of a shortened file may read as zeros.
        """
        self._check_size()
        self._map.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def scattered(self) -> Iterator[Callable[[np.ndarray], None]]:
        """Have the system read only the pages that are touched, and nothing ahead, in this context.

        This is for reading a few bytes of each row, where reading ahead would read the whole file. The context's value
        is a function that takes a contiguous view of this file, and has the system read the pages of the view at once.
        """
        begin = _address(self._map)

        def read_at_once(view: np.ndarray) -> None:
            start = view.ctypes.data - begin
            if 0 <= start < self.size and view.flags.c_contiguous and view.nbytes:
                page = start - start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, page, start + view.nbytes - page)

        self._map.madvise(mmap.MADV_RANDOM)
        try:
            yield read_at_once
        finally:
            self._map.madvise(mmap.MADV_NORMAL)

    def _check_size(self) -> None:
        """Raise `CheckpointError` if the file became shorter.

        Touching a page beyond the end of the file would end the process with SIGBUS.
        """
        if (now := self._map.size()) < self.size:
            raise refused(self.path, _cut_short(now, self.size))


def _lost_pages_become_zeros(map: mmap.mmap) -> bool:
    begin, length = _address(map), -(-map.size() // mmap.PAGESIZE) * mmap.PAGESIZE
    return map_zeros(begin + length, begin + len(map))


def _address(map: mmap.mmap) -> int:
    return np.frombuffer(map, np.uint8).ctypes.data


def _cut_short(now: int, before: int) -> str:
    return f"was cut short while it was read: {now:,} bytes are left of {before:,}"


def release_all(files: Iterable[MappedFile]) -> None:
    """Drop the pages read so far, for several files."""
    for file in files:
        file.release()


@contextmanager
def scattered_in_all(files: Sequence[MappedFile]) -> Iterator[Callable[[np.ndarray], None]]:
    """Enter `MappedFile.scattered` for several files; the value reads a view of any of these files at once."""
    with ExitStack() as stack:
        readers = [stack.enter_context(file.scattered()) for file in files]

        def read_at_once(view: np.ndarray) -> None:
            for read in readers:
                read(view)

        yield read_at_once
