"""A text that a user hands over as a file: to predict, to calibrate with, to train on."""

import codecs
from pathlib import Path

from model.checkpoints.checkpoint import os_errors, refused


def read_text(path: str | Path, *, most: int | None = None) -> str:
    """A file's text, bit for bit, or what its first `most` bytes hold whole characters of.

    Raises CheckpointError where it cannot be read, is not UTF-8, or holds nothing but white space.
    """
    with os_errors(path), open(path, "rb") as file:
        raw = file.read(most)
    whole = most is None or len(raw) < most
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)
    except UnicodeDecodeError as error:
        raise refused(path, f"is not UTF-8: its byte {error.start} is {raw[error.start]:#04x}") from None
    if not text.strip():
        raise refused(path, "holds no text")
    return text
