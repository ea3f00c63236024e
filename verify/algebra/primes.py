"""Arithmetic modulo two random primes p and q, with p = 2 q + 1.

The squares modulo p are the powers of one element omega of order q. So omega^x depends only on x modulo q, and

    omega^(x + y) = omega^x omega^y  (mod p)

omega^x stands for exp(x) (Mirage, https://arxiv.org/abs/2405.05751). Both primes are -1 modulo 840. So 2, 3, 5 and 7
are squares modulo p and q, as positive numbers are squares of real numbers, and -1 is not a square.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Int64

BITS = 29  # q has at least this many bits: products of two residues fit int64
STEP = 840
HALF = 16  # bits of the lower half of a residue
TERMS = 2**20  # most products of halves that float64 adds without rounding
WITNESSES = (2, 3, 5, 7)  # Miller-Rabin with these bases is exact below 3,215,031,751

Integers = Int64[np.ndarray, "..."]


def is_prime(number: int) -> bool:
    """Tell whether `number`, which is below 3.2e9, is prime, by the Miller-Rabin test.

    >>> [number for number in range(30) if is_prime(number)]
    [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    """
    if number < 2 or any(number % prime == 0 for prime in WITNESSES):
        return number in WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in WITNESSES:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        if not any((power := power * power % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True


@dataclass
class Primes:
    """The primes of a trial, omega, and elements modulo p and q that stand for log(2) and sqrt(pi)."""

    p: int
    q: int
    omega: int
    log2: tuple[int, int]
    root_of_pi: tuple[int, int]
    key: int  # makes the sines of a trial
    # Notes on the formulas that a trial evaluates.
    odd_roots: list[bool] = field(default_factory=list)  # for each root: whether a number under it was not a square
    products: bool = False  # an exponent is not a sum of inputs
    slack: float = 0.0  # relative error of float64 numbers that an excuse explains
    excuse_text: str = ""

    @classmethod
    def random(cls, rng: np.random.Generator) -> "Primes":
        """Draw primes. There are about 27,000 pairs, with p between 2^30 and 2^31."""
        while True:
            q = STEP * int(rng.integers(2**BITS // STEP + 1, 2 ** (BITS + 1) // STEP)) - 1
            if is_prime(q) and is_prime(2 * q + 1):
                break
        p = 2 * q + 1

        def square(modulus: int) -> int:
            return int(rng.integers(2, modulus - 1)) ** 2 % modulus

        return cls(p, q, square(p), (square(p), square(q)), (square(p), square(q)), int(rng.integers(1, p)))

    def excuse(self, slack: float, reason: str) -> None:
        """Note why equal formulas may have different residues, with float64 numbers that differ by up to `slack`."""
        if slack > self.slack:
            self.slack, self.excuse_text = slack, reason

    @property
    def moduli(self) -> tuple[int, int]:
        return self.p, self.q

    @cached_property
    def _tables(self) -> tuple[Integers, Integers]:
        """List the powers omega^i and omega^(2^15 i) for i < 2^15."""
        tables = []
        for base in (self.omega, pow(self.omega, 2**15, self.p)):
            table = np.ones(1, np.int64)
            while len(table) < 2**15:
                table = np.concatenate([table, table * pow(base, len(table), self.p) % self.p])
            tables.append(table)
        return tables[0], tables[1]

    def exp(self, exponents: Integers) -> Integers:
        """Compute omega^x modulo p, for x from 0 to q - 1."""
        low, high = self._tables
        return low[exponents & (2**15 - 1)] * high[exponents >> 15] % self.p


def power(base: Integers, exponent: int, modulus: int) -> Integers:
    """Compute base^exponent modulo `modulus`, for an exponent of at least 0.

    >>> power(np.array([2, 3]), 5, 7)
    array([4, 5])
    """
    product = np.ones_like(base)
    while exponent:
        if exponent % 2:
            product = product * base % modulus
        base = base * base % modulus
        exponent //= 2
    return product


def inverse(values: Integers, modulus: int) -> Integers:
    """Compute 1 / values; the inverse of 0 is 0."""
    return power(values, modulus - 2, modulus)


def root(values: Integers, modulus: int) -> Integers:
    """Compute x^((m + 1) / 4) modulo m. For a square x, it is the root that is a square itself.

    For any x and y, root(x y) = root(x) root(y).
    """
    return power(values, (modulus + 1) // 4, modulus)


def matmul(a: Integers, b: Integers, modulus: int) -> Integers:
    """Multiply matrices modulo `modulus`. float64 adds the products of halves of 16 bits exactly."""
    total = np.zeros((), np.int64)
    for start in range(0, a.shape[-1], TERMS):
        left, right = a[..., start : start + TERMS], b[..., start : start + TERMS, :]
        halves = [(part & (2**HALF - 1), part >> HALF) for part in (left, right)]
        (low_a, high_a), (low_b, high_b) = ([half.astype(np.float64) for half in pair] for pair in halves)

        def exact(product: np.ndarray) -> Integers:
            return product.astype(np.int64) % modulus

        middle = (exact(low_a @ high_b) + exact(high_a @ low_b)) % modulus
        product = (exact(high_a @ high_b) << HALF) + middle
        total = (total + ((product % modulus) << HALF) + exact(low_a @ low_b)) % modulus
    return np.broadcast_to(total, (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
