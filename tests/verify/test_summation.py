"""The model of a sum's rounding errors covers real float32 sums, and is small enough to reveal a lost term."""

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import U, precision
from llamaspec.verify.bounds.summation import roundings
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.draws.draw import Values
from llamaspec.verify.judging.examination import Examination, examine

RANDOM = np.random.default_rng(1)
TERMS = {
    "normal scores": lambda n: np.exp(RANDOM.standard_normal(n)),
    "equal": lambda n: np.full(n, 0.7),
    "few values": lambda n: np.exp(RANDOM.integers(-4, 5, n) - 4.0),
    "one large, the others equal": lambda n: np.append(np.full(n - 1, 0.3e-3), 1.0),
    "one large, the others tiny": lambda n: np.append(np.full(n - 1, 5e-8), 1.0),
    "mostly tiny": lambda n: np.exp(16 * RANDOM.standard_normal(n) - 64),
    "products": lambda n: np.abs(RANDOM.standard_normal(n) * RANDOM.standard_normal(n)),
}


def added(terms: np.ndarray) -> float:
    """Add float32 numbers one after the other."""
    return float(np.cumsum(terms, dtype=np.float32)[-1])


@pytest.mark.parametrize("n", [2, 100, 8321])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_running_and_blocked_sums_stay_within_the_model(terms, n: int):
    for _ in range(20):
        t = terms(n).astype(np.float32)
        exact = t.astype(np.float64)
        model = roundings(exact[None], lambda weights: weights.sum(axis=-1, keepdims=True))
        for order in (t, t[::-1]):
            assert abs(added(order) - exact.sum()) <= model.running[0, 0]
            blocks = np.array_split(order, int(np.ceil(np.sqrt(n))))
            blocked = added(np.array([added(block) for block in blocks], np.float32))
            assert abs(blocked - exact.sum()) <= model.blocked[0, 0]


def test_a_running_sum_of_equal_terms_comes_near_to_the_model():
    t = np.full(8321, 0.7, np.float32)
    exact = t.astype(np.float64)
    running = roundings(exact[None], lambda weights: weights.sum(axis=-1, keepdims=True)).running[0, 0]
    assert abs(added(t) - exact.sum()) > running / 8


def examined(softmax, kind: str = "normal") -> Examination:
    draw = {"rows": 1, "n": 8321, "x": Values(kind, 1), "around": 0.0, "hidden": "none"}
    return examine(CONTRACTS["softmax"], Direct(softmax), precision("float32"), draw)


def in_blocks(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    blocks = np.array_split(weights, int(np.ceil(np.sqrt(x.shape[-1]))), axis=-1)
    total = np.float32(0)
    for block in blocks:
        total = total + np.cumsum(block, axis=-1, dtype=np.float32)[..., -1:]
    return weights / total


@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_a_blocked_sum_needs_no_explanation(kind: str):
    examination = examined(in_blocks, kind)
    assert examination.finding is None and not examination.explained


def test_the_report_compares_a_running_sum_with_a_blocked_one():
    """The report of a running sum states how much more exact a sum in blocks would be.

    For equal terms, the model gives n / 2 = 4160 roundings for one sum, and 92 for 92 blocks of 91 terms.
    """

    def running(x: np.ndarray) -> np.ndarray:
        weights = np.exp(x - x.max(axis=-1, keepdims=True))
        return weights / np.cumsum(weights, axis=-1, dtype=np.float32)[..., -1:]

    def at_the_limit(x: np.ndarray) -> np.ndarray:
        return (running(x) * (1 + x.shape[-1] * U / 3)).astype(np.float32)

    explained = examined(at_the_limit, "equal").explained
    assert explained.endswith(
        "which a running sum of 8,321 terms explains; a sum in blocks would be 44 times as exact"
    ), explained


def drop_the_last(x: np.ndarray) -> np.ndarray:
    """Compute softmax, but with a sum that is too small by the mean of its n terms.

    So the result has a relative error of about 1 / n, which is 2016 u for n = 8,321.
    """
    weights = np.exp(x - x.max(axis=-1, keepdims=True)).astype(np.float64)
    total = weights.sum(axis=-1, keepdims=True)
    return (weights / (total - total / x.shape[-1])).astype(np.float32)


def twelve_times(x: np.ndarray) -> np.ndarray:
    """Return a softmax that is off by 12 times the error that the model allows for one running sum."""
    p = IMPLEMENTATIONS["softmax"].function(x).astype(np.float64)
    model = roundings(p, lambda weights: weights.sum(axis=-1, keepdims=True))
    return (p * (1 + 12 * model.running)).astype(np.float32)


@pytest.mark.parametrize("softmax", [drop_the_last, twelve_times])
def test_an_error_that_no_running_sum_explains_is_a_finding(softmax):
    finding = examined(softmax).finding
    assert finding is not None and finding.kind in ("suspicious", "value")
