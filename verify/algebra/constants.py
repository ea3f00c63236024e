"""Read floating-point constants as the numbers that an author meant: 1e-5, 1/3, 1/sqrt(128), log2(e).

A kernel holds such a number rounded to its dtype, and the definition holds it rounded to float64. Both must become the
same element of the field. So we look for a simple number within one unit in the last place: a short decimal, a ratio of
small integers, the square root of such a ratio, and any of these times or divided by log(2), sqrt(pi) or pi. If there
is none, the constant stands for itself, or for a ratio of larger integers.
"""

import math
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from llamaspec.verify.algebra.primes import Primes

SMALL = 128  # largest numerator and denominator of a ratio that counts as simple
LARGE = 4096  # the same for a ratio that we try last
RECIPROCAL = 2**20  # largest n of a constant 1/n
ROOT = 2**14  # largest n of a constant sqrt(n), sqrt(1/n) or log(2)/n
DIGITS = 4  # digits of a decimal that counts as simple
LAST_DIGITS = 6  # the same for a decimal that we try last
NARROW = 1e-6  # a dtype with a larger rounding error, as bfloat16, holds only simpler constants
NARROW_SMALL = 16
NARROW_RECIPROCAL = 256


SYMBOLS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (0, -2), (0, 2))  # powers of log(2) and of sqrt(pi)


class Constant(NamedTuple):
    """The number ratio * sqrt(root) * log(2)^logs * sqrt(pi)^pis."""

    ratio: Fraction
    root: Fraction = Fraction(1)
    logs: int = 0
    pis: int = 0
    literal: bool = False  # not a simple number: the author may have meant another one

    def __float__(self) -> float:
        return float(self.ratio) * float(self.root) ** 0.5 * math.log(2) ** self.logs * math.pi ** (self.pis / 2)

    def modulo(self, primes: Primes) -> tuple[int, int]:
        """Return the residues of the number. Raises ZeroDivisionError if a denominator is 0 modulo a prime."""
        residues = []
        for modulus, log2, pi in zip(primes.moduli, primes.log2, primes.root_of_pi, strict=True):
            numbers = (self.ratio.numerator, self.ratio.denominator, self.root.numerator, self.root.denominator)
            numerator, denominator, above, below = (number % modulus for number in numbers)
            if not denominator or not below:
                raise ZeroDivisionError(f"{self.ratio} has no residue")
            exponent = (modulus + 1) // 4
            roots = pow(above, exponent, modulus) * pow(pow(below, exponent, modulus), -1, modulus)
            symbols = pow(log2, self.logs, modulus) * pow(pi, self.pis, modulus)
            residues.append(numerator * pow(denominator, -1, modulus) * roots * symbols % modulus)
        return residues[0], residues[1]


@cache
def constant(value: float, dtype: str) -> Constant:
    """Find the simple number for a finite constant of a dtype.

    >>> constant(float(np.float32(1e-5)), "float32").ratio, constant(8**-0.5, "float64").root
    (Fraction(1, 100000), Fraction(1, 8))
    """
    if value == int(value):
        return Constant(Fraction(int(value)))
    unit = 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1)
    sign, size = Fraction(int(math.copysign(1, value))), abs(value)
    decimal, digits = _decimal(size, dtype)
    if digits <= (DIGITS // 2 if unit > NARROW else DIGITS):
        return Constant(sign * decimal)
    for logs, pis in SYMBOLS:
        most = RECIPROCAL if (logs, pis) == (0, 0) else ROOT
        if simple := _simple(size / math.log(2) ** logs / math.pi ** (pis / 2), unit, most):
            return Constant(sign * simple.ratio, simple.root, logs, pis)
    if unit < NARROW:
        if digits <= LAST_DIGITS:
            return Constant(sign * decimal)
        ratio = Fraction(size).limit_denominator(LARGE)
        if ratio.numerator <= LARGE and _near(ratio, size, unit):
            return Constant(sign * ratio, literal=True)
    return Constant(Fraction(value), literal=True)


def _near(number: Fraction, of: float, unit: float) -> bool:
    """Tell whether the numbers differ by at most a unit in the last place: two rounding errors."""
    return abs(float(number) - of) <= 2 * unit * of


def _simple(size: float, unit: float, reciprocal: int) -> Constant | None:
    """Find a ratio of small integers, or the square root of one, within a unit in the last place.

    The ratio 1/n may have an n up to `reciprocal`.
    """
    small = NARROW_SMALL if unit > NARROW else SMALL

    def ratio_near(number: float, error: float, most: int) -> Fraction | None:
        most = NARROW_RECIPROCAL if unit > NARROW else most
        for ratio in (Fraction(number).limit_denominator(small), Fraction(1, max(1, round(1 / number)))):
            above, below = ratio.numerator, ratio.denominator
            allowed = (above == 1 and below <= most) or (below == 1 and above <= ROOT) or max(above, below) <= small
            if above and allowed and _near(ratio, number, error):
                return ratio
        return None

    if ratio := ratio_near(size, unit, reciprocal):
        return Constant(ratio)
    if square := ratio_near(size * size, 2 * unit, ROOT):
        return Constant(Fraction(1), square)
    return None


def _decimal(size: float, dtype: str) -> tuple[Fraction, int]:
    """Return the shortest decimal that rounds to the constant, and the number of its digits."""
    text = str(np.dtype(getattr(ml_dtypes, dtype, dtype)).type(size))
    digits = text.partition("e")[0].replace(".", "").strip("0")
    return Fraction(text), len(digits)
