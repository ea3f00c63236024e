"""New files that appear whole or not at all: written beside their place under another name, then renamed."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.checkpoints.checkpoint import os_errors, refused

# The one state of a module in this package: as half-written files belong to the whole process, so does their list.
_unfinished: set[Path] = set()


def remove_unfinished() -> None:
    """Remove what is half-written, in a process that ends without unwinding its stack."""
    for staged in list(_unfinished):
        _remove(staged)


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` at the end; removed if the body fails or is interrupted.

    Raises `CheckpointError` where `path` exists, or where the operating system refuses (a full disk).
    """
    path, staged = _places(path)
    with os_errors(path):
        try:
            _refuse_existing(path)
            _unfinished.add(staged)
            staged.mkdir()
            yield staged
            for file in staged.iterdir():
                _flush(file)
            _publish(staged, path)
        except BaseException:
            _remove(staged)
            raise
        finally:
            _unfinished.discard(staged)


@contextmanager
def new_file(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """The name of a file to create, which becomes `path` at the end; as `new_directory` otherwise.

    With `replace`, a file that stands at `path`, or that a link there names, is replaced by the complete new one.
    """
    path, staged = _places(os.path.realpath(path) if replace else path)
    with os_errors(path):
        try:
            if not replace:
                _refuse_existing(path)
            elif path.exists() and not path.is_file():  # a device, say, which a rename would destroy
                raise refused(path, "exists and is not a regular file")
            _unfinished.add(staged)
            yield staged
            _publish(staged, path, replace=replace)
        except BaseException:
            _remove(staged)
            raise
        finally:
            _unfinished.discard(staged)


def _remove(staged: Path) -> None:
    if staged.is_dir():
        shutil.rmtree(staged, ignore_errors=True)
    else:
        staged.unlink(missing_ok=True)


def _places(path: str | Path) -> tuple[Path, Path]:
    path = Path(os.path.abspath(path))
    with os_errors(path):
        os.stat(path.parent)  # now rather than after an hour's work
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path, path.parent / f".{path.name[:100]}.{secrets.token_hex(4)}.partial"


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise refused(path, "exists already")


def _publish(staged: Path, path: Path, *, replace: bool = False) -> None:
    _flush(staged)
    if not replace:
        _refuse_existing(path)  # again: it may have appeared while we wrote
    os.replace(staged, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Have the disk hold a file, or a directory's names, before we go on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
