"""Memory-mapped files: the system loads a page when a program touches it, and we can drop loaded pages."""

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
    """Find the memory maps in use that are now longer than their files. The values are the names of these files."""
    return {map: path for map, path in _files.items() if map.size() < len(map)}


@contextmanager
def refused_if_cut_short() -> Iterator[None]:
    """Raise `CheckpointError` at the end of the block if a mapped file became shorter during the block.

    Normally, SIGBUS kills a process that touches a page beyond the end of a shortened file. In the block, such pages
    read as zeros instead.
    """
    lost: dict[mmap.mmap, str] = {}

    def put_zeros() -> bool:
        maps = maps_cut_short()
        lost.update(maps)
        return bool(maps) and all(_lost_pages_become_zeros(map) for map in maps)

    with at_bus_error(put_zeros):
        try:
            yield
        finally:  # We also raise our error if the zeros led to another error.
            for map, path in lost.items():
                raise refused(path, _cut_short(map.size(), len(map)))


class MappedFile:
    """A read-only memory map of a regular, non-empty file. Raises `CheckpointError` if the file cannot be mapped."""

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
        """Copy the bytes from `begin` to `end`, or to the end of the file if the file ends before `end`.

        Raises `CheckpointError` if the file has become shorter since we opened it.
        """
        self._check_size()
        return self._map[begin:end]

    def array(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """Return the array at byte `offset`: a read-only view of the file, or a copy if the view would be misaligned.

        Raises `CheckpointError` if the file has become shorter since we opened it.
        """
        self._check_size()
        count = int(np.prod(shape, dtype=np.int64))
        view = np.frombuffer(self._map, dtype, count, offset).reshape(shape)
        return view if view.flags.aligned else view.copy()

    def release(self) -> None:
        """Drop the file's loaded pages from this process; views stay valid, and load the pages again when used.

        Raises `CheckpointError` if the file has become shorter since we opened it: bytes beyond its end may have been
        read as zeros.
        """
        self._check_size()
        self._map.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def scattered(self) -> Iterator[Callable[[np.ndarray], None]]:
        """Make a context in which the system loads only the pages that the program touches, without read-ahead.

        Use this to read a few bytes of each row: with read-ahead, the system would load the whole file. The context's
        value is a function that takes a contiguous view of this file. The function asks the system to load all pages of
        the view.
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
        """Raise `CheckpointError` if the file has become shorter since we opened it.

        Without this check, SIGBUS would kill the process when it touches a page beyond the end of the file.
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
    """Call `MappedFile.release` for several files."""
    for file in files:
        file.release()


@contextmanager
def scattered_in_all(files: Sequence[MappedFile]) -> Iterator[Callable[[np.ndarray], None]]:
    """Enter `MappedFile.scattered` for several files.

    The context's value is a function that loads all pages of a view of any of these files.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(file.scattered()) for file in files]

        def read_at_once(view: np.ndarray) -> None:
            for read in readers:
                read(view)

        yield read_at_once
