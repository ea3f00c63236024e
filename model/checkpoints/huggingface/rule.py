"""The common interface of the layouts of quantized matrices in Hugging Face's checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Form, Part
from llamaspec.model.tensors import QUANTIZABLE, Role
from llamaspec.reference.quantizers import mx

Arrays = Mapping[str, np.ndarray]

FLOATS = ("float32", "bfloat16", "float16", "float64")
INT32 = ("int32",)
ROWS = 32  # the zero points of 32 rows fill whole int32 words, for any number of bits


class StoredArray(NamedTuple):
    """A required or optional tensor of a quantized module."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # we write the first
    optional: bool = False
    any_length: bool = False  # a vector of any length


class Rule(ABC):
    """The layout of a checkpoint's quantized modules."""

    form: Form
    zeros: bool
    roles: tuple[Role, ...] = QUANTIZABLE  # of the weights that may be quantized
    row_parts: tuple[str, ...] = ()  # tensors, other than "weight", that can be cut along the rows of a fused matrix

    @abstractmethod
    def group_of(self, cols: int) -> int:
        """Return how many columns share a scale, in a matrix with `cols` columns."""

    @abstractmethod
    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        """Return the tensors of a quantized module. A module that has the first one, with its dtype, is quantized."""

    def in_groups(self, arrays: Arrays, cols: int) -> bool:
        """Return whether columns that share a scale are adjacent; if not, each column is a group."""
        del arrays, cols
        return True

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        """Raise ValueError for impossible sizes or values."""
        del arrays, rows, cols

    def of(self, module: str) -> "Rule | None":
        """Return the layout of a module, if several are used; None if the module is not quantized."""
        del module
        return self

    @abstractmethod
    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Part:
        """Return the rows from `start` to `stop`, which are multiples of `ROWS` or the end of the matrix.

        Every column has a scale if columns are not `in_groups`.
        """


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 words into codes of 4 or 8 bits [*batch, codes], uint8, the lowest bits first."""
    stored = words.astype("<i4").view(np.uint8)
    return nibbles(stored) if bits == 4 else stored


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes into int32 words, the inverse of `unpack_words`, padded with zeros.

    >>> [hex(word) for word in pack_words(np.arange(1, 10, dtype=np.uint8), 4)]
    ['-0x789abcdf', '0x9']
    """
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % (32 // bits))])
    stored = pack_nibbles(padded) if bits == 4 else padded
    return np.ascontiguousarray(stored).view("<i4")


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack an even number of 4-bit codes into bytes."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nibbles(pairs: np.ndarray) -> np.ndarray:
    """Unpack bytes into 4-bit codes [*batch, codes], uint8, the low half first."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Decode scales e8m0 to float32: an exponent plus 127, or 255 for NaN.

    >>> powers_of_two(np.array([127, 126, 255], np.uint8))
    array([1. , 0.5, nan], dtype=float32)
    """
    powers = np.ldexp(1.0, exponents.astype(np.int32) - mx.BIAS)
    return np.where(exponents == 255, np.nan, powers).astype(np.float32)


def in_order(g_idx: np.ndarray, group: int) -> bool:
    """Tell whether columns that share a scale are adjacent, where `g_idx` names the group of each column."""
    return np.array_equal(g_idx, np.arange(len(g_idx)) // group)


def check_groups(name: str, g_idx: np.ndarray | None, groups: int) -> None:
    """Raise ValueError if `g_idx` names a group that does not exist."""
    if g_idx is not None and not (g_idx.min() >= 0 and g_idx.max() < groups):
        raise ValueError(f"{name} names groups from {g_idx.min()} to {g_idx.max()}, but there are {groups}")


def group_size(size: int | None) -> int | None:
    """Return the group size, or None for a whole row, which files write as -1."""
    return size if size is not None and size > 0 else None
