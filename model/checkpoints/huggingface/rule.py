"""`Rule`, the interface for all layouts of quantized matrices in Hugging Face's checkpoints, and packing functions."""

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
ROWS = 32  # zero points of 32 rows fill whole int32 words, for any number of bits per zero point


class StoredArray(NamedTuple):
    """The expected shape and dtypes of a tensor that belongs to a quantized module."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # we read any of these dtypes, and write the first
    optional: bool = False
    any_length: bool = False  # whether a vector of any length is accepted


class Rule(ABC):
    """A layout of quantized modules: which tensors a module has, and how to decode them."""

    form: Form  # see `Codes.form`
    zeros: bool  # whether codes have zero points
    roles: tuple[Role, ...] = QUANTIZABLE  # roles of the weights that may be quantized
    row_parts: tuple[str, ...] = ()  # tensors, besides "weight", that we can split along the rows of a fused matrix

    @abstractmethod
    def group_of(self, cols: int) -> int:
        """Return the number of columns that share a scale, in a matrix with `cols` columns."""

    @abstractmethod
    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        """Return the tensors of a quantized module by name.

        The module is quantized if its file has the first of these tensors, in a dtype that its `StoredArray` allows.
        """

    def in_groups(self, arrays: Arrays, cols: int) -> bool:
        """Tell whether columns that share a scale are adjacent. If not, `part` returns a scale for each column."""
        del arrays, cols
        return True

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        """Raise ValueError if the tensors of a module with a matrix [rows, cols] have impossible sizes or values."""
        del arrays, rows, cols

    def of(self, module: str) -> "Rule | None":
        """Return the layout of the module named `module`; None if the module is not quantized.

        A rule for a model with several layouts overrides this method. By default, all modules have this layout.
        """
        del module
        return self

    @abstractmethod
    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Part:
        """Unpack the rows from `start` to `stop` into codes and scales.

        `start` is a multiple of `ROWS`; `stop` is a multiple of `ROWS` or the end of the matrix. If `in_groups` is
        False, the result has a scale for each column.
        """


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 words into codes of 4 or 8 bits, the lowest bits first. The result is [*batch, codes] in uint8."""
    stored = words.astype("<i4").view(np.uint8)
    return nibbles(stored) if bits == 4 else stored


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes of 4 or 8 bits into int32 words, padded with zeros; `unpack_words` is the inverse.

    >>> [hex(word) for word in pack_words(np.arange(1, 10, dtype=np.uint8), 4)]
    ['-0x789abcdf', '0x9']
    """
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % (32 // bits))])
    stored = pack_nibbles(padded) if bits == 4 else padded
    return np.ascontiguousarray(stored).view("<i4")


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack an even number of 4-bit codes into bytes, two per byte, the first in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nibbles(pairs: np.ndarray) -> np.ndarray:
    """Unpack bytes into two 4-bit codes each, the low half first. The result is [*batch, codes] in uint8."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Decode scales e8m0 to float32. A power of two is stored as its exponent plus 127; 255 means NaN.

    >>> powers_of_two(np.array([127, 126, 255], np.uint8))
    array([1. , 0.5, nan], dtype=float32)
    """
    powers = np.ldexp(1.0, exponents.astype(np.int32) - mx.BIAS)
    return np.where(exponents == 255, np.nan, powers).astype(np.float32)


def in_order(g_idx: np.ndarray, group: int) -> bool:
    """Tell whether the columns of each group are adjacent; `g_idx` has the group of each column."""
    return np.array_equal(g_idx, np.arange(len(g_idx)) // group)


def check_groups(name: str, g_idx: np.ndarray | None, groups: int) -> None:
    """Raise ValueError if the tensor `name` (with the contents `g_idx`) has a group outside 0 to `groups` - 1."""
    if g_idx is not None and not (g_idx.min() >= 0 and g_idx.max() < groups):
        raise ValueError(f"{name} has groups from {g_idx.min()} to {g_idx.max()}, expected 0 to {groups - 1}")


def check_whole_groups(cols: int, group: int) -> None:
    """Raise ValueError if a row of `cols` weights is not a whole number of groups."""
    if cols % group:
        raise ValueError(f"rows have {cols} weights, expected a multiple of {group} (the group size)")


def group_size(size: int | None) -> int | None:
    """Return `size`, or None if a group is a whole row (files then have null or -1)."""
    return size if size is not None and size > 0 else None
