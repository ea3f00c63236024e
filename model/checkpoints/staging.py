"""Writes new files atomically: under a temporary name in the same folder, then renamed when complete.

A killed process leaves its unfinished file behind, `.NAME.xxxxxxxx.partial`. Each writer locks its unfinished file, and
the kernel releases the lock when the process ends. So the next writer of the same path can tell that an unfinished file
is abandoned, and removes it.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors, refused

# The unfinished files of this process. The set is global, so that `remove_unfinished` finds the files of all threads.
_unfinished: set[Path] = set()


def remove_unfinished() -> None:
    """Remove this process's unfinished files; a process calls this if it exits without leaving its `with` blocks."""
    for staged in list(_unfinished):
        _remove(staged)


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Make a temporary directory, and rename it to `path` when the `with` block ends.

    If the block fails or is interrupted, we remove the directory. Raises `CheckpointError` if `path` exists, or if an
    operation on files fails (for example, the disk is full).
    """
    path = _place(path)
    with os_errors(path):
        refuse_existing(path)
        _remove_stale(path)
        staged, lock = _stage(path, directory=True)
        try:
            yield staged
            for file in staged.iterdir():
                _flush(file)
            _publish(staged, path)
        except BaseException:
            _remove(staged)
            raise
        finally:
            _unfinished.discard(staged)
            os.close(lock)


@contextmanager
def new_file(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Make an empty temporary file, and rename it to `path` when the `with` block ends.

    If the block fails or is interrupted, we remove the file. With `replace`, the new file may replace a file at `path`;
    if `path` is a link, the new file replaces the link's target. Raises `CheckpointError` as `new_directory` does.
    """
    path = _place(os.path.realpath(path) if replace else path)
    with os_errors(path):
        if not replace:
            refuse_existing(path)
        elif path.exists() and not path.is_file():  # A rename would destroy a device, for example.
            raise refused(path, "exists and is not a regular file, so it cannot be replaced")
        _remove_stale(path)
        staged, lock = _stage(path, directory=False)
        try:
            yield staged
            _publish(staged, path, replace=replace)
        except BaseException:
            _remove(staged)
            raise
        finally:
            _unfinished.discard(staged)
            os.close(lock)


def _place(path: str | Path) -> Path:
    path = Path(os.path.abspath(path))
    with os_errors(path):
        os.stat(path.parent)  # If the folder does not exist, we fail now rather than after an hour's work.
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path


def _stage(path: Path, *, directory: bool) -> tuple[Path, int]:
    """Make and lock a temporary file or directory next to `path`; return it and the descriptor that holds the lock."""
    while True:
        staged = path.parent / f"{_prefix(path)}{secrets.token_hex(4)}.partial"
        _unfinished.add(staged)
        if directory:
            staged.mkdir()
        else:
            os.close(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        lock = _open(staged)
        # Before we locked the file, another writer may have taken it for abandoned and removed it. Then we try again.
        if lock is not None and _locked(lock, wait=True) and os.path.exists(staged):
            return staged, lock
        _unfinished.discard(staged)
        if lock is not None:
            os.close(lock)


def _remove_stale(path: Path) -> None:
    """Remove the unfinished files for `path` that no process has locked, since their writers no longer run."""
    name = re.compile(re.escape(_prefix(path)) + r"[0-9a-f]{8}\.partial")
    for entry in os.scandir(path.parent):
        if not name.fullmatch(entry.name) or entry.is_symlink() or (lock := _open(entry.path)) is None:
            continue
        try:
            if _locked(lock, wait=False):
                _remove(Path(entry.path))
        finally:
            os.close(lock)


def _remove(staged: Path) -> None:
    if staged.is_dir():
        shutil.rmtree(staged, ignore_errors=True)
    else:
        staged.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name[:100]}."


def _open(path: str | Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def _locked(lock: int, *, wait: bool) -> bool:
    """Lock the file of the descriptor `lock`. Returns True if this process may use the file now.

    Without `wait`, returns False if another process has locked the file. With `wait`, waits until that process unlocks
    the file. On a network file system without locks, returns `wait`.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return wait
    return True


def refuse_existing(path: Path) -> None:
    """Raise `CheckpointError` if there is something at `path`, even a link that leads nowhere."""
    if os.path.lexists(path):
        raise refused(path, "already exists")


def _publish(staged: Path, path: Path, *, replace: bool = False) -> None:
    _flush(staged)
    if not replace:
        refuse_existing(path)  # Another process may have made this file while we wrote.
    os.replace(staged, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until the disk holds the contents of a file, or the list of names of a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
