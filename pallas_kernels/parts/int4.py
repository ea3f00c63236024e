"""The layout of four-bit codes in a GPU's memory: eight to a word, where the tensor cores can read them as bytes.

A row is cut into blocks of 128 columns, a block into 4 runs of 32, and a run into 4 words of 8. Word 4 t + j of a block
has columns 32 j + 8 t and on: the first four in the lower halves of its bytes, the others in the upper halves, each in
two's complement. The four lanes that share 32 columns, a side of a product (`integer_mma.py`), then load 16 bytes each,
a word of each run. The upper halves by themselves are bytes of 16 times a code.
"""

import numpy as np
from jaxtyping import Int8, Int32

BLOCK = 128  # columns
RUNS = 4
WORD = 8  # columns


def pack(codes: Int8[np.ndarray, "rows cols"]) -> Int32[np.ndarray, "rows words"]:
    """Pack codes in [-8, 7] into words, in the order above.

    Raises ValueError for other codes, and unless cols is a multiple of 128.

    >>> one = np.zeros((1, 128), np.int8)
    >>> one[0, 32 + 2], one[0, 32 + 7] = 1, -1
    >>> [f"{word:08x}" for word in pack(one).view(np.uint32)[0, :4]]  # the second run
    ['00000000', 'f0010000', '00000000', '00000000']
    """
    rows, cols = codes.shape
    if cols % BLOCK:
        raise ValueError(f"int4 codes are packed {BLOCK} columns at a time, got {cols}")
    if np.any((codes < -8) | (codes > 7)):
        raise ValueError(f"int4 codes are -8 to 7, got {codes.min()} to {codes.max()}")
    halves = (codes & 15).astype(np.uint8).reshape(rows, cols // BLOCK, RUNS, 4, 2, 4)
    bytes_ = halves[..., 0, :] | halves[..., 1, :] << 4  # [rows, blocks, runs, words of a run, bytes]
    return np.ascontiguousarray(bytes_.swapaxes(2, 3)).reshape(rows, cols // 2).view(np.int32)


def unpack(words: Int32[np.ndarray, "rows words"]) -> Int8[np.ndarray, "rows cols"]:
    """Give the codes of `pack`.

    >>> codes = np.arange(-8, 8, dtype=np.int8).repeat(16).reshape(2, 128)
    >>> bool(np.all(unpack(pack(codes)) == codes))
    True
    """
    rows, count = words.shape
    bytes_ = np.ascontiguousarray(words).view(np.int8).reshape(rows, count * WORD // BLOCK, 4, RUNS, 4).swapaxes(2, 3)
    return np.stack([bytes_ << 4 >> 4, bytes_ >> 4], axis=-2).reshape(rows, count * WORD)
