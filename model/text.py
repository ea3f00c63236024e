"""Reads a text file that a user gives for evaluation, calibration or training."""

import codecs
import os
import stat
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import os_errors, refused

LARGEST = 1 << 30  # bytes of the longest text that we read completely: its tokens take 20 times as much memory


def read_text(path: str | Path, *, most: int | None = None) -> str:
    """Read a text file without changing its text. With `most`, reads only the complete characters in its first `most`
    bytes.

    Raises CheckpointError for a file that cannot be read, is not UTF-8, contains only white space, or is not a regular
    file, such as `/dev/zero` or a pipe. If `most` is None, also raises it for a file of more than `LARGEST` bytes.
    """
    with os_errors(path), open(path, "rb", opener=_open_at_once) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise refused(path, "is not a regular file: expected a text file")
        if most is None and about.st_size > LARGEST:
            raise refused(path, f"has {about.st_size:,} bytes: expected a text of at most {LARGEST:,} bytes")
        raw = file.read(most)
    complete = most is None or len(raw) < most
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=complete)
    except UnicodeDecodeError as error:
        raise refused(path, f"is not UTF-8: its byte {error.start} is {raw[error.start]:#04x}") from None
    if not text.strip():
        raise refused(path, "contains no text, only white space")
    return text


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting. Opening a pipe that no process writes to would otherwise wait forever."""
    return os.open(path, flags | os.O_NONBLOCK)
