"""The layout of 4-, 5- and 6-bit codes in GPU memory, chosen so that tensor cores can read them as bytes.

Eight four-bit codes form a word. A row is divided into blocks of 128 columns, a block into 4 runs of 32, and a run into
4 words of 8 codes. Word 4 t + j of a block belongs to lane t and run j. In a product, four lanes share the 32 columns
of a run (a side in `integer_mma.py`). With this layout, each of them loads 16 adjacent bytes: one word of each of the 4
runs. There are three orders of the columns of a run in its words. The word of lane t has these columns:

    bytes    8 t and on: the first four in the lower halves of its bytes, the next four in the upper halves
    halves   4 t to 4 t + 3 in the lower halves, 16 + 4 t and on in the upper halves: a word has both groups of 16
    table    8 t and on, one after the other: selectors of bytes in a table of levels

Integer codes are in two's complement, or unsigned from 0 to 15. If we mask out the lower half of a byte, the byte is 16
times the code in its upper half.

For codes of 5 and 6 bits, these words have the upper four bits, and separate words have the *low bits*, the lowest one
or two. A word of low bits belongs to 4 (5-bit codes) or 2 (6-bit codes) neighboring words, with i = 0, 1, ... If word i
has a code in some half of a byte, the low bits of the code are in the same half, shifted up by i or 2 i bits. A byte
with the upper four bits in its upper half, and the low bits just below them, is 8 or 4 times the code.
"""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8, Int32

BLOCK = 128  # columns
WIDE_BLOCK = 2 * BLOCK  # codes of 5 and 6 bits have a multiple of this number of columns
RUNS = 4
RUN = BLOCK // RUNS
WORD = 8  # columns

Order = Literal["bytes", "halves", "table"]
# The 32 columns of a run as axes, and the order of these axes in its words: first lanes, then codes in a word.
ORDERS: dict[Order, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "bytes": ((4, 2, 4), (0, 2, 1)),
    "halves": ((2, 4, 4), (1, 2, 0)),
    "table": ((4, 8, 1), (0, 1, 2)),
}


def order_of(group: int, *, levels: bool) -> Order:
    """Choose the order of codes in words, for a group size and for integers or levels."""
    return "table" if levels else "halves" if group == RUN // 2 else "bytes"


def pack(
    codes: Int8[np.ndarray, "rows cols"], order: Order = "bytes", *, lowest: int = -8
) -> Int32[np.ndarray, "rows words"]:
    """Pack codes into words, in one of this module's orders. Codes are in [lowest, lowest + 15].

    Raises ValueError for other codes, and unless cols is a multiple of 128.

    >>> one = np.zeros((1, 128), np.int8)
    >>> one[0, 32 + 2], one[0, 32 + 7] = 1, -1
    >>> [f"{word:08x}" for word in pack(one).view(np.uint32)[0, :4]]  # the second run
    ['00000000', 'f0010000', '00000000', '00000000']
    """
    _, cols = codes.shape
    if cols % BLOCK:
        raise ValueError(f"int4 codes need columns in multiples of {BLOCK}, got {cols}")
    if np.any((codes < lowest) | (codes > lowest + 15)):
        raise ValueError(f"int4 codes must be {lowest} to {lowest + 15}, got {codes.min()} to {codes.max()}")
    return np.asarray(packed((codes & 15).astype(np.uint8), order)).view(np.int32)


def packed_apart(codes: Any, order: Order, *, bits: int) -> tuple[Any, Any]:
    """Pack codes [rows, cols] of 5 or 6 bits. `codes` is a NumPy or JAX array of uint8.

    Returns the words of the upper four bits, and the words of the low bits.

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
    """Pack codes [rows, cols] in [0, 15] into uint32 words. `codes` is a NumPy or JAX array of uint8."""
    rows, cols = codes.shape
    axes, turn = ORDERS[order]
    runs = codes.reshape(rows, cols // BLOCK, RUNS, *axes)
    lanes = runs.transpose(0, 1, 3 + turn[0], 2, 3 + turn[1], 3 + turn[2]).reshape(rows, cols // 2, 2)
    # We make bytes and then view them as words: for shifted words, XLA would write each place of a word to memory.
    return (lanes[..., 0] | lanes[..., 1] << np.uint8(4)).view(np.uint32)


def unpack(words: Int32[np.ndarray, "rows words"], order: Order = "bytes") -> Int8[np.ndarray, "rows cols"]:
    """Unpack words that `pack` made with the default `lowest`. Returns integers from -8 to 7.

    >>> codes = np.arange(-8, 8, dtype=np.int8).repeat(16).reshape(2, 128)
    >>> bool(np.all(unpack(pack(codes)) == codes))
    True
    """
    return np.asarray(signed(unpacked(np.ascontiguousarray(words), order))).astype(np.int8)


def unpacked(words: Any, order: Order, low_bits: Any = None) -> Any:
    """Unpack words made by `pack` or `packed_apart`. Returns unsigned codes, as a NumPy or JAX array of int32."""
    rows, count = words.shape
    like: Any = np if isinstance(words, np.ndarray) else jnp
    axes, turn = ORDERS[order]
    # We shift by an array: XLA would write the parts of a stack to memory before it joins them.
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
    """Return the number of bits per code, from the shapes of the words. Four-bit codes have no `low_bits`."""
    return 4 if low_bits is None else 4 + 4 * low_bits.shape[-1] // words.shape[-1]


def signed(codes: Int32[Array, "rows cols"] | Any, bits: int = 4) -> Any:
    """Convert unsigned codes of `bits` bits to the integers that these bits mean in two's complement."""
    return (codes ^ 1 << bits - 1) - (1 << bits - 1)
