r"""Draws: a draw has a few variables with small, readable values, from which a contract makes all of its arrays.

Hypothesis chooses, prints and shrinks these values, never the elements of an array. An array is `Values`: a kind, a
seed and a power of two. SplitMix64 (Steele, Lea & Flood, 2014, https://doi.org/10.1145/2714064.2660195) computes its
numbers with integers only, so that a replay file gives the same inputs on every machine and in every version.
"""

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Shaped, UInt64

from llamaspec.verify.bounds.precision import Precision

Draw = dict[str, Any]  # a value by the name of each draw of a contract, and of the law that is checked, if any
LAW = "law"  # the draw that names the law to check
AGAIN = "again"  # a value of that draw: call with other inputs in between, and compare two calls with the same inputs
LAYOUT = "layout"  # the draw that names the place of the arrays in memory; missing: contiguous
OF_THE_CALL = (LAW, LAYOUT)  # draws that decide the calls, not the arguments

WORD = 2.0**64
LARGEST = 2**24  # most numbers in an array: a mistyped size must not fill the memory


def _normal(words: UInt64[np.ndarray, " n"], width: int) -> Float[np.ndarray, " n"]:
    """Nearly normal numbers with variance 1: sums of four uniform numbers."""
    total = np.full(words.shape, -2 * 0xFFFF, np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).view(np.int64)
    return total * (3**0.5 / 0x10000)


def _positive(words: np.ndarray, width: int) -> np.ndarray:
    return 1 + words / WORD


def _equal(words: np.ndarray, width: int) -> np.ndarray:
    return np.broadcast_to(_positive(words[:1], width), words.shape)


def _outlier(words: np.ndarray, width: int) -> np.ndarray:
    where = np.arange(len(words)) % width == int(words[0] % np.uint64(width)) if len(words) else False
    return np.where(where, 1024.0, 1.0) * _normal(words, width)


def _last_column(words: np.ndarray, width: int) -> np.ndarray:
    return np.where(np.arange(len(words)) % width == width - 1, 8.0, _normal(words, width))


def _wide(words: np.ndarray, width: int) -> np.ndarray:
    sign = np.where(words & np.uint64(1), -1.0, 1.0)
    return sign * np.ldexp(_positive(words, width), (words % np.uint64(25)).astype(int) - 12)


def _halves(words: np.ndarray, width: int) -> np.ndarray:
    """Draw numbers halfway between two integer codes, to test the rounding of ties.

    The first number of each block of 32 is the largest code, so the block's scale is 1.
    """
    largest = (127, 7, -8)[int(words[0] % np.uint64(3))] if len(words) else 0
    integers = (words % np.uint64(2 * abs(largest) or 1)).astype(np.float64) - abs(largest)
    return np.where(np.arange(len(words)) % width % 32 == 0, float(largest), integers + 0.5)


# Each comment says why a kind is drawn. Counterexamples shrink to the first.
KINDS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "integers": lambda words, width: (words % np.uint64(9)).astype(np.float64) - 4,  # exact, with ties
    "normal": _normal,  # sums that cancel
    "positive": _positive,  # sums that never do: the sharp probe for a narrow accumulator
    "equal": _equal,
    "outlier": _outlier,  # one feature a thousand times the others, as activations have (arXiv:2208.07339)
    "last": _last_column,  # the largest number of a row is its last: a running maximum rises there
    "wide": _wide,  # magnitudes from 2^-12 to 2^13 in one row
    "halves": _halves,  # ties, for ops that round to whole numbers
    "zeros": lambda words, width: np.where(words & np.uint64(1), -0.0, 0.0),  # zeros of both signs
    "denormal": lambda words, width: (words / WORD - 0.5) * 2,  # below the dtype's smallest normal number
}


# Descriptions for a counterexample, before the multiplication by a power of two.
MEANINGS = {
    "integers": "integers from -4 to 4",
    "normal": "nearly normal numbers",
    "positive": "numbers from 1 to 2",
    "equal": "one number in all places",
    "outlier": "normal numbers, one feature 1,024 times larger",
    "last": "normal numbers, the last of each row 8",
    "wide": "numbers of both signs from 2^-12 to 2^13",
    "halves": "numbers halfway between two integers",
    "zeros": "zeros of both signs",
    "denormal": "numbers below the smallest normal number",
}


