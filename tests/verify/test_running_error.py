"""Error bounds in extreme cases that the random inputs of the contracts do not reach."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import U
from llamaspec.verify.bounds.running_error import routed
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.contract import Expected

GATE, UP = np.array([[-20.0, -3.0, -1.0, -0.1, 0.5, 6.0]], np.float32), np.full((1, 6), 3.0, np.float32)
GATED = {"gate": GATE, "up": UP}
X = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
EIGHT, P = np.full(64, 8.0, np.float32), np.full((3, 64), 1 / 64, np.float32)


def at_least_1(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 1)


def of_softmax_backward(y: np.ndarray) -> np.ndarray:
    return P * (3 * np.abs(X) + (64 + 3) * np.sum(P * np.abs(X), axis=-1, keepdims=True))


# For each op: the bound's formula as its contract prints it, arguments, and the bound in units of u.
PRINTED: dict[str, tuple[str, dict, Callable[[np.ndarray], np.ndarray]]] = {
    "rmsnorm": ("(n/2 + 9) u |y|", {"x": X, "weight": EIGHT, "eps": 1e-6}, lambda y: (64 / 2 + 9) * np.abs(y)),
    "swiglu": ("(8 + 2 max(-gate, 1)) u |y|", GATED, lambda y: (8 + 2 * at_least_1(-GATE)) * np.abs(y)),
    "gelu": ("7.84 u |x|", {"x": GATE}, lambda y: 7.84 * np.abs(GATE) + 2 * np.abs(y)),
    "geglu": ("7.84 u |gate up|", GATED, lambda y: 7.84 * np.abs(GATE * UP) + 3 * np.abs(y)),
    "clamped_swiglu": (
        "(9 + 5 max(-1.702 gate, 1)) u |y|",
        GATED,
        lambda y: (9 + 5 * at_least_1(-1.702 * GATE)) * np.abs(y),
    ),
    "softmax_backward": ("p (3 u |dp| + gamma_(n+3) sum p |dp|)", {"p": P, "dp": X}, of_softmax_backward),
}


@pytest.mark.parametrize("op", PRINTED)
def test_the_formula_that_is_printed_is_the_bound(op: str):
    contract, (text, arguments, formula) = CONTRACTS[op], PRINTED[op]
    assert text in contract.bound
    positional, named = contract.split(arguments)
    expected = contract.expect(*positional.values(), **named)
    assert isinstance(expected, Expected)
    np.testing.assert_allclose(expected.hard, U * formula(expected.value), rtol=1e-3)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95, 1.0])
def test_weights_of_experts_stay_within_their_bound_however_uncertain_probabilities_are(rate):
    p = np.array([[0.6, 0.25, 0.1, 0.05]])
    chosen, weights = routed(np.ones((1, 1)), np.log(p).T, p, rate * p, experts_per_token=3, renormalized=True)
    for signs in product((-1, 1), repeat=3):
        computed = np.take_along_axis(p, chosen, axis=-1) * (1 + rate * np.array(signs))
        if total := computed.sum():
            assert np.all(np.abs(computed / total - weights.value) <= weights.error)
