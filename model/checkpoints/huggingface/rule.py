"""What the ways to store quantized matrices in Hugging Face's checkpoints have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from model.checkpoints.checkpoint import Form
from reference.quantizers.affine import Affine
from reference.quantizers.blocks import Quantized

Arrays = Mapping[str, np.ndarray]

FLOATS = ("float32", "bfloat16", "float16")
INT32 = ("int32",)
ROWS = 32  # zero points of as many rows fill whole words of int32, whatever their bits


class Stored(NamedTuple):
    """A tensor that a quantized module must have, or may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # the first is what we write
    optional: bool = False
    any_length: bool = False  # of a vector whose length the file alone knows


class Rule(ABC):
    """How a checkpoint stores its quantized modules."""

    form: Form
    zeros: bool

    @abstractmethod
    def group_of(self, cols: int) -> int:
        """Columns that share a scale, in a matrix with so many."""

    @abstractmethod
    def stored(self, rows: int, cols: int) -> dict[str, Stored]:
        """The tensors of a module, the first of which no plain module has."""

    def in_groups(self, arrays: Arrays, cols: int) -> bool:
        """Whether columns that share a scale are neighbors; else each counts as a group of its own."""
        del arrays, cols
        return True

    def check(self, arrays: Arrays, rows: int, cols: int) -> None:
        """Raise ValueError for sizes or values that cannot be meant."""
        del arrays, rows, cols

    @abstractmethod
    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Quantized | Affine:
        """Some rows of a matrix; start and stop are multiples of `ROWS`, unless they are the ends.

        With a scale for each column where they are not `in_groups`.
        """


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 4 or 8 bits [*batch, codes], uint8, of words of int32, the first lowest."""
    stored = words.astype("<i4").view(np.uint8)
    return nibbles(stored) if bits == 4 else stored


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words of int32 that `unpack_words` takes apart, zeros behind the last code.

    >>> [hex(word) for word in pack_words(np.arange(1, 10, dtype=np.uint8), 4)]
    ['-0x789abcdf', '0x9']
    """
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % (32 // bits))])
    stored = pack_nibbles(padded) if bits == 4 else padded
    return np.ascontiguousarray(stored).view("<i4")


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """The bytes of codes of 4 bits, whose number is even."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nibbles(pairs: np.ndarray) -> np.ndarray:
    """Codes of 4 bits [*batch, codes], uint8, of bytes, the low half first."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def group_size(size: int | None) -> int | None:
    """None for a group that is a row, which files call -1."""
    return size if size is not None and size > 0 else None