@dataclass(frozen=True)
class Values:
    """Contents of an array: a kind of numbers, a seed, and a power of two that scales them.

    >>> str(Values("normal", seed=3, exponent=-2))
    'normal(3) * 2**-2'
    """

    kind: str
    seed: int = 0
    exponent: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.seed})" + (f" * 2**{self.exponent}" if self.exponent else "")

    @staticmethod
    def parse(text: str) -> "Values":
        """Parse the output of `str`, with or without spaces. Raises ValueError for any other string.

        >>> Values.parse("normal(3)*2**-2")
        Values(kind='normal', seed=3, exponent=-2)
        """
        match = re.fullmatch(r"(\w+)\((\d+)\)(?: *\* *2\*\*(-?\d+))?", text, re.ASCII)
        if not match or match[1] not in KINDS:
            raise ValueError(f"expected kind(seed) * 2**exponent, got {text!r}")
        return Values(match[1], int(match[2]), int(match[3] or 0))

    def array(self, name: str, *shape: int, precision: Precision, around: float = 0.0) -> Shaped[np.ndarray, "..."]:
        """Make an array of this shape for the argument `name`. Arguments with different names get different numbers.

        We add `around` to every number and clip numbers that are too large for the dtype. Raises ValueError for more
        than `LARGEST` numbers.
        """
        width = max(shape[-1], 1)
        words = _words(self.seed, name, shape)
        numbers = KINDS[self.kind](words, width)
        if self.kind == "denormal":
            numbers = numbers * precision.normal
        else:
            numbers = np.ldexp(numbers, self.exponent)
        if around:  # adding 0 would turn -0 into 0
            numbers = numbers + around
        return np.clip(numbers, -precision.largest, precision.largest).reshape(shape).astype(precision.dtype)


def _words(seed: int, name: str, shape: tuple[int, ...]) -> UInt64[np.ndarray, " count"]:
    """Draw 64 random bits for each number of an array with SplitMix64."""
    count = prod(shape)
    if count > LARGEST:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{name}: an array has at most {LARGEST} numbers, got {sizes} = {count}")
    start = np.array([(seed << 32) + zlib.crc32(name.encode())], np.uint64)
    z = _mix(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(z)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def integers(seed: int, name: str, *shape: int, below: int) -> Shaped[np.ndarray, "..."]:
    """Draw int32 numbers from 0 to `below` - 1. Raises ValueError for more than `LARGEST` numbers.

    >>> integers(0, "tokens", 2, 3, below=10).tolist()
    [[3, 3, 9], [6, 8, 4]]
    """
    return (_words(seed, name, shape) % np.uint64(below)).astype(np.int32).reshape(shape)


SEEDS = 1000  # arrays of each kind
seeds = st.integers(0, SEEDS - 1)


def values(
    low: int = -8, high: int = 8, *, kinds: Iterable[str] = KINDS, without: Iterable[str] = ()
) -> st.SearchStrategy[Values]:
    """Draw arrays with typical magnitudes from 2^low to 2^high; zeros and subnormal numbers are smaller."""
    chosen = [kind for kind in kinds if kind not in set(without)]
    return st.builds(Values, kind=st.sampled_from(chosen), seed=seeds, exponent=st.integers(low, high))


# Names for the scores that are -inf.
HIDDEN = ("none", "first row", "second half", "every other", "all but the last", "all")
hidden = st.sampled_from(HIDDEN)


def hide(which: str, rows: int, n: int) -> Bool[np.ndarray, "rows n"]:
    """Make a mask that is True for hidden scores; `which` is one of `HIDDEN`.

    >>> hide("second half", 1, 3).tolist()
    [[False, True, True]]
    """
    at = np.broadcast_to(np.arange(n), (rows, n))
    match which:
        case "first row":
            return np.broadcast_to(np.arange(rows)[:, None] == 0, (rows, n))
        case "second half":
            return at >= n // 2
        case "every other":
            return at % 2 == 1
        case "all but the last":
            return at < n - 1
        case "all":
            return at >= 0
        case _:
            return at < 0


def sizes(*borders: int, most: int) -> st.SearchStrategy[int]:
    """Draw lengths at which loops over blocks may go wrong: 1, small primes, and near each border and its double.

    >>> sizes(8, most=20)
    sampled_from([1, 2, 3, 5, 7, 8, 9, 15, 16, 17])
    """
    edges = {1, 2, 3, 5, 7, *(n for b in borders for n in (b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1))}
    return st.sampled_from(sorted(n for n in edges if 0 < n <= most))
