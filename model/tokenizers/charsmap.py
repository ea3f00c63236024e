"""SentencePiece's table of characters to replace, checked before a library follows its offsets.

u32    n, the size of the trie in bytes
n      the trie, a double array (https://github.com/s-yata/darts-clone), a u32 for each unit
rest   the replacements in UTF-8, each with a zero byte behind it
"""

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused

LEAF, HAS_LEAF = np.uint32(1 << 31), np.uint32(1 << 8)


def check_charsmap(table: bytes, path: str) -> None:
    """Raise `CheckpointError` for a table with an offset beyond its end: the libraries would crash.

    >>> check_charsmap(b"", "tokenizer.model")
    Traceback (most recent call last):
    llamaspec.model.checkpoints.checkpoint.CheckpointError: tokenizer.model: its table of characters to replace is \
damaged
    """
    if not _is_sound(table):
        raise refused(path, "its table of characters to replace is damaged")


def _is_sound(table: bytes) -> bool:
    size = int.from_bytes(table[:4], "little")
    replacements = table[4 + size :]
    if size < 1024 or size % 1024 or not replacements.endswith(b"\0"):  # Blocks have 256 units.
        return False
    try:
        replacements.decode()
    except UnicodeDecodeError:
        return False
    units = np.frombuffer(table, "<u4", size // 4, 4)
    inner = np.flatnonzero(units & LEAF == 0)
    steps = (units[inner] >> np.uint32(10)) << ((units[inner] & np.uint32(1 << 9)) >> np.uint32(6))
    bases = inner.astype(np.int64) ^ steps.astype(np.int64)
    if np.any(bases | 255 >= len(units)):  # A byte of the text is combined with the base by exclusive or.
        return False
    starts = units[bases[units[inner] & HAS_LEAF != 0]] & ~LEAF
    if np.any(starts >= len(replacements)):
        return False
    ends = np.frombuffer(b"\0" + replacements, np.uint8)  # ends[i] is the byte before replacements[i]; it must be 0.
    return not np.any(ends[starts])
