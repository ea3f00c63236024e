"""Reading of a text file that a user gives for evaluation, calibration or training."""

import codecs
import os
import stat
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors, refused

LARGEST = 1 << 30  # bytes of a text that is read whole: its tokens take some 20 times as much memory


def read_text(path: str | Path, *, most: int | None = None) -> str:
    """Read a text file without changing anything, or only the complete characters in its first `most` bytes.

    Raises CheckpointError for a file that cannot be read, is not UTF-8 or holds only white space. Before reading, it
    is also raised for a file without an end (`/dev/zero`, a pipe), and, if `most` is None, for one above `LARGEST`.
    """
    with os_errors(path), open(path, "rb", opener=_open_at_once) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise refused(path, "is not a regular file, and we read a text only from a file with an end")
        if most is None and about.st_size > LARGEST:
            raise refused(path, f"has {about.st_size:,} bytes, expected at most {LARGEST:,} for a text")
        raw = file.read(most)
    complete = most is None or len(raw) < most
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=complete)
    except UnicodeDecodeError as error:
        raise refused(path, f"is not UTF-8: its byte {error.start} is {raw[error.start]:#04x}") from None
    if not text.strip():
        raise refused(path, "holds no text")
    return text


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe without a writer would never open."""
    return os.open(path, flags | os.O_NONBLOCK)
