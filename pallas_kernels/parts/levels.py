"""The levels of four-bit codes as integers: sums of bytes times powers of 256.

The tensor cores multiply bytes. So a level is written as bytes, its digits to the base 256. The lowest digits of all
levels are the first *plane*, the next digits the second plane, and so on (`integer_mma.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CODES = 16


@dataclass(frozen=True)
class Levels:
    """Sixteen levels: integers times a power of two."""

    integers: tuple[int, ...]
    unit: float
    group: int  # columns with a common scale

    @classmethod
    def of(cls, levels: Iterable[float], *, unit: float, group: int) -> "Levels":
        """Round levels to multiples of a power of two.

        >>> Levels.of([0.0, 0.5, *[1.5] * 14], unit=0.5, group=32).integers[:3]
        (0, 1, 3)
        """
        return cls(tuple(round(float(level) / unit) for level in levels), unit, group)

    @property
    def planes(self) -> list[tuple[int, ...]]:
        """The digits of the levels to the base 256, each from -128 to 127, the lowest first.

        >>> Levels((300, -129, *[0] * 14), 1.0, 32).planes == [(44, 127, *[0] * 14), (1, -1, *[0] * 14)]
        True
        """
        quotients, planes = list(self.integers), []
        while not planes or any(quotients):
            digits = [(integer + 128) % 256 - 128 for integer in quotients]
            quotients = [(integer - digit) // 256 for integer, digit in zip(quotients, digits, strict=True)]
            planes.append(tuple(digits))
        return planes

    @property
    def tables(self) -> list[list[int]]:
        """The planes, each as four words of four bytes.

        >>> [f"{word:08x}" for word in Levels((1, -1, *[0] * 14), 1.0, 32).tables[0]]
        ['0000ff01', '00000000', '00000000', '00000000']
        """
        return [np.array(plane, np.int8).view("<u4").tolist() for plane in self.planes]
