"""How four-bit codes lie in memory for the GPU: eight to a word, where a kernel can take them for floats in place.

A row is cut into blocks of 32 columns, a block into 8 pieces of 4, and a block is 4 words of 32 bits, which one thread
loads at once. Word j holds element j of every piece. Piece p, as the unsigned number u = code + 8, begins at bit

    19, 15, 11, 7, 3, 31, 27, 23        for p = 0 ... 7

and occupies the three bits above it, too; 31 runs on into bits 0, 1 and 2. Rotated left by 8 r bits, a word has piece
2 r in bits 19 to 22 and piece 2 r + 1 in bits 15 to 18. The mantissa of a float32 ends at bit 22, so with the exponent
of 16 or of 256 in the place of all other bits these are the numbers 16 + u and 256 + u: one instruction and no
conversion (the idea: Kim et al., 2022, https://arxiv.org/abs/2211.10017, there for float16).
"""

import numpy as np
from jaxtyping import Int8, Int32

BLOCK = 32  # columns
PIECES = 8
ZERO = 8  # what is added to a code to make it unsigned
SHIFTS = tuple((19 - 4 * piece) % 32 for piece in range(PIECES))


def pack(codes: Int8[np.ndarray, "rows cols"]) -> Int32[np.ndarray, "rows words"]:
    """Words of codes in [-8, 7], in the order above. Raises ValueError for others, or if 32 does not divide cols.

    >>> one = np.full((1, 32), -8, np.int8)
    >>> one[0, 6] = -7
    >>> [f"{word:08x}" for word in pack(one)[0]]  # piece 1, element 2
    ['00000000', '00000000', '00008000', '00000000']
    """
    rows, cols = codes.shape
    if cols % BLOCK:
        raise ValueError(f"int4 codes are packed {BLOCK} columns at a time, got {cols}")
    if np.any((codes < -ZERO) | (codes >= ZERO)):
        raise ValueError(f"int4 codes are -8 to 7, got {codes.min()} to {codes.max()}")
    pieces = (codes + ZERO).astype(np.uint32).reshape(rows, cols // BLOCK, PIECES, 4)
    words = np.zeros((rows, cols // BLOCK, 4), np.uint32)
    for piece, shift in enumerate(SHIFTS):
        words |= pieces[:, :, piece] << shift | pieces[:, :, piece] >> (32 - shift)
    return words.reshape(rows, cols // PIECES).view(np.int32)


def unpack(words: Int32[np.ndarray, "rows words"]) -> Int8[np.ndarray, "rows cols"]:
    """The codes of `pack`.

    >>> codes = np.arange(-8, 8, dtype=np.int8).repeat(4).reshape(2, 32)
    >>> bool(np.all(unpack(pack(codes)) == codes))
    True
    """
    rows, packed = words.shape
    blocks = words.view(np.uint32).reshape(rows, packed // 4, 4)
    pieces = [(blocks >> shift | blocks << (32 - shift)) & 15 for shift in SHIFTS]
    return (np.stack(pieces, axis=2).reshape(rows, packed * PIECES).astype(np.int32) - ZERO).astype(np.int8)
