"""For a bound of the same kind, our derivation gives the number that another tool published (docs/others.md)."""

import re

import numpy as np
import pytest

from llamaspec.verify.bounds.carried import Carried, Rounding
from llamaspec.verify.bounds.running_error import exactly, projected
from tests.support.processes import REPOSITORY

TERMS = 1024
DOUBLE = Rounding(unit=2.0**-53, smallest=0.0, largest=float(np.finfo(np.float64).max))
SATIRE = 1.2505552149377763e-12  # the README of github.com/arnabd88/Satire, for large_benchmarks/reduction


def pairwise(x):
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def derived(x: np.ndarray, *, rounded: bool) -> float:
    """Return the derived error bound of a pairwise sum. With `rounded`, it includes one rounding of each input."""
    return float(pairwise(Carried(x, DOUBLE.unit * np.abs(x) * rounded, rounding=DOUBLE)).error)


def test_satire_bounds_a_sum_of_1024_numbers_of_at_most_1_as_we_do():
    assert derived(np.ones(TERMS), rounded=True) == pytest.approx(SATIRE, rel=1e-9)


def worst(draws: int = 200) -> tuple[float, float]:
    """Return our bound for pairwise sums of uniform numbers from -1 to 1, and the largest error, in units of 2^-24."""
    random, bounds, errors = np.random.default_rng(0), [], []
    for _ in range(draws):
        x = random.uniform(-1, 1, TERMS).astype(np.float32)
        errors.append(abs(float(pairwise(x)) - x.astype(np.float64).sum()) * 2**24)
        bounds.append(derived(x.astype(np.float64), rounded=False) * 2**53)
    return max(bounds), max(errors)


def test_the_page_has_the_numbers():
    page = (REPOSITORY / "docs" / "others.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| sum of 1,024 numbers, pairwise \|(.*)\|$", page, re.MULTILINE)
    satire, ours, data, measured = (float(cell.split()[0].replace(",", "")) for cell in row.split("|"))
    bound, error = worst()
    assert satire == pytest.approx(SATIRE * 2**53, rel=1e-9)
    assert ours == pytest.approx(derived(np.ones(TERMS), rounded=False) * 2**53, rel=1e-9)
    assert data == pytest.approx(bound, rel=0.01) and measured == pytest.approx(error, rel=0.1)


def test_a_product_in_any_order_has_the_classical_bound():
    """The derived bound of W x, with n terms added in any order, is the classical one: gamma_n |W| |x|."""
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((3, 512)), random.standard_normal((5, 512))
    n, u = x.shape[1], 2.0**-24
    gamma = n * u / (1 - n * u) * np.abs(x) @ np.abs(weight).T
    np.testing.assert_allclose(projected(exactly(x), weight).error, gamma, rtol=1e-9)
