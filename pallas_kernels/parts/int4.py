"""The layout of codes of 4, 5 and 6 bits in a GPU's memory, where the tensor cores can read them as bytes.

Eight codes of four bits are a word. A row is cut into blocks of 128 columns, a block into 4 runs of 32, and a run into
4 words of 8. Word 4 t + j of a block belongs to lane t and run j. The four lanes that share 32 columns, a side of a
product (`integer_mma.py`), then load 16 bytes each, a word of each run. Three orders say which eight columns of its run
a word has:

    bytes    8 t and on: the first four in the lower halves of its bytes, the others in the upper halves
    halves   4 t to 4 t + 3 in the lower halves, 16 + 4 t and on in the upper halves: a word has both groups of 16
    table    8 t and on, one after the other: selectors of bytes in a table of levels

Integers are in two's complement, or 0 to 15. The upper halves by themselves are bytes of 16 times a code.

Of codes of 5 and 6 bits such words hold the upper four, and words of their own the *rest*, the lowest bit or two. A
word of the rest has those of 4 or 2 neighboring words: where word i of them has a code in some half of a byte, it has
the code's rest in the same half, i or 2 i bits up. The upper four bits in the upper half of a byte, and the rest below,
are a byte of 8 or 4 times a code.
"""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8, Int32

BLOCK = 128  # columns
WHOLE = 2 * BLOCK  # columns that codes of 5 and 6 bits come in multiples of
RUNS = 4
RUN = BLOCK // RUNS
WORD = 8  # columns

Order = Literal["bytes", "halves", "table"]
# The 32 columns of a run as axes, and the order of those axes in its words: a lane's word, then codes in a word.
ORDERS: dict[Order, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "bytes": ((4, 2, 4), (0, 2, 1)),
    "halves": ((2, 4, 4), (1, 2, 0)),
    "table": ((4, 8, 1), (0, 1, 2)),
}


def order_of(group: int, *, levels: bool) -> Order:
    """Choose the order of codes in words, for groups of so many columns and integers or levels."""
    return "table" if levels else "halves" if group == RUN // 2 else "bytes"


def pack(
    codes: Int8[np.ndarray, "rows cols"], order: Order = "bytes", *, lowest: int = -8
) -> Int32[np.ndarray, "rows words"]:
    """Pack codes in [-8, 7], or in [0, 15] where `lowest` is 0, into words, in the order above.

    Raises ValueError for other codes, and unless cols is a multiple of 128.

    >>> one = np.zeros((1, 128), np.int8)
    >>> one[0, 32 + 2], one[0, 32 + 7] = 1, -1
    >>> [f"{word:08x}" for word in pack(one).view(np.uint32)[0, :4]]  # the second run
    ['00000000', 'f0010000', '00000000', '00000000']
    """
    _, cols = codes.shape
    if cols % BLOCK:
        raise ValueError(f"int4 codes are packed {BLOCK} columns at a time, got {cols}")
    if np.any((codes < lowest) | (codes > lowest + 15)):
        raise ValueError(f"int4 codes are {lowest} to {lowest + 15}, got {codes.min()} to {codes.max()}")
    return np.asarray(packed((codes & 15).astype(np.uint8), order)).view(np.int32)


def packed_apart(codes: Any, order: Order, *, bits: int) -> tuple[Any, Any]:
    """Pack codes [rows, cols] of 5 or 6 bits, uint8 of NumPy or JAX: words of their upper four bits, and of the rest.

    >>> one = np.zeros((1, 256), np.uint8)
    >>> one[0, 32 + 2] = 0b110111
    >>> [[f"{word:x}" for word in some[0, :2]] for some in packed_apart(one, "bytes", bits=6)]
    [['0', 'd0000'], ['c0000', '0']]
    """
    few = bits - 4
    low = packed(codes & (1 << few) - 1, order).reshape(len(codes), -1, 4 // few)
    joined = low[..., 0]
    for i in range(1, 4 // few):
        joined = joined | low[..., i] << np.uint32(few * i)
    return packed(codes >> few, order), joined


def packed(codes: Any, order: Order) -> Any:
    """Pack codes [rows, cols] in [0, 15], uint8 of NumPy or JAX, into words of uint32."""
    rows, cols = codes.shape
    axes, turn = ORDERS[order]
    runs = codes.reshape(rows, cols // BLOCK, RUNS, *axes)
    lanes = runs.transpose(0, 1, 3 + turn[0], 2, 3 + turn[1], 3 + turn[2]).reshape(rows, cols // WORD, WORD)
    words = lanes[..., 0].astype(np.uint32)
    for place in range(1, WORD):
        words = words | lanes[..., place].astype(np.uint32) << np.uint32(4 * place)
    return words


def unpack(words: Int32[np.ndarray, "rows words"], order: Order = "bytes") -> Int8[np.ndarray, "rows cols"]:
    """Give the codes of `pack`, from -8 to 7.

    >>> codes = np.arange(-8, 8, dtype=np.int8).repeat(16).reshape(2, 128)
    >>> bool(np.all(unpack(pack(codes)) == codes))
    True
    """
    return np.asarray(signed(unpacked(np.ascontiguousarray(words), order))).astype(np.int8)


def unpacked(words: Any, order: Order, low_bits: Any = None) -> Any:
    """Give the codes of `pack`, or of `packed_apart`, as if without a sign: int32 of NumPy or JAX, as the words are."""
    rows, count = words.shape
    like: Any = np if isinstance(words, np.ndarray) else jnp
    axes, turn = ORDERS[order]
    # Shifts by an array, since XLA would put the parts of a stack in memory before it joins them with the rest.
    places = 4 * like.arange(WORD, dtype=np.int32)
    codes = words[..., None] >> places & 15
    if low_bits is not None:
        few = bits_of(words, low_bits) - 4
        low = (low_bits[..., None] >> few * like.arange(4 // few, dtype=np.int32)).reshape(rows, count)
        codes = codes << few | low[..., None] >> places & (1 << few) - 1
    lanes = codes.reshape(rows, count * WORD // BLOCK, axes[turn[0]], RUNS, axes[turn[1]], axes[turn[2]])
    place = [2 + at for at in np.argsort([turn[0], -1, turn[1], turn[2]], kind="stable")]
    return lanes.transpose(0, 1, *place).reshape(rows, count * WORD)


def bits_of(words: Any, low_bits: Any) -> int:
    """Give the bits of codes in such words, by their shapes; `rest` is None where they have four."""
    return 4 if low_bits is None else 4 + 4 * low_bits.shape[-1] // words.shape[-1]


def signed(codes: Int32[Array, "rows cols"] | Any, bits: int = 4) -> Any:
    """Turn codes that are not negative into the integers that their bits are in two's complement."""
    return (codes ^ 1 << bits - 1) - (1 << bits - 1)
