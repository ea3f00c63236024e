"""Checks SentencePiece's table of character replacements, before a library follows the offsets in the table.

u32        n, the size of the trie in bytes
n bytes    the trie, a double array (https://github.com/s-yata/darts-clone) with a u32 for each unit
the rest   the replacements in UTF-8; a zero byte follows each replacement
"""

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused

LEAF, HAS_LEAF = np.uint32(1 << 31), np.uint32(1 << 8)


def check_charsmap(table: bytes, path: str) -> None:
    """Raise `CheckpointError` if the table has an offset beyond its end, since libraries would crash on such a table.

    >>> check_charsmap(b"", "tokenizer.model")
    Traceback (most recent call last):
    llamaspec.model.checkpoints.checkpoint.CheckpointError: tokenizer.model: precompiled_charsmap (the table of \
characters to replace) is damaged
    """
    if not _is_sound(table):
        raise refused(path, "precompiled_charsmap (the table of characters to replace) is damaged")


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
    if np.any(bases | 255 >= len(units)):  # The library computes an index as the base xor a byte of the text.
        return False
    starts = units[bases[units[inner] & HAS_LEAF != 0]] & ~LEAF
    if np.any(starts >= len(replacements)):
        return False
    ends = np.frombuffer(b"\0" + replacements, np.uint8)  # ends[i] is the byte before replacements[i]; it must be 0.
    return not np.any(ends[starts])
